//! Requests in sequence through several nodes: the full limit passes, and the first denial comes at
//! its end.

use tidegate_sim::{SequenceCase, SequenceResult, sequence_cases};

/// The least mean position of the first denial, relative to the limit.
const FIRST_DENIAL_MIN: f64 = 0.98;

#[test]
fn a_limit_passes_whole_before_the_first_denial_on_average() {
    for (nodes, least) in [(1, 1.0), (2, FIRST_DENIAL_MIN), (4, FIRST_DENIAL_MIN), (12, FIRST_DENIAL_MIN)] {
        let results: Vec<SequenceResult> = sequence_cases(nodes).iter().map(SequenceCase::measure).collect();
        let count: f64 = results.iter().map(|_| 1.0).sum();
        let mean = results.iter().map(|result| result.first_denial).sum::<f64>() / count;
        assert!(mean >= least, "{nodes} nodes: the first denial comes at {mean} of the limit");
        assert!(results.iter().all(|result| result.passed >= 1.0), "{nodes} nodes: {results:?}");
        assert!(results.iter().any(|result| result.first_denial < 1.0) || nodes == 1, "nothing was denied");
        assert!(results.iter().all(|result| result.violations == 0), "{nodes} nodes: {results:?}");
    }
}
