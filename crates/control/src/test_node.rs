//! A node for tests: it notes and logs requests without deciding them, and its time passes by
//! hand.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tidegate_core::bound::Fleet;
use tidegate_record::{DecisionEntry, FLUSH_EVERY, LimitTerms, Log, LogSettings, RecordVerdict};
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::store::Credential;
use tidegate_rules::{Dimensions, Mode, NamespaceOverrides, RuleMatch, RuleSet, SecretHeaders};

use crate::control::Control;
use crate::log_replay::LogReplay;
use crate::node::{ControlEvent, CredentialTarget, Node, NodeRules, RuleTarget};
use crate::rule_keys::{EmergencyTag, KeyMemory, KeyOutcome, RuleKeys};

/// The time when the clock of a test starts.
pub(crate) const STARTED_MS: u64 = 1_800_000_000_000;

/// The tenants of a test; the first is the operating one.
pub(crate) const TENANTS: [&str; 3] = ["", "east", "west"];

/// A rule set with recent keys.
#[derive(Debug)]
pub(crate) struct TestRules {
    set: RuleSet,
    keys: Arc<[RuleKeys]>,
    memory: Arc<KeyMemory>,
}

impl TestRules {
    fn new(set: RuleSet, memory: Arc<KeyMemory>) -> Self {
        let keys = set.rules().iter().map(|_| RuleKeys::default()).collect();
        Self { set, keys, memory }
    }

    /// No rules, with the same keys.
    fn share(&self) -> Self {
        let (keys, memory) = (Arc::clone(&self.keys), Arc::clone(&self.memory));
        Self { set: RuleSet::default(), keys, memory }
    }

    /// Rules with these names, for all tenants.
    pub(crate) fn of(names: &[&str]) -> Self {
        let row = |name: &&str| RuleRow {
            kind: RowKind::Rule,
            name: (*name).to_owned(),
            body: r#"{"key":["user"],"limit":1,"period":"1h"}"#.to_owned(),
            version: 1,
        };
        let mut rows: Vec<RuleRow> = names.iter().map(row).collect();
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        let rule_rows = RuleRows { revision: 1, rows: rows.into(), ..RuleRows::default() };
        let set = RuleSet::compile(&rule_rows, None, STARTED_MS).expect("rules");
        Self::new(set, memory())
    }

    /// Notes one outcome for each of these keys of a tenant.
    pub(crate) fn note_keys(&self, rule: &str, (tenant, keys): (&str, Range<u32>), outcome: KeyOutcome) {
        let (_, known) = self.counted().find(|(known, _)| *known.name == *rule).expect("a rule");
        keys.for_each(|key| known.note(&self.memory, (tenant, [&*user(key)]), outcome));
    }
}

fn memory() -> Arc<KeyMemory> {
    Arc::new(KeyMemory::new(TENANTS))
}

/// The name of a user.
pub(crate) fn user(number: u32) -> String {
    format!("u{number}")
}

impl NodeRules for TestRules {
    fn set(&self) -> &RuleSet {
        &self.set
    }

    fn keys(&self) -> &[RuleKeys] {
        &self.keys
    }
}

/// The clock of a test, in milliseconds.
#[derive(Clone, Debug)]
pub(crate) struct TestClock(Arc<AtomicU64>);

