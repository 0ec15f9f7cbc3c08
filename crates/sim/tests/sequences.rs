//! Requests one after the other through several nodes: all of a limit passes, and the first denial comes at its end.

use tidegate_sim::{SequenceResult, sequence_cases};

/// The least mean position of the first denial, relative to the limit.
const FIRST_DENIAL_MIN: f64 = 0.98;

#[test]
fn a_limit_passes_whole_before_the_first_denial_on_average() {
    for nodes in [1, 2, 4, 12] {
        let results: Vec<SequenceResult> = sequence_cases(nodes).iter().map(|case| case.measure()).collect();
        let mean = results.iter().map(|result| result.first_denial).sum::<f64>() / results.len() as f64;
        assert!(mean >= FIRST_DENIAL_MIN, "{nodes} nodes: the first denial comes at {mean} of the limit");
        assert!(results.iter().all(|result| result.violations == 0), "{nodes} nodes: {results:?}");
        let least = results.iter().map(|result| result.passed).fold(1.0, f64::min);
        assert!(nodes > 1 || (mean == 1.0 && least == 1.0), "one node is exact: {results:?}");
    }
}
