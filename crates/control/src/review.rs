//! Review of the changes that came into force: the rules that they may have made stricter are
//! watched. If the store does not reply, every look retries, so that no change goes unwatched.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use tidegate_record::{DecisionRecord, RecordVerdict};
use tidegate_rules::change::{ChangeState, Operation};
use tidegate_rules::rows::{RowKind, RuleRows};
use tidegate_rules::store::{Rollback, StoreError};

use crate::applied::AppliedChange;
use crate::control::{Control, let_go};
use crate::denials::{Denials, LoggedCount, REMEMBERED_MAX, WATCHED_MS};
use crate::guardrail::{ApprovedEffect, ChangePlan, RECORDS_MAX, StricterRules, tightened, with};
use crate::node::{ControlEvent, Node, NodeRules};
use crate::plan::PlanError;
use crate::rollback::{AUTOMATIC, may_pass};

/// Rules that were in force until they were replaced.
#[derive(Debug)]
pub(super) struct PreviousRules<N: Node> {
    pub(super) rule_rows: Arc<RuleRows>,
    pub(super) rules: Arc<N::Rules>,
    /// The time of the replacement.
    pub(super) at_ms: u64,
}

/// Changes in force that are not reviewed yet.
#[derive(Debug)]
pub(super) struct UnreviewedChanges<N: Node> {
    /// The revision up to which changes are reviewed.
    noted: u64,
    /// Rules in force before them; `None` if this server has just started.
    before: Option<PreviousRules<N>>,
}

impl<N: Node> UnreviewedChanges<N> {
    /// Returns the changes that came into force before this server started.
    pub(super) fn at_start() -> Self {
        Self { noted: 0, before: None }
    }
}

/// A change and its operations.
struct AppliedOperations {
    applied: AppliedChange,
    operations: Vec<Operation>,
}

/// State before the changes.
struct PriorRules {
    rule_rows: Arc<RuleRows>,
    /// Rules that may deny more since; `None` if unknown. An unknown rule has no baseline.
    stricter: Option<StricterRules>,
}

/// References of a row to other rows.
#[derive(Deserialize)]
struct RowReferences {
    rule: Option<String>,
    template: Option<String>,
}

impl<N: Node> Control<N> {
    /// Measures how long the new rules took to arrive, and watches their effect from now on.
    pub(super) async fn review_applied(self: &Arc<Self>, replaced: PreviousRules<N>) {
        let mut unreviewed = self.unreviewed.lock().await;
        // The review of an earlier change may just have ended the separate count.
        self.with_denials(Denials::set_aside).await;
        match &*unreviewed {
            // All changes since then are compared with the earlier rules.
            Some(_) => self.let_go_of(replaced),
            None => {
                *unreviewed =
                    Some(UnreviewedChanges { noted: replaced.rule_rows.revision, before: Some(replaced) });
            }
        }
        self.note(&mut unreviewed).await;
    }

    /// Looks at changes that could not be looked at before.
    pub(super) async fn review_pending(self: &Arc<Self>) {
        self.note(&mut *self.unreviewed.lock().await).await;
    }

    async fn note(self: &Arc<Self>, unreviewed: &mut Option<UnreviewedChanges<N>>) {
        let Some(changes) = unreviewed else { return };
        if let Err(error) = self.try_note(changes).await {
            return tracing::warn!(%error, "changes that were taken over are not watched yet: tried again");
        }
        self.with_denials(Denials::go_on).await;
        if let Some(replaced) = unreviewed.take().and_then(|noted| noted.before) {
            self.let_go_of(replaced);
        }
    }

    fn let_go_of(&self, PreviousRules { rule_rows, rules, .. }: PreviousRules<N>) {
        self.runtime.spawn(let_go(rules));
        self.runtime.spawn(let_go(Arc::clone(&rule_rows.rows)));
    }

