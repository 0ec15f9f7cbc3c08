//! Rules at work: which apply to a request, and what they decide together.

use std::io::Read as _;
use std::path::Path;

use tidegate::region::{Policy, Question};
use tidegate::{Decision, Gate, Outcome as LimitOutcome};
use tidegate_record::Key;
use tidegate_rules::{Class, Dimensions, FILE_BYTES_MAX, Mode, Rule, RuleSet};

use crate::auth::TenantIndex;
use crate::deciding::{Decided, Decider, question};
use crate::journal::{Note, decisive};
use crate::load;
use crate::metrics::{Outcome, Rung, Surface};
use crate::shared::{Shared, Tenant};

/// The most gates of a set, one for each rule and tenant it is for: a bound on their memory, some 200 bytes each.
const GATES_MAX: usize = 1_000_000;

/// A rule set with the gates of every tenant.
#[derive(Debug, Default)]
pub(crate) struct GatedRules {
    set: RuleSet,
    /// By tenant, then by rule; nothing where a rule is not for the tenant.
    gates: Vec<Vec<Option<Gate>>>,
    /// By tenant: the dimensions that its rules look at.
    used: Vec<Vec<String>>,
}

/// One rule's word on a request.
#[derive(Debug)]
pub(crate) struct Ruled<'r> {
    /// The rule.
    pub(crate) rule: &'r Rule,
    /// What its limit says.
    pub(crate) outcome: LimitOutcome<'r>,
}

/// What the rules say of a request, all together.
#[derive(Debug)]
pub(crate) struct Ruling<'r> {
    /// Under the rules that are enforced: all charged, or none.
    pub(crate) decision: Decision<'r>,
    /// Those rules, in the order of the decision's outcomes.
    pub(crate) enforced: Vec<&'r Rule>,
    /// Rules in shadow mode.
    pub(crate) shadows: Vec<Ruled<'r>>,
    /// The set's version.
    pub(crate) version: &'r str,
    /// What the decision rests on: the least that any of its limits does.
    pub(crate) rung: Rung,
}

/// What is asked, for the decision log.
struct Asked<'a, 'd> {
    surface: Surface,
    tenant: TenantIndex,
    request: &'a Dimensions<'d>,
    cost: u64,
}

/// Why rules did not decide.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Undecided {
    /// More rules apply than one request may be under.
    TooManyRules {
        /// How many apply.
        rules: usize,
    },
    /// The server has more to do than it can; the request was not looked at.
    Shed {
        /// The strictest class among the rules. Comfort passes, the others do not.
        class: Class,
    },
}

impl GatedRules {
    /// Makes the gates of a set.
    pub(crate) fn new(set: RuleSet, shared: &Shared) -> Result<Self, String> {
        let count = |tenant: &Tenant| set.rules().iter().filter(|rule| rule.is_for(&tenant.name)).count();
        let gates: usize = shared.tenants.iter().map(count).sum();
        if gates > GATES_MAX {
            return Err(format!(
                "rules: {gates}, counted once for each tenant they are for, is outside 0 to {GATES_MAX}"
            ));
        }
        let unknown = |rule: &&Rule| {
            rule.tenant.as_ref().is_some_and(|name| shared.tenants.iter().all(|t| t.name != *name))
        };
        if let Some(rule) = set.rules().iter().find(unknown) {
            return Err(format!(
                "rules: {:?} is for a tenant that is not configured: {:?}",
                rule.name, rule.tenant
            ));
        }
        let gate = |tenant: &Tenant, rule: &Rule| {
            let name = format!("rule:{}", rule.name);
            rule.is_for(&tenant.name)
                .then(|| shared.decider.gate(&tenant.name, &name, rule.limit, policy(rule)))
                .transpose()
        };
        let of_tenant = |tenant| {
            set.rules()
                .iter()
                .map(|rule| Ok(gate(tenant, rule)?.map(|g| g.with_name(rule.name.as_str()))))
                .collect()
        };
        let gates: Result<_, tidegate::UnknownName> = shared.tenants.iter().map(of_tenant).collect();
        let used =
            |tenant: &Tenant| set.dimensions_used(&tenant.name).into_iter().map(str::to_owned).collect();
        let used = shared.tenants.iter().map(used).collect();
        Ok(Self { gates: gates.map_err(|error| error.to_string())?, used, set })
    }

