//! Runs named steps in order, stops at the first that fails, and sums up.

use std::time::{Duration, Instant};

use crate::Failure;
use crate::metadata::Project;
use crate::tally::TestTally;

/// One named part of the gate.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Project, &mut TestTally) -> Result<(), Failure>,
}

/// Runs the steps in order. The last line on standard output is always the tally.
pub(crate) fn run(steps: &[Step], project: &Project) -> Result<(), Failure> {
    let mut total = TestTally::default();
    let mut ended = Vec::new();
    let mut result = Ok(());
    for step in steps {
        println!("==> {}", step.name);
        let ((tally, step_result), taken) = timed(|| run_step(step, project));
        println!("<== {}: {} in {}", step.name, verdict(&step_result), seconds(taken));
        total += tally;
        ended.push((step.name, taken));
        if let Err(failure) = step_result {
            eprintln!("\n{}: {failure}", step.name);
            result = Err(format!("step `{}` failed", step.name));
            break;
        }
    }
    println!("\n{}\n{total}", summary(steps, &ended, &result));
    result
}

fn run_step(step: &Step, project: &Project) -> (TestTally, Result<(), Failure>) {
    let mut tally = TestTally::default();
    let result = (step.run)(project, &mut tally);
    if result.is_err() && tally.failed == 0 {
        // The closing line must report a failure even if, for example, a test did not compile.
        tally.failed = 1;
    }
    (tally, result)
}

fn verdict(result: &Result<(), Failure>) -> &'static str {
    if result.is_ok() { "ok" } else { "FAILED" }
}

fn summary(steps: &[Step], ended: &[(&str, Duration)], result: &Result<(), Failure>) -> String {
    let mut parts: Vec<String> =
        ended.iter().map(|(name, taken)| format!("{name} ok ({})", seconds(*taken))).collect();
    if let (Err(_), Some(last), Some((name, taken))) = (result, parts.last_mut(), ended.last()) {
        *last = format!("{name} FAILED ({})", seconds(*taken));
    }
    parts.extend(steps.iter().skip(ended.len()).map(|step| format!("{} not run", step.name)));
    let total = ended.iter().map(|(_, taken)| *taken).sum();
    format!("steps: {}; total {}", parts.join(", "), seconds(total))
}

fn seconds(duration: Duration) -> String {
    format!("{:.1}s", duration.as_secs_f64())
}

#[expect(clippy::disallowed_methods, reason = "shows the duration of a step; no result depends on it")]
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSES: Step = Step {
        name: "passes",
        run: |_, tally| {
            tally.passed += 2;
            Ok(())
        },
    };
    const BREAKS: Step = Step { name: "breaks", run: |_, _| Err("it broke".into()) };
    const COUNTS_FAILURES: Step = Step {
        name: "counts",
        run: |_, tally| {
            tally.failed += 3;
            Err("three tests failed".into())
        },
    };
    const MUST_NOT_RUN: Step =
        Step { name: "unreached", run: |_, _| panic!("a step ran after a failed one") };

    #[test]
    fn stops_at_the_first_failure_and_names_it() {
        let result = run(&[PASSES, BREAKS, MUST_NOT_RUN], &Project::default());
        assert_eq!(result, Err("step `breaks` failed".into()));
        assert_eq!(run(&[PASSES, PASSES], &Project::default()), Ok(()));
    }

    #[test]
    fn a_failed_step_always_counts_as_a_failure() {
        assert_eq!(run_step(&BREAKS, &Project::default()).0.failed, 1);
        assert_eq!(run_step(&COUNTS_FAILURES, &Project::default()).0.failed, 3);
        assert_eq!(run_step(&PASSES, &Project::default()).0, TestTally { passed: 2, failed: 0, skipped: 0 });
    }

    #[test]
    fn summary_lists_passed_failed_and_skipped_steps() {
        let ended = [("passes", Duration::from_millis(1250)), ("breaks", Duration::from_secs(2))];
        assert_eq!(
            summary(&[PASSES, BREAKS, MUST_NOT_RUN], &ended, &Err(String::new())),
            "steps: passes ok (1.2s), breaks FAILED (2.0s), unreached not run; total 3.2s"
        );
        assert_eq!(
            summary(&[PASSES, BREAKS], &ended, &Ok(())),
            "steps: passes ok (1.2s), breaks ok (2.0s); total 3.2s"
        );
    }
}