    async fn try_note(self: &Arc<Self>, unreviewed: &mut UnreviewedChanges<N>) -> Result<(), StoreError> {
        let Some(node) = self.node.upgrade() else { return Ok(()) };
        self.take_last_rollback().await?;
        let applied_operations = self.applied_operations(unreviewed, &node).await?;
        let Some(first) = applied_operations.first() else { return Ok(()) };
        let before = if let Some(replaced) = &unreviewed.before {
            self.since_replaced(replaced, &applied_operations, &node).await
        } else {
            self.recall(first.applied.at_ms, &node).await;
            self.since_start(first.applied.revision, &applied_operations, &node).await?
        };
        for AppliedOperations { applied, operations } in applied_operations {
            if let Some(replaced) = &unreviewed.before {
                let ms = replaced.at_ms.saturating_sub(applied.at_ms);
                node.note(ControlEvent::Lagged { ms });
            }
            let revision = applied.revision;
            // An automatic rollback is not watched: the denials that it ends must not undo it.
            if applied.by != AUTOMATIC {
                self.watch_change(&applied, operations, &before).await?;
            }
            unreviewed.noted = revision;
        }
        Ok(())
    }

    /// Returns the changes to look at: all since the rules were replaced; after a start, those that
    /// would still be watched.
    async fn applied_operations(
        &self,
        unreviewed: &UnreviewedChanges<N>,
        node: &N,
    ) -> Result<Vec<AppliedOperations>, StoreError> {
        let since_ms = match unreviewed.before {
            Some(_) => 0,
            None => node.now_ms().saturating_sub(WATCHED_MS),
        };
        let mut applied_operations = Vec::new();
        for applied in self.applied_after(unreviewed.noted).await? {
            if applied.at_ms >= since_ms {
                let operations = self.store.operations(applied.change).await?;
                applied_operations.push(AppliedOperations { applied, operations });
            }
        }
        Ok(applied_operations)
    }

    async fn since_replaced(
        &self,
        replaced: &PreviousRules<N>,
        applied_operations: &[AppliedOperations],
        node: &Arc<N>,
    ) -> PriorRules {
        let (rule_rows, rules) = (Arc::clone(&replaced.rule_rows), Arc::clone(&replaced.rules));
        let operations = all_of(applied_operations);
        let (known, node) = (Arc::clone(&rule_rows), Arc::clone(node));
        let stricter =
            aside(move || tightened((rules.set(), node.rules().set()), &known, &operations, node.now_ms()));
        PriorRules { rule_rows, stricter: stricter.await }
    }

    /// Reconstructs the rules before changes that came into force before this server started, by a
    /// restore beside the rules in force. If that fails, no changed rule has a baseline.
    async fn since_start(
        self: &Arc<Self>,
        first: u64,
        applied_operations: &[AppliedOperations],
        node: &Arc<N>,
    ) -> Result<PriorRules, StoreError> {
        let rule_rows = self.rule_rows();
        let restoring = Rollback::ToRevision(first.saturating_sub(1));
        let restored = match self.store.restoring(restoring, "").await {
            Ok(restored) => restored.operations,
            Err(StoreError::NothingToRestore) => {
                return Ok(PriorRules { rule_rows, stricter: Some(StricterRules::default()) });
            }
            Err(error) if may_pass(&error) => return Err(error),
            Err(error) => {
                warn_unwatched(first, &error);
                return Ok(PriorRules { rule_rows, stricter: None });
            }
        };
        let (operations, node) = (all_of(applied_operations), Arc::clone(node));
        let (known, back) = (Arc::clone(&rule_rows), restored.clone());
        let compare = move |change_plan: ChangePlan| {
            let (before, in_force) = (Arc::new(with(&known, &back)), node.rules());
            let sets = (change_plan.after(), in_force.set());
            let stricter = tightened(sets, &before, &operations, node.now_ms());
            PriorRules { rule_rows: before, stricter: Some(stricter) }
        };
        match self.compile_change(&rule_rows, &restored, compare).await {
            Ok(before) => Ok(before),
            Err(PlanError::Store(error)) if may_pass(&error) => Err(error),
            Err(PlanError::Store(error)) => {
                warn_unwatched(first, &error);
                Ok(PriorRules { rule_rows, stricter: None })
            }
            Err(PlanError::Wrong(problems)) => {
                warn_unwatched(first, &problems);
                Ok(PriorRules { rule_rows, stricter: None })
            }
        }
    }

