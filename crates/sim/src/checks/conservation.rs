//! Every admission is charged once.

use tidegate_core::origin::Lapse;

use super::{Checker, Ending};
use crate::scenario::Scenario;

struct Conservation;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    if scenario.regions.is_some() { None } else { Some(Box::new(Conservation)) }
}

impl Checker for Conservation {
    fn promise(&self) -> &'static str {
        "conservation"
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        (0..end.scenario.meters()).find_map(|key| judge(end, key))
    }
}

/// A written-off grant is charged if it counts as used. If it is forgiven, it is charged only when
/// a later report makes it an admission. A node that dies may leave usage unreported, and
/// admissions of the origin not received. After lost writes, as many units may be missing or be
/// reported again. If its clock is set forward, the origin expires sessions, takes this for lost
/// writes, and may receive reports twice.
fn judge(end: &Ending<'_>, key: usize) -> Option<String> {
    let (faults, history, region) = (&end.scenario.faults, end.history, &end.regions[0]);
    let seen = &history.meters[key];
    let untold = history.left_unsaid(key) + history.refunded_again(key);
    let is_well = end.tally.faults == 0 && faults.loss_ppm + faults.slow_ppm == 0;
    let has_lost = faults.losses + faults.wipes > 0 || history.has_forgotten_sessions();
    let (wasted, open) = if has_lost {
        // A late report may be of a grant that the store forgot, and the store may have forgotten
        // refunds as well.
        (seen.written_off, history.unheard(key))
    } else {
        let alive = region.nodes.iter().map(|node| node.id).collect();
        (seen.wasted(), history.stranded(key, &alive))
    };
    let (lost, again) = (seen.lost, history.again(key));
    let (fewer, more) = match end.scenario.lapse() {
        Lapse::Counted if is_well => (0, 0),
        Lapse::Counted => (untold + lost, wasted + open + lost + again),
        Lapse::Forgiven => (wasted + untold + lost, open + lost + again),
    };
    let [charged, back, held] = region.store.contents.counts(key);
    let charged = charged.saturating_sub(back);
    let admitted = end.judged[key].filled() + seen.owed;
    // The grant of a node that died still counts as used.
    let is_lost = admitted > charged + held + fewer || charged > admitted + more;
    is_lost.then(|| {
        format!(
            "key {key}: {admitted} admitted and {charged} charged; allowed difference: {fewer} fewer to \
             {more} more"
        )
    })
}