    /// Reads a rules file.
    pub(crate) fn load(path: &Path, shared: &Shared) -> Result<Self, String> {
        let text = read_text(path, FILE_BYTES_MAX)?;
        let located = |problem: String| {
            problem.lines().map(|line| format!("{}: {line}", path.display())).collect::<Vec<_>>().join("\n")
        };
        let set = RuleSet::parse(&text).map_err(|problems| located(problems.to_string()))?;
        Self::new(set, shared).map_err(located)
    }

    /// The dimensions that the rules for a tenant look at.
    pub(crate) fn dimensions_used(&self, tenant: TenantIndex) -> &[String] {
        self.used.get(tenant).map(Vec::as_slice).unwrap_or_default()
    }

    /// The rules themselves.
    pub(crate) fn set(&self) -> &RuleSet {
        &self.set
    }

    /// Decides a request under all rules that apply to it.
    pub(crate) async fn decide<'r>(
        &'r self,
        shared: &Shared,
        surface: Surface,
        tenant: TenantIndex,
        request: &Dimensions<'_>,
        cost: u64,
    ) -> Result<Ruling<'r>, Undecided> {
        let decider = &shared.decider;
        let name = &shared.tenant(tenant).name;
        let together = self.together(decider, name, request);
        let (enforced, shadows) = self.questions(tenant, request, &together);
        let class = enforced.iter().map(|(rule, _)| rule.class).max().unwrap_or_default();
        if load::sheds(class) {
            shared.metrics.decided(surface, class, shed_outcome(class), Rung::Shed, 1);
            let asked = Asked { surface, tenant, request, cost };
            self.take_down(shared, &asked, shed_outcome(class), Rung::Shed, None);
            return Err(Undecided::Shed { class });
        }
        let (enforced, questions): (Vec<&Rule>, Vec<Question<'r, '_>>) =
            enforced.into_iter().map(|(rule, question)| (rule, question.cost(cost))).unzip();
        let too_many = |_| Undecided::TooManyRules { rules: questions.len() };
        let Decided { decision, rung } = decider.check_all(&questions).await.map_err(too_many)?;
        // What is denied is not charged, in shadow neither.
        let charged = if decision.is_allowed() { cost } else { 0 };
        let shadows = in_shadow(decider, shadows, charged).await;
        let ruling = Ruling { decision, enforced, shadows, version: self.set.version(), rung };
        shared.metrics.decided(surface, class, ruling.outcome(), rung, 1);
        let asked = Asked { surface, tenant, request, cost };
        self.take_down(shared, &asked, ruling.outcome(), rung, Some(&ruling));
        Ok(ruling)
    }

    /// Takes a decision down, if that is due: under the rule that decided it, if any did.
    fn take_down(
        &self,
        shared: &Shared,
        asked: &Asked<'_, '_>,
        outcome: Outcome,
        rung: Rung,
        ruling: Option<&Ruling<'_>>,
    ) {
        let Some(recorder) = shared.recorder_for(outcome) else { return };
        let (rule, said) = ruling.and_then(Ruling::decided_by).unzip();
        let mut key = Key::default();
        for name in rule.iter().flat_map(|rule| &rule.key) {
            key.add(name, asked.request.get(name).unwrap_or_default());
        }
        let note = Note {
            tenant: asked.tenant,
            surface: asked.surface,
            key,
            cost: asked.cost,
            outcome,
            said,
            rung,
            rule_version: rule.map_or(0, |rule| rule.version),
            set_version: self.set.version(),
            replaced_by: "",
        };
        let known_by = self.dimensions_used(asked.tenant).iter();
        let known_by = known_by.filter_map(|name| Some((name.as_str(), asked.request.get(name)?)));
        shared.take_down(recorder, &note, known_by);
    }

    /// Where the meters of a request are kept together: by what the rules are placed by, or all those of a tenant.
    fn together(&self, decider: &Decider, tenant: &str, request: &Dimensions<'_>) -> Vec<u8> {
        let placed_by = self.set.placement().and_then(|dimension| request.get(dimension));
        decider.placement(&[tenant.as_bytes(), placed_by.unwrap_or_default().as_bytes()])
    }

    /// The rules that apply, those that are enforced and those in shadow, with the questions to ask.
    fn questions<'r, 'k>(
        &'r self,
        tenant: TenantIndex,
        request: &Dimensions<'_>,
        together: &'k [u8],
    ) -> (Questions<'r, 'k>, Questions<'r, 'k>) {
        let gates = self.gates.get(tenant).map(Vec::as_slice).unwrap_or_default();
        let applying = self.set.rules().iter().zip(gates).filter_map(|(rule, gate)| {
            let gate = gate.as_ref()?;
            let parts = rule.key_of(request)?;
            // A rule without a key counts all its requests together.
            let parts = if parts.is_empty() { &[&b""[..]][..] } else { &parts };
            // A limit that crosses placements is kept in one of its own.
            let question = question(gate, parts);
            Some((rule, if self.set.crosses(rule) { question } else { question.placed_by(together) }))
        });
        applying.partition(|(rule, _)| rule.mode == Mode::Enforce)
    }
}

