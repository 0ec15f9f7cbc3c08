//! The rule set in force, with its gates, recent keys and bounds; finds the rules that apply to a
//! request.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tidegate::region::RegionPolicy;
use tidegate::{Algorithm, Gate, Limit, UnknownName};
use tidegate_control::RuleKeys;
use tidegate_core::bound::{Faults, Fleet, Promise, bound};
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::{Dimensions, FILE_BYTES_MAX, Rule, RuleMatch, RuleSet, TomlLines};

use crate::auth::TenantIndex;
use crate::decider::Decider;
use crate::pipeline::rules::{MatchedRequest, MatchedRule};
use crate::shared::{Shared, Tenant};

/// The most gates of a set, one for each rule and tenant it is for: a bound on their memory, some
/// 200 bytes each.
const GATES_MAX: usize = 1_000_000;

/// A rule set with the gates of every tenant.
#[derive(Debug, Default)]
pub(crate) struct ActiveRules {
    set: RuleSet,
    gates: Arc<RuleGates>,
    /// By tenant: the dimensions that its rules look at.
    used: Vec<Vec<String>>,
}

/// The state of rules that does not depend on emergencies.
#[derive(Debug, Default)]
struct RuleGates {
    /// By tenant: the gates of the rules that are for it, by the rule's position, in order.
    of_tenants: Vec<Box<[(usize, Gate)]>>,
    /// By tenant: the dimensions that its rules look at, but for those that only emergencies do.
    used: Vec<Vec<String>>,
    /// By position of the rule: its recent keys.
    keys: Box<[RuleKeys]>,
    bounds: ArcSwap<RuleBounds>,
}

/// How far rules may be passed, by their positions.
#[derive(Debug, Default)]
struct RuleBounds {
    units: Box<[u64]>,
    /// The fleet that the bounds are for.
    fleet: Option<Arc<Fleet>>,
}

impl RuleBounds {
    fn new(set: &RuleSet, fleet: Arc<Fleet>) -> Self {
        let units = set.rules().iter().map(|rule| most_above(rule, &rule.limit, &fleet)).collect();
        Self { units, fleet: Some(fleet) }
    }

    fn most_above(&self, position: usize, rule: &Rule, limit: &Limit) -> Option<u64> {
        if *limit == rule.limit {
            return self.units.get(position).copied();
        }
        self.fleet.as_ref().map(|fleet| most_above(rule, limit, fleet))
    }
}

impl ActiveRules {
    /// Makes the gates of a set.
    pub(crate) fn new(set: RuleSet, shared: &Shared) -> Result<Self, String> {
        check_tenants(&set, &shared.tenants)?;
        let of_tenant = |tenant: &Tenant| {
            // There may be a million: they are not moved as more of them come.
            let mut gates = Vec::with_capacity(set.rules_for(&tenant.name).count());
            for (position, rule) in set.rules_for(&tenant.name) {
                gates.push((position, gate(&shared.decider, tenant, rule, rule.limit)?));
            }
            gates.sort_unstable_by_key(|(position, _)| *position);
            Ok(gates.into())
        };
        let of_tenants: Result<_, UnknownName> = shared.tenants.iter().map(of_tenant).collect();
        let of_tenants = of_tenants.map_err(|error| error.to_string())?;
        let keys = set.rules().iter().map(|_| RuleKeys::default()).collect();
        let bounds = ArcSwap::from_pointee(RuleBounds::new(&set, shared.fleet.measured()));
        let used =
            |tenant: &Tenant| set.rule_dimensions(&tenant.name).into_iter().map(str::to_owned).collect();
        let used = shared.tenants.iter().map(used).collect();
        Ok(Self::of_gates(Arc::new(RuleGates { of_tenants, used, keys, bounds }), set, shared))
    }

    /// The same rules, with the same gates, under other emergencies.
    pub(crate) fn with_emergencies(
        &self,
        (revision, rows): (u64, &[EmergencyRow]),
        shared: &Shared,
    ) -> Result<Self, String> {
        let set = self.set.with_emergencies(revision, rows, shared.now_ms());
        let set = set.map_err(|problems| problems.to_string())?;
        Ok(Self::of_gates(Arc::clone(&self.gates), set, shared))
    }

