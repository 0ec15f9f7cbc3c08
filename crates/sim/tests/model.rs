//! The shipped engine against the model it was designed by, and against what it made of the model's cases before.

use tidegate_sim::{Case, ModelMeasurement, cases};

/// The engine may admit this much less than the model, as a share of what one bucket admits.
const LESS: f64 = 0.01;

/// It may let this many times as many wait as the model, and a little more where that is rare; and speak this many times as often.
/// Since room is divided by demand, a node near the limit asks the origin where it denied falsely before: more requests wait.
const TIMES_WAITED: f64 = 2.0;
const RARE: f64 = 0.002;
const TIMES_SPOKEN: f64 = 1.5;

/// How much worse than before it may become, as a share of what was, before somebody has to look at it; beside what a figure is
/// rounded by.
const WORSE: f64 = 0.05;
const ROUNDED: f64 = 0.0005;

/// What the engine made of each case when this was written: admitted, of what one bucket admits; the share of requests that waited;
/// updates for each request. The same seed gives the same history, so that other figures mean another engine: better ones belong
/// here, worse ones need a reason.
const BEFORE: [(f64, f64, f64); 14] = [
    (1.000, 0.0100, 0.270),
    (0.996, 0.0088, 0.088),
    (0.997, 0.0013, 0.011),
    (1.000, 0.0120, 0.264),
    (0.998, 0.2004, 0.237),
    (1.000, 0.0046, 0.170),
    (0.999, 0.2358, 0.342),
    (0.997, 0.0065, 0.006),
    (0.981, 0.0176, 0.013),
    (1.000, 0.6363, 0.660),
    (0.982, 0.7135, 0.945),
    (1.000, 0.0015, 0.038),
    (0.994, 0.3746, 0.486),
    (1.000, 0.9903, 1.240),
];

fn is_worse_than_the_model(case: &Case, measured: &ModelMeasurement) -> bool {
    measured.admitted < case.admitted - LESS
        || measured.waited > case.waited * TIMES_WAITED + RARE
        || measured.updates > case.updates * TIMES_SPOKEN
}

fn is_worse_than_before((admitted, waited, updates): (f64, f64, f64), measured: &ModelMeasurement) -> bool {
    let more = |now: f64, before: f64| now > before * (1.0 + WORSE) + ROUNDED;
    // Of what is not admitted, that is.
    more(1.0 - measured.admitted, 1.0 - admitted)
        || more(measured.waited, waited)
        || more(measured.updates, updates)
}

#[test]
fn the_engine_is_about_as_good_as_the_model_and_no_worse_than_it_was() {
    assert_eq!(cases().count(), BEFORE.len());
    let mut worse = Vec::new();
    for (case, before) in cases().zip(BEFORE) {
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
        assert_eq!(measured.violations, 0, "{}", case.name);
        if is_worse_than_the_model(&case, &measured) || is_worse_than_before(before, &measured) {
            worse.push(case.name);
        }
    }
    assert!(worse.is_empty(), "worse than the model, or than before: {worse:?}");
}
