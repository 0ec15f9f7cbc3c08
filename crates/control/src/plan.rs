//! Plans: a change is compiled and measured as a whole before it is applied, by people or by the
//! server itself.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRows};
use tidegate_rules::store::{AUTHOR_CHANGES_MAX, StoreError, in_emergency};
use tidegate_rules::{Class, EMERGENCIES_MAX, Mode, Rule};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::control::{Control, Stopping, let_go};
use crate::denials::AlarmCause;
use crate::guardrail::{
    ApprovedEffect, AuthorHistory, ChangeEffect, ChangePlan, RECORDS_MAX, UnknownReason, WINDOW_MS,
};
use crate::log_replay::ReplayTurn;
use crate::node::{Node, NodeRules};
use crate::row_tenants::RowTenants;
use crate::watch::WatchForecast;

/// Number of changes of people that are compiled and measured at a time. Higher: fewer wait for
/// another; each needs the memory of two rule sets, and of a third one for the rules before the
/// earlier changes of its author.
const PLANS_MAX: usize = 1;

/// The same for changes of the server, so that automatic rollbacks do not wait for plans of people.
const OWN_PLANS_MAX: usize = 1;

/// Maximum number of warnings in a plan.
const WARNINGS_MAX: usize = 100;

/// Permits to compile a change.
#[derive(Debug)]
pub(super) struct PlanPermits {
    peoples: Arc<Semaphore>,
    own: Arc<Semaphore>,
}

impl Default for PlanPermits {
    fn default() -> Self {
        let [peoples, own] = [PLANS_MAX, OWN_PLANS_MAX].map(|most| Arc::new(Semaphore::new(most)));
        Self { peoples, own }
    }
}

/// The basis of a comparison of a change, besides the rules in force.
#[derive(Debug, Default)]
pub(crate) struct PlanBasis {
    /// Its effect at its approval.
    pub(crate) approved: ApprovedEffect,
    /// The earlier changes of its author.
    pub(crate) history: AuthorHistory,
}

impl From<ApprovedEffect> for PlanBasis {
    fn from(approved: ApprovedEffect) -> Self {
        Self { approved, history: AuthorHistory::default() }
    }
}

/// The result of planning a change.
#[derive(Debug)]
pub struct PlanResult {
    /// Its expected effect, and the consent that it needs.
    pub effect: ChangeEffect,
    /// Warnings to the author about the rules and overrides that the change puts.
    pub warnings: Vec<String>,
    /// The rules that this server watches once the change is applied.
    pub watch: WatchForecast,
}

/// Why a change is not made.
#[derive(Debug)]
pub enum PlanError {
    /// The store would refuse it, or is unreachable.
    Store(StoreError),
    /// The rules would make no sense with it.
    Wrong(String),
}

impl From<StoreError> for PlanError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Stopping> for PlanError {
    fn from(stopping: Stopping) -> Self {
        Self::Wrong(stopping.to_string())
    }
}

impl<N: Node> Control<N> {
    /// Returns the current content of the store. It is not in force yet if another server just
    /// changed it, and never if it was refused. It must be available all the same, or it could not
    /// be repaired.
    pub async fn current(self: &Arc<Self>) -> Result<Arc<RuleRows>, StoreError> {
        let revisions = self.store.revisions().await?;
        let is_current = move |rule_rows: &RuleRows| {
            (rule_rows.revision, rule_rows.emergency_revision)
                == (revisions.revision, revisions.emergency_revision)
        };
        let mut rule_rows = self.rule_rows();
        if !is_current(&rule_rows) {
            if let Err(problem) = self.refresh().await {
                tracing::debug!(problem, "plan against the store's rows, which are not in force");
            }
            rule_rows = self.rule_rows();
        }
        if is_current(&rule_rows) { Ok(rule_rows) } else { self.load_aside(is_current).await }
    }