type Questions<'r, 'k> = Vec<(&'r Rule, Question<'r, 'k>)>;

/// What rules in shadow mode say. Each is asked for itself: none of them holds up another.
async fn in_shadow<'r>(decider: &Decider, shadows: Questions<'r, '_>, cost: u64) -> Vec<Ruled<'r>> {
    let mut ruled = Vec::with_capacity(shadows.len());
    for (rule, question) in shadows {
        let said = decider.check_all(&[question.cost(cost)]).await;
        // One limit is never too many.
        let outcome = said.ok().and_then(|said| said.decision.outcomes().first().copied());
        ruled.extend(outcome.map(|outcome| Ruled { rule, outcome }));
    }
    ruled
}

/// How a region treats a rule.
fn policy(rule: &Rule) -> Policy {
    let Rule { class, paid, tolerance_ppm, version, .. } = rule;
    let tolerance_ppm = tolerance_ppm.unwrap_or(class.tolerance_ppm());
    // A file does not count to four billion.
    let version = u32::try_from(*version).unwrap_or(u32::MAX);
    Policy { class: *class, paid: *paid, tolerance_ppm, version }
}

impl<'r> Ruling<'r> {
    /// The rule that decided, and what its limit said: the one that denied, or would have; of those that let the request
    /// pass, the one with the least left.
    fn decided_by(&self) -> Option<(&'r Rule, LimitOutcome<'r>)> {
        if self.outcome() == Outcome::ShadowDenied {
            let at = decisive(self.shadows.iter().map(|shadow| &shadow.outcome))?;
            return self.shadows.get(at).map(|shadow| (shadow.rule, shadow.outcome));
        }
        let at = decisive(self.decision.outcomes())?;
        self.enforced.get(at).copied().zip(self.decision.outcomes().get(at).copied())
    }

    /// What is counted.
    pub(crate) fn outcome(&self) -> Outcome {
        let would_deny = self.shadows.iter().any(|shadow| !shadow.outcome.is_allowed());
        match self.decision.is_allowed() {
            false => Outcome::Denied,
            true if would_deny => Outcome::ShadowDenied,
            true => Outcome::Allowed,
        }
    }
}

/// What becomes of a check that nobody has the time to decide.
pub(crate) fn shed_outcome(class: Class) -> Outcome {
    if class == Class::Comfort { Outcome::Allowed } else { Outcome::Denied }
}

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: usize) -> Result<String, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut text = String::new();
    // One byte too many is enough to know that there are too many, however many there are: a pipe does not say.
    let file = std::fs::File::open(path).map_err(problem)?;
    file.take(most as u64 + 1).read_to_string(&mut text).map_err(problem)?;
    if text.len() > most {
        return Err(format!("{}: more than {most} bytes", path.display()));
    }
    Ok(text)
}
