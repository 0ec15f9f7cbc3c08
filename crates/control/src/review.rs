//! Review of the changes that came into force: the rules that they may have made stricter are
//! watched. If the store does not reply, every look retries, so that no change goes unwatched.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use tidegate_record::{DecisionRecord, RecordVerdict};
use tidegate_rules::change::{ChangeState, Operation};
use tidegate_rules::rows::{RowKind, RuleRows};
use tidegate_rules::store::{Rollback, StoreError};
use tidegate_rules::{Class, RuleSet};

use crate::applied::AppliedChange;
use crate::control::{Control, let_go};
use crate::denials::{AlarmCause, ChangeWatch, Denials, LOOK_MS, WATCHED_MS};
use crate::guardrail::{ApprovedEffect, ChangePlan, RECORDS_MAX, StricterRules, tightened, with};
use crate::node::{ControlEvent, Node, NodeRules};
use crate::plan::PlanError;
use crate::rollback::{AUTOMATIC, AutomaticRollback, may_pass};
use crate::row_tenants::RowTenants;
use crate::rule_keys::KeyOutcome;

/// Rules that were in force until they were replaced.
#[derive(Debug)]
pub(super) struct PreviousRules<N: Node> {
    pub(super) rule_rows: Arc<RuleRows>,
    pub(super) rules: Arc<N::Rules>,
    /// The first look of the rules that replaced them.
    pub(super) since_look: u64,
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
    /// Touched rules of class `security`, before or after.
    security: BTreeSet<String>,
}