    /// Loads the content of the store. Neither the load nor the later drop delays decisions.
    async fn load_aside(
        self: &Arc<Self>,
        is_current: impl Fn(&RuleRows) -> bool + Send + 'static,
    ) -> Result<Arc<RuleRows>, StoreError> {
        let control = Arc::clone(self);
        let loading = self.runtime.spawn(async move {
            let mut beside = control.beside.lock().await;
            if let Some(known) = beside.upgrade().filter(|rule_rows| is_current(rule_rows)) {
                return Ok(known);
            }
            let rule_rows = Arc::new(control.store.load().await?);
            *beside = Arc::downgrade(&rule_rows);
            control.runtime.spawn(let_go(Arc::clone(&rule_rows.rows)));
            Ok(rule_rows)
        });
        loading.await.unwrap_or_else(|error| Err(StoreError::Unreachable(error.to_string())))
    }

    /// Plans a change of a person as a whole: whether the rules compile with it, and its effect on
    /// recent requests, compared with `basis`.
    pub(crate) async fn evaluate(
        self: &Arc<Self>,
        rule_rows: &Arc<RuleRows>,
        operations: &[Operation],
        basis: impl Into<PlanBasis>,
    ) -> Result<PlanResult, PlanError> {
        self.check(rule_rows, operations)?;
        let permit = turn(&self.plan_permits.peoples).await?;
        let node = self.node()?;
        // Before the compilation, so that a plan that waits for other readers of the log uses no
        // memory.
        let turn = match node.log() {
            None => None,
            Some(log) => Some(log.turn().await.map_err(|_| Stopping)?),
        };
        let rows = operations.iter().map(Operation::row).filter(|(kind, _)| *kind == RowKind::Rule);
        let puts: HashSet<String> = rows.map(|(_, name)| name.to_owned()).collect();
        let of_override = |operation: &&Operation| operation.row().0 == RowKind::Override;
        let overrides: Vec<Operation> = operations.iter().filter(of_override).cloned().collect();
        let (control, basis) = (Arc::clone(self), basis.into());
        let change = (Arc::clone(rule_rows), operations.to_vec());
        let look = move |change_plan: ChangePlan| PlanResult {
            watch: forecast(&control, &change_plan, (&change.0, &change.1), &*node),
            warnings: warnings(&change_plan, &puts, &overrides, &*node),
            effect: judge(change_plan, (&change.0, &change.1), basis, turn.as_ref(), &*node),
        };
        self.compile_plan(permit, rule_rows, operations, look).await
    }

    /// Compiles the content of the store with a change, for the server itself, and returns the
    /// result of `look`.
    pub(super) async fn compile_change<T: Send + 'static>(
        &self,
        rule_rows: &Arc<RuleRows>,
        operations: &[Operation],
        look: impl FnOnce(ChangePlan) -> T + Send + 'static,
    ) -> Result<T, PlanError> {
        self.check(rule_rows, operations)?;
        let permit = turn(&self.plan_permits.own).await?;
        self.compile_plan(permit, rule_rows, operations, look).await
    }

    /// Refuses operations that the store would refuse.
    fn check(&self, rule_rows: &RuleRows, operations: &[Operation]) -> Result<(), PlanError> {
        let is_missing = |operation: &&Operation| {
            let (kind, name) = operation.row();
            operation.body().is_none() && rule_rows.row(kind, name).is_none()
        };
        if let Some(operation) = operations.iter().find(is_missing) {
            let (kind, name) = operation.row();
            return Err(StoreError::Missing(vec![(kind, name.to_owned())]).into());
        }
        let in_emergency = in_emergency(operations, &rule_rows.emergencies, self.now_ms()?);
        if in_emergency.is_empty() { Ok(()) } else { Err(StoreError::InEmergency(in_emergency).into()) }
    }

    /// Compiles a change, passes it to `look` and drops it, on a thread where this delays no
    /// decisions. The permit is held until then, so there are never more compiled plans than
    /// permits.
    async fn compile_plan<T: Send + 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        rule_rows: &Arc<RuleRows>,
        operations: &[Operation],
        look: impl FnOnce(ChangePlan) -> T + Send + 'static,
    ) -> Result<T, PlanError> {
        let node = self.node()?;
        let (rule_rows, operations) = (Arc::clone(rule_rows), operations.to_vec());
        let placement = self.placement.clone();
        aside(move || {
            let (placement, now_ms) = (placement.as_deref(), node.now_ms());
            let change_plan = ChangePlan::new(node.rules().set(), &rule_rows, &operations, placement, now_ms)
                .map_err(|problems| problems.to_string())?;
            node.check_set(change_plan.after())?;
            let found = look(change_plan);
            drop(permit);
            Ok(found)
        })
        .await
    }

    /// Checks that an emergency fits the rules in force, with all others. It waits for no change.
    pub async fn try_emergency(&self, row: &EmergencyRow) -> Result<(), PlanError> {
        let node = self.node()?;
        if let Some(problem) = unknown_tenant(&row.body, &*node) {
            return Err(PlanError::Wrong(format!("emergencies[{:?}].{problem}", row.id)));
        }
        let (rule_rows, now_ms) = (self.rule_rows(), node.now_ms());
        let others =
            rule_rows.emergencies.iter().filter(|known| known.id != row.id && now_ms < known.expires_ms);
        // The store refuses too many emergencies, because it knows all of them.
        let others = others.take(EMERGENCIES_MAX - 1).cloned();
        let all: Vec<EmergencyRow> = others.chain([row.clone()]).collect();
        aside(move || {
            let tried = node.rules().set().with_emergencies(rule_rows.emergency_revision, &all, now_ms);
            tried.map(drop).map_err(|problems| problems.to_string())
        })
        .await
    }
}