    /// Reads the denials before a change that is older than this server from the decision log, if
    /// there is one. Denials that a rule always had are no jump.
    async fn recall(self: &Arc<Self>, changed_ms: u64, node: &N) {
        let Some(log) = node.log() else { return };
        let window = (changed_ms.saturating_sub(WATCHED_MS), changed_ms);
        let counts = LoggedCounts { changed_ms, rules: HashMap::new() };
        let counted = log.replay(window, RECORDS_MAX, counts, LoggedCounts::take);
        match counted.await {
            Ok(counts) => {
                self.with_denials(move |denials| denials.recall(counts.rules)).await;
            }
            Err(error) => {
                tracing::warn!(%error, "the denials before the start of this server are unknown");
            }
        }
    }

    async fn watch_change(
        self: &Arc<Self>,
        applied: &AppliedChange,
        operations: Vec<Operation>,
        before: &PriorRules,
    ) -> Result<(), StoreError> {
        let kept = self.store.change(applied.change).await?;
        // It was rolled back meanwhile.
        if kept.state != ChangeState::Applied {
            return Ok(());
        }
        // Approved denials are no surprise.
        let approved =
            kept.effect.as_deref().filter(|_| kept.approval.is_some()).and_then(ApprovedEffect::read);
        let touched = touched(&operations, &before.rule_rows, &self.rule_rows());
        let stricter = before.stricter.clone();
        let (node, change) = (self.node.upgrade(), (applied.change, applied.at_ms));
        self.with_denials(move |denials| {
            let rules = to_watch(touched, stricter.as_ref(), denials);
            let gone = denials.watch(change, rules, approved.as_ref());
            if let Some(node) = node {
                denials.begin(&*node.rules());
            }
            for change in gone {
                tracing::error!(change, "no longer watched: too many are, of later changes");
            }
        })
        .await;
        Ok(())
    }
}

/// Logs that no automatic rollback guards the changes from a revision on.
fn warn_unwatched(revision: u64, problem: &dyn std::fmt::Display) {
    tracing::warn!(
        revision,
        %problem,
        "changes since this revision are not watched: the rules before them cannot be restored"
    );
}

fn all_of(applied_operations: &[AppliedOperations]) -> Vec<Operation> {
    applied_operations
        .iter()
        .flat_map(|applied_operations| applied_operations.operations.iter().cloned())
        .collect()
}

/// Runs work over all rules on a blocking thread.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let ended = |error| tracing::error!(%error, "it is not known which rules became stricter");
    tokio::task::spawn_blocking(work).await.map_err(ended).ok()
}

/// Counts of rules by the records before a change.
struct LoggedCounts {
    changed_ms: u64,
    rules: HashMap<Box<str>, LoggedCount>,
}

impl LoggedCounts {
    /// Takes a record, and returns whether there is room for more rules.
    fn take(&mut self, record: &DecisionRecord) -> bool {
        if !record.rule.is_empty() {
            let count = self.rules.entry(record.rule.as_str().into()).or_default();
            count.denied += u64::from(record.verdict != RecordVerdict::Allowed);
            count.age_ms = count.age_ms.max(self.changed_ms.saturating_sub(record.at_ms));
        }
        self.rules.len() < REMEMBERED_MAX
    }
}

/// Returns the rules of a change that may deny more by it. Others are not watched: clients with
/// excessive requests could otherwise undo a raised limit. But a rule that another change made
/// stricter just before stays in question. A new rule has no denials to compare with.
fn to_watch(
    touched: BTreeSet<String>,
    stricter: Option<&StricterRules>,
    denials: &Denials,
) -> BTreeSet<String> {
    let may_deny_more = |rule: &String| {
        stricter.is_some_and(|stricter| stricter.known.contains(rule)) || denials.is_in_question(rule)
    };
    touched.into_iter().filter(may_deny_more).collect()
}