    fn of_gates(gates: Arc<RuleGates>, set: RuleSet, shared: &Shared) -> Self {
        let used = gates.used.iter().zip(&shared.tenants).map(|(used, tenant)| {
            let mut used = used.clone();
            // Emergencies change rules: a tenant without rules needs no dimension of theirs.
            if set.has_rules_for(&tenant.name) {
                used.extend(set.emergency_dimensions(&tenant.name).map(str::to_owned));
                used.sort_unstable();
                used.dedup();
            }
            used
        });
        Self { used: used.collect(), gates, set }
    }

    /// The same rules, with the same gates, as a set that only differs in overrides of namespaces.
    pub(crate) fn with_set(&self, set: RuleSet) -> Self {
        Self { set, gates: Arc::clone(&self.gates), used: self.used.clone() }
    }

    /// Computes the bounds in responses for this fleet.
    pub(crate) fn note_fleet(&self, fleet: Arc<Fleet>) {
        let known = self.gates.bounds.load();
        if !known.fleet.as_ref().is_some_and(|known| Arc::ptr_eq(known, &fleet)) {
            self.gates.bounds.store(Arc::new(RuleBounds::new(&self.set, fleet)));
        }
    }

    /// Returns the recent keys of the rules, by position.
    pub(crate) fn keys(&self) -> &[RuleKeys] {
        &self.gates.keys
    }

    /// Reads a rules file.
    pub(crate) fn load(path: &Path, shared: &Shared) -> Result<Self, String> {
        let text = read_text(path, FILE_BYTES_MAX)?;
        let located = |problem: String| {
            problem.lines().map(|line| format!("{}: {line}", path.display())).collect::<Vec<_>>().join("\n")
        };
        let set = RuleSet::parse(&text).map_err(|problems| located(problems.to_string()))?;
        let with_line = |problem| TomlLines::read(&text).locate(vec![problem]).join("\n");
        Self::new(set, shared).map_err(|problem| located(with_line(problem)))
    }

    /// The dimensions that the rules for a tenant look at.
    pub(crate) fn dimensions_used(&self, tenant: TenantIndex) -> &[String] {
        self.used.get(tenant).map(Vec::as_slice).unwrap_or_default()
    }

    /// The rules themselves.
    pub(crate) fn set(&self) -> &RuleSet {
        &self.set
    }

    /// Finds the rules that apply to a request.
    pub(crate) fn match_request<'r, 'd>(
        &'r self,
        shared: &Shared,
        tenant: TenantIndex,
        request: &'d Dimensions<'d>,
    ) -> MatchedRequest<'r, 'd> {
        let name = &shared.tenant(tenant).name;
        let now_ms = shared.decider.limiter.wall_us() / 1_000;
        let bounds = self.gates.bounds.load();
        let matching = self.set.matching(name, request, now_ms).filter_map(|found| {
            let gate = self.gate(shared, tenant, &found)?;
            let keys = self.gates.keys.get(found.position)?;
            let bound = bounds.most_above(found.position, found.rule, &found.terms.limit)?;
            Some(MatchedRule { matched: found, bound, keys, gate })
        });
        MatchedRequest::new(self, tenant, request, matching, self.placement(&shared.decider, name, request))
    }