/// Returns the rules that a change would be watched for, and whether it would be undone.
fn forecast<N: Node>(
    control: &Control<N>,
    change_plan: &ChangePlan,
    (rule_rows, operations): (&RuleRows, &[Operation]),
    node: &N,
) -> WatchForecast {
    let (in_force, scope) = (node.rules(), change_plan.scope());
    let is_touched =
        |rule: &&Rule| scope.touched().binary_search_by(|name| name.as_str().cmp(&rule.name)).is_ok();
    let before: HashMap<&str, &Rule> =
        in_force.set().rules().iter().filter(is_touched).map(|rule| (&*rule.name, rule)).collect();
    let after: Vec<&Rule> = change_plan.after().rules().iter().filter(is_touched).collect();
    let is_rekeyed = |rule: &&&Rule| before.get(&*rule.name).is_some_and(|before| before.key != rule.key);
    let rekeyed = after.iter().filter(is_rekeyed).map(|rule| rule.name.to_string()).collect();
    let enforced = after.iter().filter(|rule| rule.mode == Mode::Enforce);
    let enforced: HashSet<&str> = enforced.map(|rule| &*rule.name).collect();
    let idle = scope.touched().iter().filter(|rule| !enforced.contains(rule.as_str())).cloned().collect();
    // A load of new rules waits for the lock of the denials.
    let (stricter, denials) = (scope.stricter(), control.denials());
    let mut forecast = denials.forecast(scope.touched(), &stricter, &rekeyed, &idle, &*in_force);
    drop(denials);
    let mut all = before.values().chain(&after);
    if let Some(rule) = all.find(|rule| rule.class == Class::Security) {
        forecast = forecast.alarm_only(AlarmCause::Security(rule.name.to_string()));
    }
    let tenants = RowTenants { before: rule_rows, after: rule_rows };
    match tenants.of_all(operations) {
        Some(tenant) => forecast.of_tenant(&tenant),
        None => forecast,
    }
}