/// Returns the rules that operations touch: directly, by their overrides, or by a template.
fn touched(operations: &[Operation], before: &RuleRows, after: &RuleRows) -> BTreeSet<String> {
    let mut rules = BTreeSet::new();
    let mut templates = BTreeSet::new();
    for operation in operations {
        match operation.row() {
            (RowKind::Rule, name) => drop(rules.insert(name.to_owned())),
            (RowKind::Template, name) => drop(templates.insert(name)),
            (RowKind::Override, name) => {
                let was = before.row(RowKind::Override, name);
                let bodies = operation.body().into_iter().chain(was.map(|row| row.body.as_str()));
                rules.extend(bodies.filter_map(refers).filter_map(|refers| refers.rule));
            }
        }
    }
    if !templates.is_empty() {
        let follows = |body: &str| {
            refers(body).and_then(|refers| refers.template).is_some_and(|name| templates.contains(&*name))
        };
        let all = after.rows.iter().filter(|row| row.kind == RowKind::Rule && follows(&row.body));
        rules.extend(all.map(|row| row.name.clone()));
    }
    rules
}

fn refers(body: &str) -> Option<RowReferences> {
    serde_json::from_str(body).ok()
}

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::RuleRow;

    use super::*;

    fn row(kind: RowKind, name: &str, body: &str) -> RuleRow {
        RuleRow { kind, name: name.to_owned(), body: body.to_owned(), version: 1 }
    }

    fn rule_rows(rows: Vec<RuleRow>) -> RuleRows {
        RuleRows { rows: rows.into(), ..RuleRows::default() }
    }

    #[test]
    fn only_rules_that_may_deny_more_are_watched() {
        let of = |stricter: Option<&str>, denials: &Denials| {
            let touched = ["lowered", "new", "raised"].map(str::to_owned).into();
            let stricter = stricter.map(|rule| StricterRules {
                known: BTreeSet::from([rule.to_owned()]),
                new: BTreeSet::from(["new".to_owned()]),
            });
            to_watch(touched, stricter.as_ref(), denials).into_iter().collect::<Vec<_>>()
        };
        let mut denials = Denials::default();
        assert_eq!(of(Some("lowered"), &denials), ["lowered"]);
        assert_eq!(of(Some("another"), &denials), [""; 0], "another change did that");
        assert_eq!(of(None, &denials), [""; 0], "unknown rules have no baseline");
        denials.recall([("raised".into(), LoggedCount { denied: 0, age_ms: 60_000 })].into());
        denials.watch((7, 1), ["raised".to_owned()], None);
        assert_eq!(of(Some("another"), &denials), ["raised"], "a moment ago it was lowered");
    }

    #[test]
    fn rules_are_touched_by_themselves_by_overrides_and_by_templates() {
        let before = rule_rows(vec![row(RowKind::Override, "x", r#"{"rule":"was"}"#)]);
        let after = rule_rows(vec![
            row(RowKind::Rule, "pro_a", r#"{"template":"pro"}"#),
            row(RowKind::Rule, "free_a", r#"{"template":"free"}"#),
            row(RowKind::Rule, "none", "{}"),
        ]);
        let put = |kind, name: &str, body: &str| Operation::Put {
            kind,
            name: name.to_owned(),
            body: body.to_owned(),
        };
        let delete = |kind, name: &str| Operation::Delete { kind, name: name.to_owned() };
        for (operation, rules) in [
            (put(RowKind::Rule, "a", "{}"), &["a"][..]),
            (delete(RowKind::Rule, "a"), &["a"]),
            (put(RowKind::Override, "x", r#"{"rule":"is"}"#), &["is", "was"]),
            (delete(RowKind::Override, "x"), &["was"]),
            (put(RowKind::Template, "pro", "{}"), &["pro_a"]),
        ] {
            let found = touched(&[operation], &before, &after);
            assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), rules);
        }
    }
}
