//! `tidegate-bench regions --quick` on real servers: the conditions that do not depend on the
//! machine's load hold, and the exit status agrees with the printed bars.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]

mod common;

use common::{is_held, run};

#[test]
fn a_strict_limit_is_never_passed_while_a_link_flaps() {
    let (output, published) = run("regions", &["--quick", "--only", "strict"]);
    let strict = &published["strict"];
    assert!(published["wan"].is_null(), "{published}");
    assert!(strict["flaps"].as_u64() > Some(0) && strict["unreachable"].as_u64() > Some(0), "{strict}");
    assert!(strict["admitted"].as_u64() > Some(0), "{strict}");
    assert_eq!(
        is_held(&published, "strict: largest over-admission of a limit"),
        Some(true),
        "{}",
        published["bars"]
    );
    // Shares and times depend on the machine, so the test does not judge them.
    let all_held = published["bars"].as_array().expect("bars").iter().all(|bar| bar["held"] == true);
    assert_eq!(output.status.code(), Some(i32::from(!all_held)), "{}", published["bars"]);
}