    /// Returns the gate for the effective limit: the rule's own, or one of the same meters under
    /// another limit.
    fn gate<'r>(
        &'r self,
        shared: &Shared,
        tenant: TenantIndex,
        found: &RuleMatch<'r, '_>,
    ) -> Option<Cow<'r, Gate>> {
        let gates = self.gates.of_tenants.get(tenant)?;
        let at = gates.binary_search_by_key(&found.position, |(position, _)| *position).ok()?;
        let own = &gates[at].1;
        let (limit, usual) = (found.terms.limit, &found.rule.limit);
        if limit == *usual {
            return Some(Cow::Borrowed(own));
        }
        if limit.algorithm() == Algorithm::Gcra || limit.period_us() == usual.period_us() {
            return Some(Cow::Owned(own.with_limit(limit)));
        }
        // Windows of another period have meters of their own. The tenant is there: it has a gate.
        let other = gate(&shared.decider, shared.tenant(tenant), found.rule, limit);
        Some(other.map_or(Cow::Borrowed(own), Cow::Owned))
    }

    /// Returns the placement of a request's meters: by the dimension that places rules, or one for
    /// all of a tenant.
    fn placement(&self, decider: &Decider, tenant: &str, request: &Dimensions<'_>) -> Vec<u8> {
        let placed_by = self.set.placement().and_then(|dimension| request.get(dimension));
        decider.placement(&[tenant.as_bytes(), placed_by.unwrap_or_default().as_bytes()])
    }
}

/// Whether a server with these tenants can take a set.
pub(crate) fn check_tenants(set: &RuleSet, tenants: &[Tenant]) -> Result<(), String> {
    let gates: usize = tenants.iter().map(|tenant| set.rules_for(&tenant.name).count()).sum();
    if gates > GATES_MAX {
        return Err(format!(
            "rules: {gates}, counted once for each tenant they are for, is outside 0 to {GATES_MAX}"
        ));
    }
    let known: HashSet<&str> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    let mut named = set.rules().iter().filter_map(|rule| Some((rule, rule.tenant.as_deref()?)));
    match named.find(|(_, tenant)| !known.contains(tenant)) {
        None => Ok(()),
        Some((rule, tenant)) => {
            Err(format!("rules[{:?}].tenant: there is no [[tenants]] entry named {tenant:?}", rule.name))
        }
    }
}

/// Returns the gate of a rule, or of another limit for some of its keys. The meters belong to the
/// rule's name, not to the limit.
fn gate(decider: &Decider, tenant: &Tenant, rule: &Rule, limit: Limit) -> Result<Gate, UnknownName> {
    let gate = decider.gate(&tenant.name, &format!("rule:{}", rule.name), limit, policy(rule))?;
    Ok(gate.with_name(&*rule.name))
}

/// Returns the bound of a limit of a rule, in units, if every fault occurs once.
fn most_above(rule: &Rule, limit: &Limit, fleet: &Fleet) -> u64 {
    bound(&rule.promise(limit), fleet, &Faults::ONE_OF_EACH).total()
}

/// Logs warnings about rules that their authors may not have intended.
pub(crate) fn warn_of(set: &RuleSet, fleet: &Fleet) {
    for warning in set.warnings(fleet) {
        tracing::warn!(rules = set.version(), "{warning}");
    }
}

/// How a region treats a rule.
fn policy(rule: &Rule) -> RegionPolicy {
    let Promise { class, paid, tolerance_ppm, regime, .. } = rule.promise(&rule.limit);
    // No set has a rule of a higher version.
    let version = u32::try_from(rule.version).unwrap_or(u32::MAX);
    RegionPolicy { class, paid, tolerance_ppm, regime, version }
}

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: usize) -> Result<String, String> {
    let problem = |error: std::io::Error| format!("{}: {error}{}", path.display(), store_hint(path, &error));
    let mut text = String::new();
    // One byte above the maximum proves that the file is too long. The length of a pipe is unknown.
    let file = std::fs::File::open(path).map_err(problem)?;
    file.take(most as u64 + 1).read_to_string(&mut text).map_err(problem)?;
    if text.len() > most {
        return Err(format!("{}: more than {most} bytes", path.display()));
    }
    Ok(text)
}

