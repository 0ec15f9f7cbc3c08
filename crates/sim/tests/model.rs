//! The shipped engine against the model it was designed by.

use tidegate_sim::cases;

/// The engine may admit this much less than the model, as a share of what one bucket admits.
const LESS: f64 = 0.02;

/// The engine may let this many times as many wait, or speak this many times as often, and a little more where that is rare.
const TIMES: f64 = 2.0;

const RARE: f64 = 0.01;

#[test]
fn the_engine_is_about_as_good_as_the_model() {
    let mut worse = Vec::new();
    for case in cases() {
        let measured = case.measure();
        println!(
            "{:32} admitted {:.3} ({:.3})  waited {:.4} ({:.4})  updates {:.3} ({:.3})",
            case.name,
            measured.admitted,
            case.admitted,
            measured.waited,
            case.waited,
            measured.updates,
            case.updates
        );
        let is_worse = measured.admitted < case.admitted - LESS
            || measured.waited > case.waited * TIMES + RARE
            || measured.updates > case.updates * TIMES + RARE
            || measured.violations > 0;
        if is_worse {
            worse.push(case.name);
        }
    }
    assert!(worse.is_empty(), "worse than the model: {worse:?}");
}
