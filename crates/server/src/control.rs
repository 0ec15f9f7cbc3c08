//! This server as a node of the control plane: it puts rules in force and accepts stored tokens.

use std::collections::HashSet;
use std::sync::Arc;

use tidegate_control::{
    ControlEvent, CredentialTarget, KeyMemory, LogReplay, Node, NodeRules, RuleKeys, RuleTarget,
};
use tidegate_core::bound::Fleet;
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::store::Credential;
use tidegate_rules::{NamespaceOverrides, RuleSet, SecretHeaders};

use crate::auth::{Credentials, OPERATING_TENANT, Principal, Role, TokenHash};
use crate::decision_log::DecisionLog;
use crate::rules::{ActiveRules, check_tenants, warn_of};
use crate::shared::Shared;

/// The control plane of this server.
pub(crate) type Control = tidegate_control::Control<Shared>;

impl NodeRules for ActiveRules {
    fn set(&self) -> &RuleSet {
        self.set()
    }

    fn keys(&self) -> &[RuleKeys] {
        self.keys()
    }
}

impl RuleTarget for Shared {
    type Rules = ActiveRules;

    fn check_set(&self, set: &RuleSet) -> Result<(), String> {
        check_tenants(set, &self.tenants)
    }

    fn prepare(&self, set: RuleSet) -> Result<ActiveRules, String> {
        warn_of(&set, &self.fleet.configured);
        ActiveRules::new(set, self)
    }

    fn with_emergencies(
        &self,
        rules: &ActiveRules,
        revision: u64,
        rows: &[EmergencyRow],
    ) -> Result<ActiveRules, String> {
        rules.with_emergencies((revision, rows), self)
    }

    fn with_namespaces(&self, rules: &ActiveRules, namespaces: Arc<NamespaceOverrides>) -> ActiveRules {
        rules.with_set(rules.set().with_namespaces(namespaces))
    }

    fn rules(&self) -> Arc<ActiveRules> {
        self.rules.load_full()
    }

    fn replace_rules(&self, rules: Arc<ActiveRules>) -> Arc<ActiveRules> {
        self.rules.store(rules)
    }

    fn has_tenant(&self, name: &str) -> bool {
        self.tenants.iter().any(|tenant| tenant.name == name)
    }

    fn fleet(&self) -> &Fleet {
        &self.fleet.configured
    }
}

impl CredentialTarget for Shared {
    fn is_open(&self) -> bool {
        self.credentials.load().is_open()
    }

    /// A token that is invalid here gives no access and does not affect the others.
    fn admit_stored(&self, stored: &[Credential]) {
        let mut merged = self.credentials.load().configured();
        // Without configured tokens the server already allows everything to every caller, also
        // while the store is unreachable.
        if merged.is_open() {
            return;
        }
        for credential in stored {
            if let Err(problem) = add(&mut merged, credential, self) {
                let name = &credential.name;
                tracing::warn!(credential = name, problem, "a token of the store opens nothing here");
            }
        }
        self.credentials.store(merged);
    }

    fn has_approver_beside(&self, names: &HashSet<String>) -> bool {
        self.credentials.load().has_approver_beside(names, OPERATING_TENANT, self.now_ms())
    }
}

fn add(merged: &mut Credentials, credential: &Credential, shared: &Shared) -> Result<(), String> {
    let tenant = shared.tenants.iter().position(|tenant| tenant.name == credential.tenant);
    let tenant = tenant.ok_or_else(|| format!("tenant: {:?} is not configured", credential.tenant))?;
    let role = Role::of_name(&credential.role);
    let role = role.ok_or_else(|| format!("role: there is none called {:?}", credential.role))?;
    let hash: TokenHash = format!("sha256:{}", credential.hash).parse().map_err(str::to_owned)?;
    let principal = Principal { tenant, role };
    merged.add_stored(hash, principal, &credential.name, credential.expires_ms).map_err(str::to_owned)
}

impl Node for Shared {
    fn now_ms(&self) -> u64 {
        self.now_ms()
    }

    fn key_memory(&self) -> &KeyMemory {
        &self.key_memory
    }

    fn secret_headers(&self) -> &SecretHeaders {
        &self.protocol.secret_headers
    }

    fn log(&self) -> Option<&LogReplay> {
        self.telemetry.decision_log.as_ref().map(DecisionLog::replay)
    }

    fn note(&self, event: ControlEvent) {
        self.telemetry.metrics.control.note(event);
    }

