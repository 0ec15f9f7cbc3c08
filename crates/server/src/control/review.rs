//! Which changes came into force, and which rules they may have made stricter: those are watched. What the store does not tell
//! at once is asked again with every look, so that no change goes unwatched.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use tidegate_record::{DecisionRecord, RecordVerdict};
use tidegate_rules::change::{ChangeState, Operation};
use tidegate_rules::rows::{RowKind, RuleRows};
use tidegate_rules::store::{Rollback, StoreError};

use super::applied::AppliedChange;
use super::denials::{Denials, REMEMBERED_MAX, WATCHED_MS};
use super::rollback::{AUTOMATIC, may_pass};
use super::{Control, PlanError, let_go};
use crate::guardrail::{ApprovedEffect, ChangePlan, RECORDS_MAX, tightened, with};
use crate::rules::ActiveRules;
use crate::shared::Shared;

/// What was in force until it was replaced.
#[derive(Debug)]
pub(super) struct PreviousRules {
    pub(super) rule_rows: Arc<RuleRows>,
    pub(super) rules: Arc<ActiveRules>,
    /// When that was.
    pub(super) at_ms: u64,
}

/// Changes that are in force, and that nobody has looked at yet.
#[derive(Debug)]
pub(super) struct UnreviewedChanges {
    /// Those up to this revision were looked at.
    noted: u64,
    /// What was in force before them; nothing if this server has just started.
    before: Option<PreviousRules>,
}

impl UnreviewedChanges {
    /// What came into force before this server did anything.
    pub(super) fn at_start() -> Self {
        Self { noted: 0, before: None }
    }
}

/// A change, and what it does.
struct AppliedOperations {
    applied: AppliedChange,
    operations: Vec<Operation>,
}

/// What is known of the time before changes.
struct PriorRules {
    rule_rows: Arc<RuleRows>,
    /// The rules that may deny more since; nothing if that is not known.
    stricter: Option<BTreeSet<String>>,
}

/// What a row says of other rows.
#[derive(Deserialize)]
struct RowReferences {
    rule: Option<String>,
    template: Option<String>,
}

