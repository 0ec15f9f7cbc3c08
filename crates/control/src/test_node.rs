//! A node for tests: it decides by core's meters, and its time passes by hand.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tidegate_core::bound::Fleet;
use tidegate_core::{Limit, Meter, Now};
use tidegate_record::{DecisionEntry, LimitTerms, Log, LogSettings, RecordVerdict};
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::store::Credential;
use tidegate_rules::{Dimensions, Mode, NamespaceOverrides, RuleMatch, RuleSet};

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

/// The meter of a key, and the limit that it was charged under last.
type KeyMeter = (Limit, Meter);

/// A node without tenants and tokens.
#[derive(Debug)]
pub(crate) struct TestNode {
    clock: TestClock,
    rules: ArcSwap<TestRules>,
    meters: Mutex<HashMap<(String, Vec<String>), KeyMeter>>,
    log: Option<(Log, LogReplay)>,
    events: Mutex<Vec<ControlEvent>>,
    fleet: Fleet,
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
            };
            let log = Log::open(folder, settings, move || of.now_ms()).expect("a log");
            (log, LogReplay::new(folder, 1.0))
        });
        Arc::new(Self {
            clock,
            rules: ArcSwap::default(),
            meters: Mutex::default(),
            log,
            events: Mutex::default(),
            fleet: Fleet::of(1),
        })
    }

    /// How often the node counted an event.
    pub(crate) fn count_of(&self, event: ControlEvent) -> usize {
        self.events.lock().expect("no panic").iter().filter(|counted| **counted == event).count()
    }

    /// Decides a request of cost 1 under all rules, and returns whether it passes.
    pub(crate) fn decide(&self, dimensions: &Dimensions<'_>) -> bool {
        let (rules, now_ms) = (self.rules(), self.clock.now_ms());
        let now = Now::from_micros((now_ms - STARTED_MS) * 1_000, now_ms * 1_000);
        let mut meters = self.meters.lock().expect("no panic");
        let mut outcomes = Vec::new();
        for found in rules.set.matching("", dimensions, now_ms) {
            let key: Vec<String> = found.key.iter().map(|part| (*part).to_owned()).collect();
            let (limit, place) = (found.terms.limit, (found.rule.name.to_string(), key));
            let meter = meters.get(&place).map_or_else(
                || Meter::empty(&limit),
                |(known, meter)| {
                    if *known == limit {
                        return *meter;
                    }
                    // The spent units stay the same under another limit.
                    Meter::empty(&limit).merge(&limit, now, meter.used(known, now))
                },
            );
            let (verdict, after) = meter.decide(&limit, now, 1);
            outcomes.push((found, place, verdict.is_allowed(), (limit, after)));
        }
        let passes = outcomes.iter().all(|(found, _, is_allowed, _)| *is_allowed || is_shadow(found));
        let decided_by = outcomes.iter().find(|(_, _, is_allowed, _)| !is_allowed).or(outcomes.first());
        if let Some((found, ..)) = decided_by {
            self.record(&rules, found, passes);
        }
        for (found, place, is_allowed, after) in outcomes {
            let count = &rules.counts[found.position];
            match found.terms.mode {
                _ if found.terms.emergency.is_some() => {}
                Mode::Enforce => count.count(is_allowed),
                Mode::Shadow => count.count_in_shadow(is_allowed),
            }
            if passes && is_allowed {
                meters.insert(place, after);
            }
        }
        passes
    }

    fn record(&self, rules: &TestRules, found: &RuleMatch<'_, '_>, passes: bool) {
        let Some((log, _)) = &self.log else { return };
        let entry = DecisionEntry {
            at_ms: self.clock.now_ms(),
            tenant: "",
            surface: "test",
            key: "",
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

fn is_shadow(found: &RuleMatch<'_, '_>) -> bool {
    found.terms.mode == Mode::Shadow
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
        true
    }

    fn admit_stored(&self, _: &[Credential]) {}

    fn has_approver_beside(&self, _: &HashSet<String>) -> bool {
        false
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