/// Names the address of a store, if a missing file has the name of one.
fn store_hint(path: &Path, error: &std::io::Error) -> String {
    let is_database = path.extension().is_some_and(|extension| extension == "db" || extension == "sqlite");
    if is_database && error.kind() == std::io::ErrorKind::NotFound {
        format!("; for a store write sqlite:{}", path.display())
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tidegate::{LIMITS_PER_CHECK_MAX, ManualClock};
    use tidegate_rules::Mode;
    use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};

    use super::*;
    use crate::fuzzing::small_config;
    use crate::metrics::Surface;
    use crate::pipeline::rules::RulesError;

    const STARTED_MS: u64 = 1_800_000_000_000;

    #[test]
    fn a_missing_database_is_named_as_a_store() {
        let problem = |path: &str| read_text(Path::new(path), 1).expect_err("is missing");
        let database = problem("/nowhere/rules.db");
        assert!(database.ends_with("; for a store write sqlite:/nowhere/rules.db"), "{database}");
        assert!(!problem("/nowhere/rules.toml").contains("sqlite"));
    }

    fn server() -> (Arc<ManualClock>, Shared) {
        let clock = Arc::new(ManualClock::new());
        clock.set(1, STARTED_MS * 1_000);
        let shared = Shared::on_clock(&mut small_config(None), Arc::clone(&clock)).expect("fits");
        (clock, shared)
    }

    fn gated(shared: &Shared, text: &str) -> ActiveRules {
        ActiveRules::new(RuleSet::parse(text).expect("good rules"), shared).expect("fits")
    }

    /// How many requests of `user` pass, one after the other.
    fn passed(rules: &ActiveRules, shared: &Shared, user: &str) -> usize {
        let request = Dimensions::new([("user", user)]).expect("good dimensions");
        let passes = || {
            let case = rules.match_request(shared, 0, &request);
            let decision = case.decide(shared, Surface::Check, 1).now_or_never().expect("no origin");
            decision.expect("decided").is_allowed()
        };
        // No limit in these tests lets more pass.
        (0..100).take_while(|_| passes()).count()
    }

    fn rule(lines: &str) -> String {
        format!("[[rules]]\nname='a'\nkey=['user']\nlimit=2\nperiod='1m'\n{lines}\n")
    }

    #[test]
    fn an_override_is_another_limit_on_the_same_meters() {
        let (clock, shared) = server();
        let over = "[[overrides]]\nname='o'\nrule='a'\nkey=['al*']\nlimit=6\n";
        for algorithm in ["gcra", "sliding_window"] {
            let plain = rule(&format!("algorithm='{algorithm}'"));
            let (before, after) = (gated(&shared, &plain), gated(&shared, &format!("{plain}{over}")));
            assert_eq!(passed(&before, &shared, "bob"), 2);
            assert_eq!(passed(&after, &shared, "bob"), 0, "what bob spent is still spent");
            assert_eq!(passed(&after, &shared, "alice"), 6, "{algorithm}");
            assert_eq!(passed(&before, &shared, "alice"), 0, "{algorithm}: alice spent more than all of it");
            clock.advance(Duration::from_mins(2));
        }
    }

    #[test]
    fn windows_of_another_period_begin_anew() {
        let (_clock, shared) = server();
        let over = "[[overrides]]\nname='o'\nrule='a'\nkey=['alice']\nlimit=6\nperiod='1h'\n";
        let rules = gated(&shared, &format!("{}{over}", rule("algorithm='sliding_window'")));
        assert_eq!([passed(&rules, &shared, "alice"), passed(&rules, &shared, "bob")], [6, 2]);
    }

    #[test]
    fn under_more_rules_than_can_be_asked_a_request_is_denied_by_each_of_them() {
        let (_clock, shared) = server();
        // Each half of the rules alone is valid.
        let rule = |at: usize| {
            let when = if at.is_multiple_of(2) { "path='/*'" } else { "user='*'" };
            format!("[[rules]]\nname='{at}'\nkey=['user']\nlimit=9\nperiod='1m'\nwhen={{{when}}}\n")
        };
        let rules = gated(&shared, &(0..=LIMITS_PER_CHECK_MAX).map(rule).collect::<String>());
        let request = Dimensions::new([("user", "bob"), ("path", "/")]).expect("good dimensions");
        let case = rules.match_request(&shared, 0, &request);
        let undecided = case.decide(&shared, Surface::Check, 1).now_or_never().expect("no origin");
        assert_eq!(undecided.map(|_| ()), Err(RulesError::TooManyRules { rules: LIMITS_PER_CHECK_MAX + 1 }));
        let denied: Vec<usize> = rules.keys().iter().map(|keys| keys.of_present_look().1).collect();
        assert_eq!(denied, [1; LIMITS_PER_CHECK_MAX + 1]);
        assert_eq!(passed(&rules, &shared, "carol"), 9, "without a path it is under half of them");
    }

    #[test]
    fn of_more_rules_in_shadow_mode_than_can_be_asked_the_first_are() {
        let (_clock, shared) = server();
        let rule = |at: usize| {
            let fields = "key=['user']\nlimit=1\nperiod='1m'\nmode='shadow'\nwhen={user='*'}";
            format!("[[rules]]\nname='{at}'\n{fields}\n")
        };
        let rules = gated(&shared, &(0..=LIMITS_PER_CHECK_MAX).map(rule).collect::<String>());
        let request = Dimensions::new([("user", "bob")]).expect("good dimensions");
        let case = rules.match_request(&shared, 0, &request);
        for is_allowed in [true, false] {
            let decision = case.decide(&shared, Surface::Check, 1).now_or_never().expect("no origin");
            let decision = decision.expect("decided");
            assert!(decision.is_allowed());
            let outcomes: Vec<_> = case.outcomes(&decision).collect();
            assert!(outcomes.iter().all(|(rule, _)| rule.matched.terms.mode == Mode::Shadow));
            let checked: Vec<&str> = outcomes.iter().map(|(rule, _)| &*rule.matched.rule.name).collect();
            assert_eq!(checked, (0..LIMITS_PER_CHECK_MAX).map(|at| at.to_string()).collect::<Vec<_>>());
            assert!(outcomes.iter().all(|(_, outcome)| outcome.is_allowed() == is_allowed));
        }
    }

    #[test]
    fn an_override_that_ends_leaves_the_rule() {
        let (clock, shared) = server();
        let over = format!(
            "[[overrides]]\nname='o'\nrule='a'\nkey=['alice']\nlimit=0\nexpires={}\n",
            STARTED_MS + 5
        );
        let rules = gated(&shared, &format!("{}{over}", rule("")));
        assert_eq!(passed(&rules, &shared, "alice"), 0);
        clock.advance(Duration::from_millis(5));
        assert_eq!(passed(&rules, &shared, "alice"), 2);
    }

    #[test]
    fn an_emergency_goes_before_rules_until_it_ends() {
        let (clock, shared) = server();
        let body = r#"{"key":["user"],"limit":2,"period":"1m"}"#.to_owned();
        let rows = vec![RuleRow { kind: RowKind::Rule, name: "a".to_owned(), body, version: 1 }];
        let emergency = |id: &str, body: &str, ms: u64| EmergencyRow {
            id: id.to_owned(),
            body: body.to_owned(),
            expires_ms: STARTED_MS + ms,
        };
        let emergencies = vec![
            emergency("stop", r#"{"action":"block","when":{"user":"mallory"}}"#, 5),
            emergency("free", r#"{"action":"allow","rule":"a","key":["vip-*"]}"#, 5),
        ];
        let rule_rows = RuleRows {
            revision: 1,
            emergency_revision: 1,
            override_revision: 0,
            rows: rows.into(),
            emergencies,
        };
        let set = RuleSet::compile(&rule_rows, None, STARTED_MS).expect("a good book");
        let rules = ActiveRules::new(set, &shared).expect("fits");
        let each = || ["mallory", "vip-1", "bob"].map(|user| passed(&rules, &shared, user));
        let denied = || rules.keys().iter().map(|keys| keys.of_present_look().1).sum::<usize>();
        assert_eq!(each(), [0, 100, 2]);
        assert_eq!(denied(), 1, "what an emergency denies is not the rule's");
        clock.advance(Duration::from_millis(5));
        assert_eq!(each(), [2, 0, 0], "what passed meanwhile was counted");
        assert_eq!(denied(), 3);
    }
}
