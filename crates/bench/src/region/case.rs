//! The load of a region: limits, costs, classes and offered rates.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use tidegate::{Algorithm, Limit};

/// Most keys of a case. It has fewer if the machine cannot send that many requests at its rate.
pub(super) const KEYS_MAX: u32 = 1_000;

const AMOUNTS: [u32; 3] = [10, 1_000, 100_000];
const PERIOD: Duration = Duration::from_mins(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Class {
    Security,
    Comfort,
}

impl Class {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Security => "security",
            Self::Comfort => "comfort",
        }
    }
}

/// The cost of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Costs {
    /// Always 1.
    One,
    /// 1 to 20, each as likely.
    Mixed,
}

impl Costs {
    pub(super) const fn most(self) -> u64 {
        match self {
            Self::One => 1,
            Self::Mixed => 20,
        }
    }

    pub(super) fn mean(self) -> f64 {
        f64::midpoint(1.0, self.most() as f64)
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::One => "1",
            Self::Mixed => "1-20",
        }
    }
}

/// Offered cost, relative to the long-run rate of the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offer {
    Half,
    At,
    Fourfold,
}

impl Offer {
    pub(super) const fn times(self) -> f64 {
        match self {
            Self::Half => 0.5,
            Self::At => 1.0,
            Self::Fourfold => 4.0,
        }
    }
}

/// A limit of the region, which is a rule of its servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) class: Class,
    pub(super) algorithm: Algorithm,
    pub(super) amount: u32,
}

impl Rule {
    pub(super) const fn algorithm_name(self) -> &'static str {
        match self.algorithm {
            Algorithm::Gcra => "gcra",
            Algorithm::SlidingWindow => "sliding_window",
        }
    }

    /// Returns the name of the rule, by which requests select it.
    pub(super) fn name(self) -> String {
        format!("{}_{}_{}", self.class.name(), self.algorithm_name(), self.amount)
    }

    pub(super) fn limit(self) -> Result<Limit> {
        let amount = u64::from(self.amount);
        Ok(match self.algorithm {
            Algorithm::Gcra => Limit::gcra(amount, PERIOD)?,
            Algorithm::SlidingWindow => Limit::sliding_window(amount, PERIOD)?,
        })
    }

    /// Returns the long-run rate of a key, in units per second.
    pub(super) fn per_second(self) -> f64 {
        f64::from(self.amount) / PERIOD.as_secs_f64()
    }

    fn all() -> impl Iterator<Item = Self> {
        let classes = [Class::Security, Class::Comfort];
        let algorithms = [Algorithm::Gcra, Algorithm::SlidingWindow];
        classes.into_iter().flat_map(move |class| {
            let of = move |algorithm| AMOUNTS.map(|amount| Self { class, algorithm, amount });
            algorithms.into_iter().flat_map(of)
        })
    }
}

/// Returns the rules file of all cases. A request names its rule, and every key has its own
/// placement, as users have.
pub(super) fn rules_file() -> String {
    let fields = |rule: Rule| {
        let (class, algorithm, amount) = (rule.class.name(), rule.algorithm_name(), rule.amount);
        format!("class = '{class}'\nalgorithm = '{algorithm}'\nlimit = {amount}\nperiod = '1m'")
    };
    rules_toml(Rule::all().map(|rule| (rule.name(), fields(rule))))
}

/// A rules file of these names and fields. The dimension `rule` of a request selects the rule, and
/// each value of `key` has a meter of its own.
pub(super) fn rules_toml(rules: impl Iterator<Item = (String, String)>) -> String {
    let mut text = "placement = 'key'\n\n".to_owned();
    for (name, fields) in rules {
        // Writing to text does not fail.
        let _ = write!(
            text,
            "[[rules]]\nname = '{name}'\nwhen = {{ rule = '{name}' }}\nkey = ['key']\n{fields}\n\n"
        );
    }
    text
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) rule: Rule,
    pub(super) costs: Costs,
    pub(super) offer: Offer,
}

impl Case {
    pub(super) fn all() -> Vec<Self> {
        let offers = [Offer::Half, Offer::At, Offer::Fourfold];
        let of = |rule| {
            [Costs::One, Costs::Mixed]
                .into_iter()
                .flat_map(move |costs| offers.map(|offer| Self { rule, costs, offer }))
        };
        Rule::all().flat_map(of).collect()
    }

    /// Returns a few cases that show both classes, both algorithms and a limit that is reached.
    pub(super) fn quick() -> Vec<Self> {
        let shown = |case: &Self| case.rule.amount == 1_000 && case.offer == Offer::Fourfold;
        Self::all().into_iter().filter(shown).collect()
    }

    /// Returns the number of keys that keeps all requests together within `per_second_max`.
    pub(super) fn keys(self, per_second_max: f64) -> u32 {
        let keys = (per_second_max / self.per_second_of_key()).floor() as u32;
        keys.clamp(1, KEYS_MAX)
    }

    /// How many requests are made, of all keys together.
    pub(super) fn per_second(self, per_second_max: f64) -> f64 {
        (self.per_second_of_key() * f64::from(self.keys(per_second_max))).min(per_second_max)
    }

    fn per_second_of_key(self) -> f64 {
        self.rule.per_second() * self.offer.times() / self.costs.mean()
    }

    /// Returns the units that each key uses before the first request, so that a run of `time`
    /// reaches its limit. A bucket uses all of them. A window keeps the units that pass in that
    /// time, because used units stay until the cell ends.
    pub(super) fn used_before(self, time: Duration) -> u64 {
        let amount = u64::from(self.rule.amount);
        match (self.offer, self.rule.algorithm) {
            (Offer::Half, _) => 0,
            (_, Algorithm::Gcra) => amount,
            (_, Algorithm::SlidingWindow) => {
                amount.saturating_sub((self.rule.per_second() * time.as_secs_f64()).round() as u64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_a_case() {
        let cases = Case::all();
        assert_eq!(cases.len(), 2 * 2 * 3 * 2 * 3);
        assert!(Case::quick().iter().all(|case| cases.contains(case)));
        assert_eq!(Case::quick().len(), 8);
        assert_eq!(rules_file().matches("[[rules]]").count(), 12);
    }

    #[test]
    fn keys_are_as_many_as_the_machine_can_ask() {
        let rule = |amount| Rule { class: Class::Comfort, algorithm: Algorithm::Gcra, amount };
        let case = |amount, offer| Case { rule: rule(amount), costs: Costs::One, offer };
        assert_eq!(case(10, Offer::Fourfold).keys(6_000.0), 1_000);
        assert!((case(10, Offer::Fourfold).per_second(6_000.0) - 4_000.0 / 6.0).abs() < 1e-6);
        assert_eq!(case(1_000, Offer::At).keys(6_000.0), 360);
        // One key alone exceeds the rate of the machine, so less is offered.
        assert_eq!(case(100_000, Offer::Fourfold).keys(6_000.0), 1);
        assert!((case(100_000, Offer::Fourfold).per_second(6_000.0) - 6_000.0).abs() < 1e-6);
    }

    #[test]
    fn window_keeps_units_for_the_measured_time() {
        let rule = Rule { class: Class::Security, algorithm: Algorithm::SlidingWindow, amount: 1_000 };
        let case = |offer| Case { rule, costs: Costs::One, offer };
        let time = Duration::from_secs(15);
        assert_eq!((case(Offer::Half).used_before(time), case(Offer::At).used_before(time)), (0, 750));
        let bucket = Case { rule: Rule { algorithm: Algorithm::Gcra, ..rule }, ..case(Offer::At) };
        assert_eq!(bucket.used_before(time), 1_000);
    }
}
