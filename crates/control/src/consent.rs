//! Changes that take rows away: their authors confirm which ones.

use serde_json::Value;
use tidegate_rules::change::{Operation, kind_name};
use tidegate_rules::rows::{RowKind, RuleRows};

/// How many rows a confirmation names.
const NAMES_MAX: usize = 20;

/// Origin of the operations of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// The author states the operations.
    Edit,
    /// The operations restore earlier rows.
    Rollback,
}

/// Returns what the author of a change that deletes rules, or of a rollback, must confirm: the rows
/// that it removes, changes and restores. `None` for other changes.
pub(super) fn confirmation(
    kind: ChangeKind,
    rule_rows: &RuleRows,
    operations: &[Operation],
) -> Option<String> {
    let (mut removed, mut changed, mut restored) = (Vec::new(), Vec::new(), Vec::new());
    let mut deletes_rule = false;
    for operation in operations {
        let (row_kind, name) = operation.row();
        let row = format!("{} {name:?}", kind_name(row_kind));
        match (rule_rows.row(row_kind, name), operation.body()) {
            (_, None) => {
                deletes_rule |= row_kind == RowKind::Rule;
                removed.push(row);
            }
            (None, Some(_)) => restored.push(row),
            (Some(before), Some(after)) if parsed(&before.body) != parsed(after) => changed.push(row),
            (Some(_), Some(_)) => {}
        }
    }
    let (subject, lists) = match kind {
        ChangeKind::Edit if !deletes_rule => return None,
        ChangeKind::Edit => ("the change", vec![("removes", removed)]),
        ChangeKind::Rollback => {
            ("the rollback", vec![("removes", removed), ("changes", changed), ("restores", restored)])
        }
    };
    let parts: Vec<String> = lists
        .into_iter()
        .filter(|(_, rows)| !rows.is_empty())
        .map(|(does, rows)| format!("{does} {}", listed(&rows)))
        .collect();
    // Rows that differ only in the spacing of their bodies need no confirmation.
    (!parts.is_empty()).then(|| format!("{subject} {}", parts.join(" and ")))
}

/// Bodies are compared by their fields: their order and spacing mean nothing.
fn parsed(body: &str) -> Option<Value> {
    serde_json::from_str(body).ok()
}

fn listed(rows: &[String]) -> String {
    let named = rows.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join(", ");
    match rows.len().saturating_sub(NAMES_MAX) {
        0 => named,
        more => format!("{named}, and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::RuleRow;

    use super::*;

    fn rule_rows() -> RuleRows {
        let row = |name: &str| RuleRow {
            kind: RowKind::Rule,
            name: name.to_owned(),
            body: r#"{"limit":1,"period":"1h"}"#.to_owned(),
            version: 1,
        };
        RuleRows { revision: 1, rows: ["a", "b"].map(row).into(), ..RuleRows::default() }
    }

    fn confirmed(kind: ChangeKind, operations: &[Operation]) -> Option<String> {
        confirmation(kind, &rule_rows(), operations)
    }

    fn put(name: &str, body: &str) -> Operation {
        Operation::Put { kind: RowKind::Rule, name: name.to_owned(), body: body.to_owned() }
    }

    fn delete(kind: RowKind, name: &str) -> Operation {
        Operation::Delete { kind, name: name.to_owned() }
    }

    #[test]
    fn a_deletion_of_rules_must_be_confirmed() {
        let edited = put("b", "{}");
        assert_eq!(confirmed(ChangeKind::Edit, std::slice::from_ref(&edited)), None);
        assert_eq!(confirmed(ChangeKind::Edit, &[delete(RowKind::Override, "vip")]), None);
        let words = confirmed(ChangeKind::Edit, &[edited, delete(RowKind::Rule, "a")]);
        assert_eq!(words.as_deref(), Some("the change removes rule \"a\""));
        let many: Vec<_> = (0..25).map(|at| delete(RowKind::Rule, &format!("r{at}"))).collect();
        let words = confirmed(ChangeKind::Edit, &many).expect("a confirmation");
        assert!(words.ends_with("rule \"r19\", and 5 more"), "{words}");
    }

    #[test]
    fn a_rollback_names_every_row_that_it_touches() {
        let same = put("b", r#"{ "period": "1h", "limit": 1 }"#);
        let back = [delete(RowKind::Rule, "a"), put("b", "{}"), put("c", "{}")];
        assert_eq!(
            confirmed(ChangeKind::Rollback, &back).as_deref(),
            Some("the rollback removes rule \"a\" and changes rule \"b\" and restores rule \"c\"")
        );
        let words = confirmed(ChangeKind::Rollback, &[same, put("c", "{}")]);
        assert_eq!(words.as_deref(), Some("the rollback restores rule \"c\""));
    }
}
