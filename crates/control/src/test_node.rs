//! A node for tests: it counts and logs requests without deciding them, and its time passes by
//! hand.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tidegate_core::bound::Fleet;
use tidegate_record::{DecisionEntry, FLUSH_EVERY, LimitTerms, Log, LogSettings, RecordVerdict};
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::store::Credential;
use tidegate_rules::{Mode, NamespaceOverrides, Rule, RuleSet};

use crate::control::Control;
use crate::log_replay::LogReplay;
use crate::node::{ControlEvent, CredentialTarget, Node, NodeRules, RuleTarget};
use crate::rule_count::RuleCount;

/// The time when the clock of a test starts.
pub(crate) const STARTED_MS: u64 = 1_800_000_000_000;

/// A rule set with counts.
#[derive(Debug, Default)]
pub(crate) struct TestRules {
    set: RuleSet,
    counts: Arc<[RuleCount]>,
}

impl NodeRules for TestRules {
    fn set(&self) -> &RuleSet {
        &self.set
    }

    fn counts(&self) -> &[RuleCount] {
        &self.counts
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

/// A node without tenants.
#[derive(Debug)]
pub(crate) struct TestNode {
    clock: TestClock,
    rules: ArcSwap<TestRules>,
    log: Option<(Log, LogReplay)>,
    events: Mutex<Vec<ControlEvent>>,
    fleet: Fleet,
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
        Arc::new(Self {
            clock,
            rules: ArcSwap::default(),
            log,
            events: Mutex::default(),
            fleet: Fleet::of(1),
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

    /// Counts and logs requests of one new user under a rule: the first pass, up to the limit.
    pub(crate) fn count_requests(&self, rule: &str, requests: u32) {
        let rules = self.rules();
        let (rule, count) = rules.counted().find(|(known, _)| *known.name == *rule).expect("a rule");
        for number in 0..requests {
            let is_allowed = number < rule.limit.amount();
            match rule.mode {
                Mode::Enforce => count.count(is_allowed),
                Mode::Shadow => count.count_in_shadow(is_allowed),
            }
            self.record(&rules, rule, is_allowed || rule.mode == Mode::Shadow);
        }
    }

    fn record(&self, rules: &TestRules, rule: &Rule, passes: bool) {
        let Some((log, _)) = &self.log else { return };
        let entry = DecisionEntry {
            at_ms: self.clock.now_ms(),
            tenant: "",
            surface: "test",
            key: "",
            cost: 1,
            verdict: if passes { RecordVerdict::Allowed } else { RecordVerdict::Denied },
            rule: &rule.name,
            rule_version: rule.version,
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
        let counts = set.rules().iter().map(|_| RuleCount::default()).collect();
        Ok(TestRules { set, counts })
    }

    fn with_emergencies(
        &self,
        rules: &TestRules,
        revision: u64,
        rows: &[EmergencyRow],
    ) -> Result<TestRules, String> {
        let set = rules.set.with_emergencies(revision, rows, self.now_ms());
        let set = set.map_err(|problems| problems.to_string())?;
        Ok(TestRules { set, counts: Arc::clone(&rules.counts) })
    }

    fn with_namespaces(&self, rules: &TestRules, namespaces: Arc<NamespaceOverrides>) -> TestRules {
        TestRules { set: rules.set.with_namespaces(namespaces), counts: Arc::clone(&rules.counts) }
    }

    fn rules(&self) -> Arc<TestRules> {
        self.rules.load_full()
    }

    fn replace_rules(&self, rules: Arc<TestRules>) -> Arc<TestRules> {
        self.rules.swap(rules)
    }

    fn has_tenant(&self, name: &str) -> bool {
        name.is_empty()
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

    fn log(&self) -> Option<&LogReplay> {
        self.log.as_ref().map(|(_, replay)| replay)
    }

    fn note(&self, event: ControlEvent) {
        self.events.lock().expect("no panic").push(event);
    }

    fn follow(&self, _: Arc<Control<Self>>) {}
}