impl Control {
    /// Measures how long what was just put in force took, and watches what it does from now on.
    pub(super) async fn review_applied(self: &Arc<Self>, replaced: PreviousRules) {
        let mut unreviewed = self.unreviewed.lock().await;
        // Those of a change before may just have gone on.
        self.with_denials(Denials::set_aside).await;
        match &*unreviewed {
            // What was in force earlier is what all changes since are compared with.
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

    async fn note(self: &Arc<Self>, unreviewed: &mut Option<UnreviewedChanges>) {
        let Some(changes) = unreviewed else { return };
        if let Err(error) = self.try_note(changes).await {
            return tracing::warn!(%error, "changes that were taken over are not watched yet: tried again");
        }
        self.with_denials(Denials::go_on).await;
        if let Some(replaced) = unreviewed.take().and_then(|noted| noted.before) {
            self.let_go_of(replaced);
        }
    }

    fn let_go_of(&self, PreviousRules { rule_rows, rules, .. }: PreviousRules) {
        self.runtime.spawn(let_go(rules));
        self.runtime.spawn(let_go(Arc::clone(&rule_rows.rows)));
    }

    async fn try_note(self: &Arc<Self>, unreviewed: &mut UnreviewedChanges) -> Result<(), StoreError> {
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        let applied_operations = self.applied_operations(unreviewed, &shared).await?;
        let Some(first) = applied_operations.first() else { return Ok(()) };
        let before = if let Some(replaced) = &unreviewed.before {
            self.since_replaced(replaced, &applied_operations, &shared).await
        } else {
            self.recall(first.applied.at_ms, &shared).await;
            self.since_start(first.applied.revision, &applied_operations, &shared).await?
        };
        for AppliedOperations { applied, operations } in applied_operations {
            if let Some(replaced) = &unreviewed.before {
                shared.metrics.control.lagged(replaced.at_ms.saturating_sub(applied.at_ms));
            }
            let revision = applied.revision;
            // What restores order is not undone by what it ends.
            if applied.by != AUTOMATIC {
                self.watch_change(&applied, operations, &before).await?;
            }
            unreviewed.noted = revision;
        }
        Ok(())
    }

    /// The changes to look at: all since the rules were replaced; after a start, those that would still be watched.
    async fn applied_operations(
        &self,
        unreviewed: &UnreviewedChanges,
        shared: &Shared,
    ) -> Result<Vec<AppliedOperations>, StoreError> {
        let since_ms = match unreviewed.before {
            Some(_) => 0,
            None => shared.now_ms().saturating_sub(WATCHED_MS),
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
        replaced: &PreviousRules,
        applied_operations: &[AppliedOperations],
        shared: &Arc<Shared>,
    ) -> PriorRules {
        let (rule_rows, rules) = (Arc::clone(&replaced.rule_rows), Arc::clone(&replaced.rules));
        let operations = all_of(applied_operations);
        let (known, shared) = (Arc::clone(&rule_rows), Arc::clone(shared));
        let stricter = aside(move || {
            let in_force = shared.rules.load();
            tightened((rules.set(), in_force.set()), &known, &operations, shared.now_ms())
        });
        PriorRules { rule_rows, stricter: stricter.await }
    }

    /// What was there before changes that came into force before this server started is found by restoring it, beside what is
    /// in force. Where that cannot be, any of their rules may have become stricter.
    async fn since_start(
        self: &Arc<Self>,
        first: u64,
        applied_operations: &[AppliedOperations],
        shared: &Arc<Shared>,
    ) -> Result<PriorRules, StoreError> {
        let rule_rows = self.rule_rows();
        let restoring = Rollback::ToRevision(first.saturating_sub(1));
        let restored = match self.store.restoring(restoring, "").await {
            Ok(restored) => restored.operations,
            Err(StoreError::NothingToRestore) => {
                return Ok(PriorRules { rule_rows, stricter: Some(BTreeSet::new()) });
            }
            Err(error) if may_pass(&error) => return Err(error),
            Err(_) => return Ok(PriorRules { rule_rows, stricter: None }),
        };
        let (operations, shared) = (all_of(applied_operations), Arc::clone(shared));
        let (known, back) = (Arc::clone(&rule_rows), restored.clone());
        let compare = move |change_plan: ChangePlan| {
            let (before, in_force) = (Arc::new(with(&known, &back)), shared.rules.load());
            let sets = (change_plan.after(), in_force.set());
            let stricter = tightened(sets, &before, &operations, shared.now_ms());
            PriorRules { rule_rows: before, stricter: Some(stricter) }
        };
        match self.compile_change(&rule_rows, &restored, compare).await {
            Ok(before) => Ok(before),
            Err(PlanError::Store(error)) if may_pass(&error) => Err(error),
            Err(_) => Ok(PriorRules { rule_rows, stricter: None }),
        }
    }

    /// Has what rules denied before a change that is older than this server from the decision log, if there is one: what they
    /// always denied is no jump.
    async fn recall(self: &Arc<Self>, changed_ms: u64, shared: &Shared) {
        let Some(decision_log) = &shared.decision_log else { return };
        let window = (changed_ms.saturating_sub(WATCHED_MS), changed_ms);
        let counts: HashMap<Box<str>, u64> = HashMap::new();
        match decision_log.replay(window, RECORDS_MAX, counts, count_denial, |counts| counts).await {
            Ok(denied) => {
                self.with_denials(move |denials| denials.recall(denied)).await;
            }
            Err(error) => {
                tracing::warn!(%error, "it is not known what rules denied before this server started");
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
        // Somebody undid it since.
        if kept.state != ChangeState::Applied {
            return Ok(());
        }
        // What somebody has seen coming is no surprise.
        let approved =
            kept.effect.as_deref().filter(|_| kept.approval.is_some()).and_then(ApprovedEffect::read);
        let touched = touched(&operations, &before.rule_rows, &self.rule_rows());
        let stricter = before.stricter.clone();
        let (shared, change) = (self.shared.upgrade(), (applied.change, applied.at_ms));
        self.with_denials(move |denials| {
            let rules = to_watch(touched, stricter.as_ref(), denials);
            let gone = denials.watch(change, rules, approved.as_ref());
            if let Some(shared) = shared {
                denials.begin(&shared.rules.load());
            }
            for change in gone {
                tracing::error!(change, "no longer watched: too many are, of later changes");
            }
        })
        .await;
        Ok(())
    }
}

fn all_of(applied_operations: &[AppliedOperations]) -> Vec<Operation> {
    applied_operations
        .iter()
        .flat_map(|applied_operations| applied_operations.operations.iter().cloned())
        .collect()
}

/// Does what goes through all rules beside those who answer.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let ended = |error| tracing::error!(%error, "it is not known which rules became stricter");
    tokio::task::spawn_blocking(work).await.map_err(ended).ok()
}

fn count_denial(counts: &mut HashMap<Box<str>, u64>, record: &DecisionRecord) -> bool {
    if record.verdict != RecordVerdict::Allowed && !record.rule.is_empty() {
        *counts.entry(record.rule.as_str().into()).or_default() += 1;
    }
    counts.len() < REMEMBERED_MAX
}

/// The rules of a change that may deny more by it: where others let pass more, whoever asks too much of them would undo that. But
/// what only mends what another change did a moment ago is in question with it.
fn to_watch(
    touched: BTreeSet<String>,
    stricter: Option<&BTreeSet<String>>,
    denials: &Denials,
) -> BTreeSet<String> {
    let may_deny_more = |rule: &String| {
        stricter.is_none_or(|stricter| stricter.contains(rule)) || denials.is_in_question(rule)
    };
    touched.into_iter().filter(may_deny_more).collect()
}

/// The rules that operations are about: by themselves, by overrides of theirs, or by a template.
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
            let touched = ["lowered", "raised"].map(str::to_owned).into();
            let stricter = stricter.map(|rule| BTreeSet::from([rule.to_owned()]));
            to_watch(touched, stricter.as_ref(), denials).into_iter().collect::<Vec<_>>()
        };
        let mut denials = Denials::default();
        assert_eq!(of(Some("lowered"), &denials), ["lowered"]);
        assert_eq!(of(Some("another"), &denials), [""; 0], "another change did that");
        assert_eq!(of(None, &denials), ["lowered", "raised"], "nobody knows");
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