impl PriorRules {
    /// Rows of which it is unknown whether the changes after them are stricter.
    fn unknown(rule_rows: Arc<RuleRows>) -> Self {
        Self { rule_rows, stricter: None, security: BTreeSet::new() }
    }
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
        self.take_last_alarm().await?;
        let applied_operations = self.applied_operations(unreviewed, &node).await?;
        if unreviewed.before.is_none() {
            let emergency_ms = self.with_denials(|denials| denials.first_emergency_ms()).await.flatten();
            let changed_ms = applied_operations.first().map(|first| first.applied.at_ms);
            if let Some(first_ms) = emergency_ms.into_iter().chain(changed_ms).min() {
                self.recall(first_ms, &node).await;
            }
        }
        let Some(first) = applied_operations.first() else { return Ok(()) };
        let before = match &unreviewed.before {
            Some(replaced) => self.since_replaced(replaced, &applied_operations, &node).await,
            None => self.since_start(first.applied.revision, &applied_operations, &node).await?,
        };
        for AppliedOperations { applied, operations } in applied_operations {
            if let Some(replaced) = &unreviewed.before {
                let ms = replaced.at_ms.saturating_sub(applied.at_ms);
                node.note(ControlEvent::Lagged { ms });
            }
            let revision = applied.revision;
            // An automatic rollback is not watched: the denials that it ends must not undo it.
            if applied.by == AUTOMATIC {
                self.forget_undone(applied.change).await?;
            } else {
                let since_look = unreviewed.before.as_ref().map_or(0, |replaced| replaced.since_look);
                self.watch_change(&applied, operations, &before, since_look).await?;
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
        let (known, now, node) = (Arc::clone(&rule_rows), self.rule_rows(), Arc::clone(node));
        let prior = aside(move || {
            let in_force = node.rules();
            let sets = (rules.set(), in_force.set());
            let stricter = Some(tightened(sets, &known, &operations, node.now_ms()));
            let security = security(&touched(&operations, &known, &now), sets);
            PriorRules { rule_rows: known, stricter, security }
        });
        prior.await.unwrap_or_else(|| PriorRules::unknown(rule_rows))
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
                return Ok(PriorRules {
                    stricter: Some(StricterRules::default()),
                    ..PriorRules::unknown(rule_rows)
                });
            }
            Err(error) if may_pass(&error) => return Err(error),
            Err(error) => {
                warn_unwatched(first, &error);
                return Ok(PriorRules::unknown(rule_rows));
            }
        };
        let (operations, node) = (all_of(applied_operations), Arc::clone(node));
        let (known, back) = (Arc::clone(&rule_rows), restored.clone());
        let compare = move |change_plan: ChangePlan| {
            let (before, in_force) = (Arc::new(with(&known, &back)), node.rules());
            let sets = (change_plan.after(), in_force.set());
            let stricter = Some(tightened(sets, &before, &operations, node.now_ms()));
            let security = security(&touched(&operations, &before, &known), sets);
            PriorRules { rule_rows: before, stricter, security }
        };
        match self.compile_change(&rule_rows, &restored, compare).await {
            Ok(before) => Ok(before),
            Err(PlanError::Store(error)) if may_pass(&error) => Err(error),
            Err(PlanError::Store(error)) => {
                warn_unwatched(first, &error);
                Ok(PriorRules::unknown(rule_rows))
            }
            Err(PlanError::Wrong(problems)) => {
                warn_unwatched(first, &problems);
                Ok(PriorRules::unknown(rule_rows))
            }
        }
    }

    /// Reads the keys before a change or an emergency that is older than this server from the
    /// decision log, if there is one. A sampled log has only some of the allowed keys.
    async fn recall(self: &Arc<Self>, changed_ms: u64, node: &Arc<N>) {
        let Some(log) = node.log() else { return };
        let window = (changed_ms.saturating_sub(WATCHED_MS), changed_ms);
        let logged = LoggedKeys { changed_ms, rules: HashMap::new() };
        match log.replay(window, RECORDS_MAX, logged, LoggedKeys::take).await {
            Ok(LoggedKeys { rules, .. }) => {
                let node = Arc::clone(node);
                self.with_denials(move |denials| recall_keys(denials, &*node, &rules)).await;
            }
            Err(error) => {
                tracing::warn!(%error, "the denials before the start of this server are unknown");
            }
        }
    }

    /// Stops watching a change, or a part of it, that this server or another one undid.
    async fn forget_undone(self: &Arc<Self>, by: u64) -> Result<(), StoreError> {
        if let Some(undone) = AutomaticRollback::of(self.store.change(by).await?) {
            let forget = move |denials: &mut Denials| denials.forget(undone.change, undone.tenant.as_deref());
            self.with_denials(forget).await;
        }
        Ok(())
    }

    async fn watch_change(
        self: &Arc<Self>,
        applied: &AppliedChange,
        operations: Vec<Operation>,
        before: &PriorRules,
        since_look: u64,
    ) -> Result<(), StoreError> {
        let kept = self.store.change(applied.change).await?;
        let Some(node) = self.node.upgrade().filter(|_| kept.state == ChangeState::Applied) else {
            // It was rolled back meanwhile.
            return Ok(());
        };
        let is_approved = kept.approval.is_some();
        // Approved denials are no surprise.
        let approved = kept.effect.as_deref().filter(|_| is_approved).and_then(ApprovedEffect::read);
        let touched = touched(&operations, &before.rule_rows, &self.rule_rows());
        let security = touched.keys().find(|rule| before.security.contains(*rule)).cloned();
        let security = security.map(AlarmCause::Security);
        let alarm = if is_approved { Some(AlarmCause::Approved) } else { security };
        let stricter = before.stricter.clone();
        let (change, applied_ms) = (applied.change, applied.at_ms);
        self.with_denials(move |denials| {
            let rules = to_watch(touched, stricter.as_ref(), denials);
            let shadowed = stricter.unwrap_or_default().shadowed;
            let new = ChangeWatch { change, applied_ms, since_look, rules, shadowed, approved, alarm };
            for change in denials.watch(new, &*node.rules()) {
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

/// Maximum number of rules whose logged keys are recalled.
const RECALLED_RULES_MAX: usize = 100_000;

/// The outcomes of keys in the records before a change.
struct LoggedKeys {
    changed_ms: u64,
    rules: HashMap<String, Vec<LoggedKey>>,
}

/// A record of a rule.
struct LoggedKey {
    tenant: String,
    key: String,
    is_allowed: bool,
    /// Looks from the record to the change.
    looks_before: u64,
}

impl LoggedKeys {
    /// Takes a record, and returns whether there is room for more rules.
    fn take(&mut self, record: &DecisionRecord) -> bool {
        if !record.rule.is_empty() {
            self.rules.entry(record.rule.clone()).or_default().push(LoggedKey {
                tenant: record.tenant.clone(),
                key: record.key.clone(),
                is_allowed: record.verdict == RecordVerdict::Allowed,
                looks_before: self.changed_ms.saturating_sub(record.at_ms) / LOOK_MS,
            });
        }
        self.rules.len() < RECALLED_RULES_MAX
    }
}

/// Marks the logged keys of the rules in force, as if the change were the first look.
fn recall_keys<N: Node>(denials: &Denials, node: &N, logged: &HashMap<String, Vec<LoggedKey>>) {
    let (rules, memory) = (node.rules(), node.key_memory());
    for (rule, keys) in rules.counted() {
        for known in logged.get(&*rule.name).into_iter().flatten() {
            let Some(parts) = parts_of(&known.key, &rule.key) else { continue };
            let key = (known.tenant.as_str(), memory.hash(parts));
            let outcome = if known.is_allowed { KeyOutcome::Allowed } else { KeyOutcome::Denied };
            keys.recall(memory, key, outcome, denials.looks_ago(known.looks_before));
        }
    }
}

/// Returns the values of a key as records write it: `user:42,path:/`. `None` if the text can be
/// read in several ways.
fn parts_of<'k>(text: &'k str, names: &[Arc<str>]) -> Option<Vec<&'k str>> {
    let (mut parts, mut names) = (Vec::with_capacity(names.len()), names.iter());
    let Some(first) = names.next() else { return Some(parts) };
    let mut rest = text.strip_prefix(&**first)?.strip_prefix(':')?;
    for name in names {
        let separator = format!(",{name}:");
        let (value, behind) = rest.split_once(&separator)?;
        if behind.contains(&separator) {
            return None;
        }
        parts.push(value);
        rest = behind;
    }
    parts.push(rest);
    Some(parts)
}

/// Returns the touched rules that have class `security` before a change or after it.
fn security(touched: &BTreeMap<String, Option<String>>, sets: (&RuleSet, &RuleSet)) -> BTreeSet<String> {
    let all = sets.0.rules().iter().chain(sets.1.rules());
    let security = all.filter(|rule| rule.class == Class::Security && touched.contains_key(&*rule.name));
    security.map(|rule| rule.name.to_string()).collect()
}

/// Returns the rules of a change that may deny more by it. Others are not watched: clients with
/// excessive requests could otherwise undo a raised limit. But a rule that another change made
/// stricter just before stays in question. A new rule has no denials to compare with.
fn to_watch(
    touched: BTreeMap<String, Option<String>>,
    stricter: Option<&StricterRules>,
    denials: &Denials,
) -> HashMap<String, Option<Arc<str>>> {
    let may_deny_more = |rule: &String| {
        stricter.is_some_and(|stricter| stricter.has_precedent(rule)) || denials.is_in_question(rule)
    };
    let watched = touched.into_iter().filter(|(rule, _)| may_deny_more(rule));
    watched.map(|(rule, tenant)| (rule, tenant.map(Arc::from))).collect()
}

/// Returns the rules that operations touch: directly, by their overrides, or by a template. Each
/// has the tenant that its operations concern; `None` for several.
fn touched(
    operations: &[Operation],
    before: &RuleRows,
    after: &RuleRows,
) -> BTreeMap<String, Option<String>> {
    let tenants = RowTenants { before, after };
    let mut rules = BTreeMap::new();
    let mut add = |rule: String, tenant: &Option<String>| {
        let known = rules.entry(rule).or_insert_with(|| tenant.clone());
        if known != tenant {
            *known = None;
        }
    };
    let mut templates = HashMap::new();
    for operation in operations {
        let tenant = tenants.of(operation);
        match operation.row() {
            (RowKind::Rule, name) => add(name.to_owned(), &tenant),
            (RowKind::Template, name) => drop(templates.insert(name, tenant)),
            (RowKind::Override, name) => {
                let was = before.row(RowKind::Override, name);
                let bodies = operation.body().into_iter().chain(was.map(|row| row.body.as_str()));
                let named = bodies.filter_map(refers).filter_map(|refers| refers.rule);
                named.for_each(|rule| add(rule, &tenant));
            }
        }
    }
    if !templates.is_empty() {
        for row in after.rows.iter().filter(|row| row.kind == RowKind::Rule) {
            let template = refers(&row.body).and_then(|refers| refers.template);
            if let Some(tenant) = template.and_then(|template| templates.get(template.as_str())) {
                add(row.name.clone(), tenant);
            }
        }
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
    use crate::denials::tests::watch_of;
    use crate::test_node::TestRules;

    fn row(kind: RowKind, name: &str, body: &str) -> RuleRow {
        RuleRow { kind, name: name.to_owned(), body: body.to_owned(), version: 1 }
    }

    fn rule_rows(rows: Vec<RuleRow>) -> RuleRows {
        RuleRows { rows: rows.into(), ..RuleRows::default() }
    }

    #[test]
    fn only_rules_that_may_deny_more_are_watched() {
        let of = |stricter: Option<&str>, denials: &Denials| {
            let touched = ["lowered", "new", "raised"].map(|rule| (rule.to_owned(), None)).into();
            let stricter = stricter.map(|rule| StricterRules {
                known: BTreeSet::from([rule.to_owned()]),
                new: BTreeSet::from(["new".to_owned()]),
                shadowed: BTreeSet::new(),
            });
            to_watch(touched, stricter.as_ref(), denials).into_keys().collect::<Vec<_>>()
        };
        let mut denials = Denials::default();
        assert_eq!(of(Some("lowered"), &denials), ["lowered"]);
        assert_eq!(of(Some("another"), &denials), [""; 0], "another change did that");
        assert_eq!(of(None, &denials), [""; 0], "unknown rules have no baseline");
        let rules = TestRules::of(&["raised"]);
        rules.note_keys("raised", ("", 0..10), KeyOutcome::Allowed);
        (0..12).for_each(|_| drop(denials.look(&rules, 1)));
        let rules_of_change = [("raised".to_owned(), None)].into();
        denials.watch(watch_of(7, 12, rules_of_change), &rules);
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
            assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), rules);
        }
    }

    #[test]
    fn rule_touched_for_several_tenants_concerns_none_of_them() {
        let rows = rule_rows(vec![row(RowKind::Rule, "a", "{}")]);
        let over = |tenant: &str| Operation::Put {
            kind: RowKind::Override,
            name: tenant.to_owned(),
            body: format!(r#"{{"rule":"a","tenant":"{tenant}"}}"#),
        };
        let of = |operations: &[Operation]| touched(operations, &rows, &rows)["a"].clone();
        assert_eq!(of(&[over("acme")]).as_deref(), Some("acme"));
        assert_eq!(of(&[over("acme"), over("globex")]), None);
    }

    #[test]
    fn logged_key_is_read_unless_it_is_ambiguous() {
        let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect::<Vec<Arc<str>>>();
        let (user, both) = (names(&["user"]), names(&["user", "path"]));
        assert_eq!(parts_of("user:42", &user), Some(vec!["42"]));
        assert_eq!(parts_of("user:a,b", &user), Some(vec!["a,b"]));
        assert_eq!(parts_of("team:42", &user), None);
        assert_eq!(parts_of("user:42,path:/a", &both), Some(vec!["42", "/a"]));
        assert_eq!(parts_of("user:42,path:/a,path:/b", &both), None);
        assert_eq!(parts_of("", &[]), Some(vec![]));
    }
}