async fn turn(plan_permits: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, PlanError> {
    Ok(Arc::clone(plan_permits).acquire_owned().await.map_err(|_| Stopping)?)
}

/// Returns warnings to the author about the rules and overrides that a change puts.
fn warnings(
    change_plan: &ChangePlan,
    puts: &HashSet<String>,
    overrides: &[Operation],
    node: &impl Node,
) -> Vec<String> {
    let rules = change_plan.after().rules().iter().filter(|rule| puts.contains(&*rule.name));
    let of_rules = rules.flat_map(|rule| rule.warned(node.fleet()));
    let of_overrides = overrides.iter().filter_map(|operation| {
        let problem = unknown_tenant(operation.body()?, node)?;
        Some(format!("overrides[{:?}].{problem}: no tenant of this server has it", operation.row().1))
    });
    of_rules.chain(of_overrides).take(WARNINGS_MAX).collect()
}

/// Returns a problem if a body is for a tenant that this server does not know. Other checks find
/// other problems.
fn unknown_tenant(body: &str, node: &impl Node) -> Option<String> {
    #[derive(Deserialize)]
    struct TenantField {
        tenant: Option<String>,
    }
    let tenant = serde_json::from_str::<TenantField>(body).ok()?.tenant?;
    (!node.has_tenant(&tenant)).then(|| format!("tenant: there is no [[tenants]] entry named {tenant:?}"))
}

/// Returns the effect of a valid change: compared with the rules in force, or together with the
/// earlier changes of its author, if that needs more consent.
fn judge(
    mut change_plan: ChangePlan,
    (rule_rows, operations): (&RuleRows, &[Operation]),
    PlanBasis { approved, history }: PlanBasis,
    turn: Option<&ReplayTurn>,
    node: &impl Node,
) -> ChangeEffect {
    let approved = Arc::new(approved);
    change_plan.add_blocks(&history.blocked);
    let together = change_plan.with_earlier(&history, rule_rows, operations, node.now_ms());
    let is_partial = history.is_partial() && change_plan.scope().is_risky();
    // One after the other, because each holds up to a million records.
    let effect = measure(change_plan, &approved, turn, node);
    let effect = match together {
        Ok(None) => effect,
        Ok(Some(mut together)) => {
            together.add_blocks(&history.blocked);
            effect.or_with_earlier(measure(together, &approved, turn, node))
        }
        Err(problems) => {
            tracing::debug!(%problems, "the rules before the changes of an author do not compile");
            effect.approved_for("the rules before the earlier changes of its author cannot be restored")
        }
    };
    if is_partial {
        let most = AUTHOR_CHANGES_MAX;
        return effect.approved_for(&format!("more than {most} changes of a day are not compared with"));
    }
    effect
}

/// Measures the effect of a valid change on recent requests. An unreadable log does not prevent
/// changes of rules.
fn measure(
    change_plan: ChangePlan,
    approved: &Arc<ApprovedEffect>,
    turn: Option<&ReplayTurn>,
    node: &impl Node,
) -> ChangeEffect {
    let (Some(log), Some(turn)) = (node.log(), turn) else {
        return ChangeEffect::unknown(change_plan.scope(), UnknownReason::NoLog, approved);
    };
    let scope = change_plan.scope().clone();
    let now_ms = node.now_ms();
    let window = (now_ms.saturating_sub(WINDOW_MS), now_ms);
    let test = change_plan.begin(log.sample_rate(), Arc::clone(approved));
    let mut test = test.requiring(log.evidence_ms()).without_credentials(node.secret_headers());
    match turn.replay(window, RECORDS_MAX, |record| test.take(record)) {
        Ok(()) => test.finish(),
        Err(error) => {
            tracing::error!(%error, "a change is not measured: the decision log cannot be read");
            ChangeEffect::unknown(&scope, UnknownReason::LogUnreadable(error.to_string()), approved)
        }
    }
}

async fn aside<T: Send + 'static>(
    compile: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, PlanError> {
    let ended = |error| Err(format!("could not be compiled: {error}"));
    tokio::task::spawn_blocking(compile).await.unwrap_or_else(ended).map_err(PlanError::Wrong)
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use tidegate_rules::snapshot::Snapshot;
    use tidegate_rules::store::Store;

    use super::*;
    use crate::test_node::TestNode;

    async fn followed(node: &Arc<TestNode>) -> Arc<Control<TestNode>> {
        let address = "sqlite::memory:".parse().expect("an address");
        let store = Store::open(&address).await.expect("opens");
        Control::new(store, Snapshot::default(), None, node)
    }

    fn rule(name: &str, body: &str) -> Vec<Operation> {
        vec![Operation::Put { kind: RowKind::Rule, name: name.to_owned(), body: body.to_owned() }]
    }

    const GOOD: &str = r#"{"key":["user"],"limit":1,"period":"1h"}"#;

    #[tokio::test]
    async fn a_change_has_its_permit_until_it_is_gone_and_is_looked_at_beside_the_workers() {
        let node = TestNode::new();
        let control = followed(&node).await;
        let (rule_rows, own) = (control.rule_rows(), Arc::clone(&control.plan_permits.own));
        let look = move |change_plan: ChangePlan| {
            assert_eq!(change_plan.after().rules().len(), 1);
            (own.available_permits(), current().id())
        };
        let (free, thread) =
            control.compile_change(&rule_rows, &rule("a", GOOD), look).await.expect("compiles");
        assert_eq!(free, 0, "another one would be there at the same time");
        assert_ne!(thread, current().id());
        assert_eq!(control.plan_permits.own.available_permits(), OWN_PLANS_MAX);
        // A refused change returns its permit too.
        let wrong = control.compile_change(&rule_rows, &rule("a", "{}"), drop).await;
        assert!(matches!(wrong, Err(PlanError::Wrong(_))), "{wrong:?}");
        assert_eq!(control.plan_permits.own.available_permits(), OWN_PLANS_MAX);
    }

    #[tokio::test]
    async fn plans_wait_for_each_other_and_the_server_for_none() {
        let node = TestNode::new();
        let control = followed(&node).await;
        let rule_rows = control.rule_rows();
        let planning = turn(&control.plan_permits.peoples).await.expect("nobody else plans");
        let operations = rule("a", GOOD);
        let mut plan = Box::pin(control.evaluate(&rule_rows, &operations, ApprovedEffect::default()));
        assert!(come_of(&mut plan).await.is_none(), "it waits");
        control.compile_change(&rule_rows, &operations, drop).await.expect("it does not wait");
        drop(planning);
        let PlanResult { effect, .. } = plan.await.expect("its turn");
        assert!(effect.because.contains("there is no decision log"), "{}", effect.because);
    }

    #[tokio::test]
    async fn emergency_for_an_unknown_tenant_is_rejected() {
        let node = TestNode::new();
        let control = followed(&node).await;
        let tried = async |tenant: &str| {
            let body = format!(r#"{{{tenant}"action":"block"}}"#);
            control.try_emergency(&EmergencyRow { id: "e".to_owned(), body, expires_ms: u64::MAX }).await
        };
        tried("").await.expect("it is for everybody");
        let Err(PlanError::Wrong(problem)) = tried(r#""tenant":"acme","#).await else {
            panic!("it would do nothing")
        };
        assert_eq!(problem, r#"emergencies["e"].tenant: there is no [[tenants]] entry named "acme""#);
    }

    #[tokio::test]
    async fn override_for_an_unknown_tenant_is_warned_about() {
        let node = TestNode::new();
        let control = followed(&node).await;
        let over = |key: &str, tenant: &str| Operation::Put {
            kind: RowKind::Override,
            name: format!("of {key}"),
            body: format!(r#"{{{tenant}"rule":"a","key":["{key}"],"limit":2}}"#),
        };
        let operations =
            [rule("a", GOOD), vec![over("bob", r#""tenant":"acme","#), over("eve", "")]].concat();
        let judged = control.evaluate(&control.rule_rows(), &operations, ApprovedEffect::default()).await;
        assert_eq!(
            judged.expect("compiles").warnings,
            ["overrides[\"of bob\"].tenant: there is no [[tenants]] entry named \"acme\": \
                 no tenant of this server has it"]
        );
    }

    /// Returns the result of a future if it is ready by now.
    async fn come_of<T>(of: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        tokio::select! {
            biased;
            done = of => Some(done),
            () = tokio::task::yield_now() => None,
        }
    }
}