impl TestClock {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicU64::new(STARTED_MS)))
    }

    pub(crate) fn advance(&self, time: Duration) {
        self.0.fetch_add(u64::try_from(time.as_millis()).expect("short"), Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A node.
#[derive(Debug)]
pub(crate) struct TestNode {
    clock: TestClock,
    memory: Arc<KeyMemory>,
    rules: ArcSwap<TestRules>,
    log: Option<(Log, LogReplay)>,
    events: Mutex<Vec<ControlEvent>>,
    fleet: Fleet,
    secret_headers: SecretHeaders,
    /// The names whose tokens may approve changes; `None` without tokens.
    approvers: Mutex<Option<HashSet<String>>>,
}

impl TestNode {
    pub(crate) fn new() -> Arc<Self> {
        Self::start(TestClock::new(), None)
    }

    /// Starts a node, with a complete decision log if there is a folder.
    pub(crate) fn start(clock: TestClock, folder: Option<&Path>) -> Arc<Self> {
        let of = clock.clone();
        let log = folder.map(|folder| {
            let settings = LogSettings {
                threads: 1,
                sample_rate: 1.0,
                retention: Duration::from_hours(24),
                bytes_max: 1 << 24,
                region: String::new(),
                node: "n".to_owned(),
                seed: 7,
                otlp: None,
                flush_every: FLUSH_EVERY,
            };
            let log = Log::open(folder, settings, move || of.now_ms()).expect("a log");
            (log, LogReplay::new(folder, 1.0))
        });
        let memory = memory();
        Arc::new(Self {
            clock,
            rules: ArcSwap::from_pointee(TestRules::new(RuleSet::default(), Arc::clone(&memory))),
            memory,
            log,
            events: Mutex::default(),
            fleet: Fleet::of(1),
            secret_headers: SecretHeaders::default(),
            approvers: Mutex::default(),
        })
    }

    /// Requires a token from all callers; those of these names may approve changes.
    pub(crate) fn set_approvers(&self, names: &[&str]) {
        let names = names.iter().map(ToString::to_string).collect();
        *self.approvers.lock().expect("no panic") = Some(names);
    }

    /// How often the node counted an event.
    pub(crate) fn count_of(&self, event: ControlEvent) -> usize {
        self.events.lock().expect("no panic").iter().filter(|counted| **counted == event).count()
    }

    /// Returns the limit of a rule in force.
    pub(crate) fn limit(&self, rule: &str) -> u32 {
        self.rules().set.rules().iter().find(|known| *known.name == *rule).expect("a rule").limit.amount()
    }

    /// Notes and logs requests of users of a tenant, each with unused limits: its first pass, up to
    /// the limit.
    pub(crate) fn note_users(&self, rule: &str, (tenant, users): (&str, Range<u32>), requests: u32) {
        let rules = self.rules();
        for number in users {
            let name = user(number);
            let request = Dimensions::new([("user", &*name)]).expect("good dimensions");
            let mut matching = rules.set.matching(tenant, &request, self.now_ms());
            let found = matching.find(|found| *found.rule.name == *rule).expect("a rule for the request");
            for number in 0..requests {
                let block = found.terms.emergency.filter(|emergency| emergency.is_block);
                let outcome = match found.terms.mode {
                    _ if block.is_some() => {
                        KeyOutcome::DeniedByEmergency(EmergencyTag::of(block.expect("a block").id))
                    }
                    _ if number < found.terms.limit.amount() => KeyOutcome::Allowed,
                    Mode::Enforce => KeyOutcome::Denied,
                    Mode::Shadow => KeyOutcome::DeniedInShadow,
                };
                rules.keys[found.position].note(&self.memory, (tenant, found.key.iter().copied()), outcome);
                self.record(
                    &rules,
                    (tenant, &found),
                    matches!(outcome, KeyOutcome::Allowed | KeyOutcome::DeniedInShadow),
                );
            }
        }
    }

    fn record(&self, rules: &TestRules, (tenant, found): (&str, &RuleMatch<'_, '_>), passes: bool) {
        let Some((log, _)) = &self.log else { return };
        let entry = DecisionEntry {
            at_ms: self.clock.now_ms(),
            tenant,
            surface: "test",
            key: &format!("user:{}", found.key[0]),
            cost: 1,
            verdict: if passes { RecordVerdict::Allowed } else { RecordVerdict::Denied },
            rule: &found.rule.name,
            rule_version: found.rule.version,
            set_version: rules.set.version(),
            replaced_by: "",
            limit: LimitTerms::default(),
            remaining: 0,
            retry_ms: None,
            source: "local",
            reason: "limit",
            until_ms: None,
        };
        log.recorder().write(0, &entry, []);
    }
}

impl RuleTarget for TestNode {
    type Rules = TestRules;

    fn check_set(&self, _: &RuleSet) -> Result<(), String> {
        Ok(())
    }

    fn prepare(&self, set: RuleSet) -> Result<TestRules, String> {
        Ok(TestRules::new(set, Arc::clone(&self.memory)))
    }

    fn with_emergencies(
        &self,
        rules: &TestRules,
        revision: u64,
        rows: &[EmergencyRow],
    ) -> Result<TestRules, String> {
        let set = rules.set.with_emergencies(revision, rows, self.now_ms());
        let set = set.map_err(|problems| problems.to_string())?;
        Ok(TestRules { set, ..rules.share() })
    }

    fn with_namespaces(&self, rules: &TestRules, namespaces: Arc<NamespaceOverrides>) -> TestRules {
        TestRules { set: rules.set.with_namespaces(namespaces), ..rules.share() }
    }

    fn rules(&self) -> Arc<TestRules> {
        self.rules.load_full()
    }

    fn replace_rules(&self, rules: Arc<TestRules>) -> Arc<TestRules> {
        self.rules.swap(rules)
    }

    fn has_tenant(&self, name: &str) -> bool {
        TENANTS.contains(&name)
    }

    fn fleet(&self) -> &Fleet {
        &self.fleet
    }
}

impl CredentialTarget for TestNode {
    fn is_open(&self) -> bool {
        self.approvers.lock().expect("no panic").is_none()
    }

    fn admit_stored(&self, _: &[Credential]) {}

    fn has_approver_beside(&self, names: &HashSet<String>) -> bool {
        let approvers = self.approvers.lock().expect("no panic");
        approvers.as_ref().is_some_and(|approvers| !approvers.is_subset(names))
    }
}

impl Node for TestNode {
    fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    fn key_memory(&self) -> &KeyMemory {
        &self.memory
    }

    fn secret_headers(&self) -> &SecretHeaders {
        &self.secret_headers
    }

    fn log(&self) -> Option<&LogReplay> {
        self.log.as_ref().map(|(_, replay)| replay)
    }

    fn note(&self, event: ControlEvent) {
        self.events.lock().expect("no panic").push(event);
    }

    fn follow(&self, _: Arc<Control<Self>>) {}
}