    fn follow(&self, control: Arc<Control>) {
        self.rules.follow(control);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidegate::ManualClock;
    use tidegate_control::{LOOK_EVERY, StoreConfig, StoreFollower};
    use tidegate_rules::Dimensions;
    use tidegate_rules::change::{ChangeState, Operation, Proposal};
    use tidegate_rules::rows::RowKind;
    use tidegate_testkit::Redis;

    use super::*;
    use crate::fuzzing::small_config;
    use crate::metrics::Surface;

    /// Users with requests.
    const USERS: usize = 20;

    /// A server that follows an empty store.
    struct Fixture {
        /// If its time passes by hand.
        clock: Option<Arc<ManualClock>>,
        shared: Arc<Shared>,
        control: Arc<Control>,
    }

    impl Fixture {
        async fn start() -> Self {
            let clock = Arc::new(ManualClock::new());
            clock.set(1, 1_800_000_000_000_000);
            let shared = Shared::on_clock(&mut small_config(None), Arc::clone(&clock)).expect("fits");
            Self::follow(shared, Some(clock)).await
        }

        /// Starts a server with an origin, on the clock of the system.
        async fn with_origin(redis: &Redis) -> Self {
            let config = format!("origin = \"{}\"\norigin_timeout = \"5s\"", redis.url());
            Self::follow(Shared::new(&mut small_config(Some(&config))).expect("fits"), None).await
        }

        async fn follow(shared: Shared, clock: Option<Arc<ManualClock>>) -> Self {
            let shared = Arc::new(shared);
            let config = StoreConfig {
                address: "sqlite::memory:".parse().expect("an address"),
                placement: None,
                snapshots: None,
                reconcile: Duration::from_hours(1),
                look: None,
            };
            StoreFollower::start(&config, &shared).await.expect("an empty store");
            let control = Arc::clone(shared.rules.control().expect("a store"));
            Self { clock, shared, control }
        }

        /// Gives each user this many requests an hour, and returns the change.
        async fn limit(&self, limit: u32) -> u64 {
            // Without its origin, a limit of this class fails closed.
            let body = format!(r#"{{"key":["user"],"limit":{limit},"period":"1h","class":"cost"}}"#);
            let operation = Operation::Put { kind: RowKind::Rule, name: "per_user".to_owned(), body };
            let revision = self.control.store().revisions().await.expect("revisions").revision;
            let proposal = Proposal::new(revision, "a test", vec![operation]);
            let ada = self.control.attribution("ada").expect("a running node");
            let change = self.control.store().apply_new(&proposal, false, ada);
            let change = change.await.expect("applied");
            self.control.refresh().await.expect("in force");
            change.id
        }

        /// Sends requests of a user; returns how many pass.
        async fn passed(&self, user: &str, requests: usize) -> usize {
            let dimensions = Dimensions::new([("user", user)]).expect("good dimensions");
            let rules = self.shared.rules.load();
            let mut passed = 0;
            for _ in 0..requests {
                let request = rules.match_request(&self.shared, 0, &dimensions);
                let decided = request.decide(&self.shared, Surface::Check, 1).await.expect("decided");
                passed += usize::from(decided.is_allowed());
            }
            passed
        }

        /// Lets the time between two looks pass, and looks.
        async fn look(&self) {
            if let Some(clock) = &self.clock {
                clock.advance(LOOK_EVERY);
            }
            self.control.look_once(Arc::clone(&self.shared)).await;
            self.control.refresh().await.expect("in force");
        }

        /// Looks for a minute, with a request of each user before each look.
        async fn minute(&self) {
            for _ in 0..12 {
                assert_eq!(self.passed_by_all(1).await, USERS);
                self.look().await;
            }
        }

        /// Sends requests of each user; returns how many pass.
        async fn passed_by_all(&self, requests: usize) -> usize {
            let mut passed = 0;
            for user in 0..USERS {
                passed += self.passed(&format!("user-{user}"), requests).await;
            }
            passed
        }

        async fn state(&self, change: u64) -> ChangeState {
            self.control.store().change(change).await.expect("a change").state
        }
    }

    #[tokio::test]
    async fn change_after_which_a_rule_denies_far_more_is_rolled_back() {
        let fixture = Fixture::start().await;
        fixture.limit(1_000_000).await;
        fixture.minute().await;
        let lowered = fixture.limit(1).await;
        assert_eq!(fixture.passed("user-0", 400).await, 1);
        fixture.look().await;
        assert_eq!(fixture.state(lowered).await, ChangeState::Applied, "one key undoes nothing");
        assert_eq!(fixture.passed_by_all(2).await, USERS - 1);
        fixture.look().await;
        assert_eq!(fixture.state(lowered).await, ChangeState::RolledBack);
        assert_eq!(fixture.passed("user-0", 10).await, 10);
        let rollback = fixture.control.last_rollback().expect("a rollback");
        assert_eq!((rollback.change, rollback.revision), (lowered, 3));
    }

    #[tokio::test]
    async fn denials_without_the_origin_roll_no_change_back() {
        let mut redis = Redis::start(&[]);
        let fixture = Fixture::with_origin(&redis).await;
        fixture.limit(1_000_000).await;
        fixture.minute().await;
        let lowered = fixture.limit(999_999).await;
        redis.kill();
        assert_eq!(fixture.passed_by_all(2).await, 0, "it fails closed");
        fixture.look().await;
        fixture.look().await;
        assert_eq!(fixture.state(lowered).await, ChangeState::Applied);
        assert_eq!(fixture.control.last_alarm(), None);
    }

    #[tokio::test]
    async fn denials_by_an_emergency_roll_no_change_back() {
        let fixture = Fixture::start().await;
        fixture.limit(1_000_000).await;
        fixture.minute().await;
        let lowered = fixture.limit(500).await;
        let body = r#"{"action":"block","rule":"per_user"}"#.to_owned();
        let expires_ms = fixture.shared.now_ms() + 600_000;
        let emergency = EmergencyRow { id: "stop".to_owned(), body, expires_ms };
        let (store, ada) = (fixture.control.store(), fixture.control.attribution("ada").expect("runs"));
        store.put_emergency(&emergency, ada).await.expect("put");
        fixture.look().await;
        assert_eq!(fixture.passed_by_all(20).await, 0);
        fixture.look().await;
        let alarm = fixture.control.last_alarm().expect("it denies all keys");
        assert_eq!(alarm.emergency.as_deref(), Some("stop"));
        store.end_emergency("stop", ada).await.expect("ended");
        fixture.look().await;
        fixture.look().await;
        assert_eq!(fixture.state(lowered).await, ChangeState::Applied);
        assert_eq!(fixture.passed_by_all(501).await, USERS * 500);
        fixture.look().await;
        assert_eq!(fixture.state(lowered).await, ChangeState::RolledBack, "denials of its own");
    }
}
