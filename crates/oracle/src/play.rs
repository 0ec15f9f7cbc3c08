//! One whole history: drawn from its seed, played on both sides and, if they disagree, shortened as
//! far as possible.

use tidegate_core::Limit;

use crate::campaign::Plan;
use crate::compare::Pair;
use crate::difference::{Difference, Report, caught};
use crate::draw;
use crate::history::{Clock, Step};
use crate::level::Level;
use crate::rng::Rng;
use crate::script::Script;
use crate::subject::Subject;
use crate::totals::Totals;

/// Plays history number `history` of `plan` for `decisions` decisions. Returns the counts of the
/// comparison.
pub(crate) fn play<L: Level, S: Subject>(
    plan: &Plan,
    history: u64,
    decisions: u64,
) -> Result<Totals, Box<Report>> {
    let seed = plan.seed;
    let mut rng = Rng::part(seed, history);
    let (spec, limit) = draw::limit(&mut rng, L::ALGORITHM).map_err(|(spec, difference)| {
        let clock = Clock { mono_us: 0, wall_us: 0 };
        Box::new(Report { seed, history, spec, clock, played: 0, steps: Vec::new(), difference })
    })?;
    let clock = draw::clock(&mut rng, limit.period_us());
    let mut steps = Vec::new();
    let script = Script::new(rng, &limit, clock);
    let played = caught(|| run::<L, S>(script, (limit, clock), decisions, &mut steps));
    played.map_err(|first| {
        let played = steps.len();
        let difference = shorten::<L, S>((limit, clock), &mut steps).unwrap_or(first);
        Box::new(Report { seed, history, spec, clock, played, steps, difference })
    })
}

fn run<L: Level, S: Subject>(
    mut script: Script,
    (limit, clock): (Limit, Clock),
    decisions: u64,
    steps: &mut Vec<Step>,
) -> Result<Totals, Difference> {
    let mut pair = Pair::<L, S>::new(limit, clock);
    while pair.totals.decisions < decisions {
        let step = script.next();
        steps.push(step);
        if let Some(verdict) = pair.apply(step)? {
            script.note(step.operation, verdict);
        }
    }
    Ok(Totals { histories: 1, ..pair.totals })
}

/// Drops every step that the disagreement does not need, until no step can go. Returns the
/// remaining difference.
fn shorten<L: Level, S: Subject>(key: (Limit, Clock), steps: &mut Vec<Step>) -> Option<Difference> {
    let mut found = replay::<L, S>(key, steps);
    let mut length = usize::MAX;
    while steps.len() < length {
        length = steps.len();
        for index in (0..length).rev() {
            let mut fewer = steps.clone();
            fewer.remove(index);
            if let Some(difference) = replay::<L, S>(key, &fewer) {
                (*steps, found) = (fewer, Some(difference));
            }
        }
    }
    found
}

/// Plays `steps` again, from an empty meter.
fn replay<L: Level, S: Subject>((limit, clock): (Limit, Clock), steps: &[Step]) -> Option<Difference> {
    let all = || {
        let mut pair = Pair::<L, S>::new(limit, clock);
        steps.iter().try_for_each(|&step| pair.apply(step).map(|_| ()))
    };
    caught(all).err()
}
