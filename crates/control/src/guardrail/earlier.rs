//! The rules before the recent changes of an author. A series of small changes needs the consent of
//! the one large change that it amounts to.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde::Deserialize;
use tidegate_rules::AddressCover;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};
use tidegate_rules::store::{AuthorChanges, EarlierRow};

use super::overrides::rule_of;
use super::plan::with;

/// How long changes of one author are judged together, in milliseconds. Longer: slower series are
/// noticed; an author more often confirms a change again.
pub(crate) const SERIES_MS: u64 = 24 * 60 * 60 * 1_000;

/// The history that a change of an author is judged by, besides the rules in force.
#[derive(Debug, Default)]
pub(crate) struct AuthorHistory {
    changes: AuthorChanges,
    /// Addresses that emergencies of the author block now.
    pub(crate) blocked: AddressCover,
}

/// Returns the templates that rules refer to, from validated bodies.
fn templates_of(rule_rows: &RuleRows) -> HashSet<String> {
    #[derive(Deserialize)]
    struct TemplateField {
        template: Option<String>,
    }
    let rules = rule_rows.rows_behind(Some(RowKind::Rule), None).iter();
    rules.filter_map(|row| serde_json::from_str::<TemplateField>(&row.body).ok()?.template).collect()
}

impl AuthorHistory {
    pub(crate) fn new(changes: AuthorChanges, blocked: AddressCover) -> Self {
        Self { changes, blocked }
    }

    /// When the first of the earlier changes was made; `None` without any.
    pub(super) fn first_ms(&self) -> Option<u64> {
        self.changes.first_ms()
    }

    /// Whether some of the earlier changes are unknown.
    pub(crate) fn is_partial(&self) -> bool {
        self.changes.is_partial
    }

    /// Returns the rule rows without the changes of the author. Rows of other authors stay, except
    /// overrides of rules that did not exist. So does a template that rows of others refer to.
    pub(super) fn rule_rows(&self, rule_rows: &RuleRows) -> RuleRows {
        let back = |((kind, name), row): (&(RowKind, String), &EarlierRow)| {
            Operation::leaving(*kind, name.clone(), row.body.clone())
        };
        let mut operations: Vec<Operation> = self.changes.rows.iter().map(back).collect();
        let mut before = with(rule_rows, &operations);
        let is_new_template =
            |operation: &Operation| operation.row().0 == RowKind::Template && operation.body().is_none();
        if operations.iter().any(is_new_template) {
            let in_use = templates_of(&before);
            operations
                .retain(|operation| !(is_new_template(operation) && in_use.contains(operation.row().1)));
            before = with(rule_rows, &operations);
        }
        let gone: HashSet<&str> = operations
            .iter()
            .filter(|operation| operation.row().0 == RowKind::Rule && operation.body().is_none())
            .map(|operation| operation.row().1)
            .collect();
        if gone.is_empty() {
            return before;
        }
        let stays = |row: &&RuleRow| {
            row.kind != RowKind::Override || rule_of(&row.body).is_none_or(|rule| !gone.contains(&*rule))
        };
        let rows = before.rows.iter().filter(stays).cloned().collect();
        RuleRows { rows, ..before }
    }

    /// Returns the operations that lead from `before` to the rows after a change, for all rows that
    /// differ.
    pub(super) fn operations(
        &self,
        before: &RuleRows,
        rule_rows: &RuleRows,
        operations: &[Operation],
    ) -> Vec<Operation> {
        let changed: BTreeMap<(RowKind, &str), Option<&str>> =
            operations.iter().map(|operation| (operation.row(), operation.body())).collect();
        let own = self.changes.rows.keys().map(|(kind, name)| (*kind, name.as_str()));
        let dropped = rule_rows.rows_behind(Some(RowKind::Override), None).iter();
        let dropped = dropped.map(|row| (row.kind, row.name.as_str()));
        let is_dropped = |(kind, name): &(RowKind, &str)| before.row(*kind, name).is_none();
        // Without a rule that did not exist before, no override was dropped.
        let has_new =
            self.changes.rows.iter().any(|((kind, _), row)| *kind == RowKind::Rule && row.body.is_none());
        let dropped = dropped.filter(|row| has_new && is_dropped(row));
        let all: BTreeSet<(RowKind, &str)> = own.chain(dropped).chain(changed.keys().copied()).collect();
        let operation = |(kind, name): (RowKind, &str)| {
            let was = before.row(kind, name).map(|row| row.body.as_str());
            let now = rule_rows.row(kind, name).map(|row| row.body.as_str());
            let is = changed.get(&(kind, name)).copied().unwrap_or(now);
            (is != was).then(|| Operation::leaving(kind, name.to_owned(), is.map(str::to_owned)))
        };
        all.into_iter().filter_map(operation).collect()
    }
}
