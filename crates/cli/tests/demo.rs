//! `tidegate demo` as a script meets it: three regions in real time, a line each second.

#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests may panic as tests may")]

use std::process::{Command, Output};

fn demo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("demo").args(arguments).output().expect("it starts")
}

/// The output of a run: a line for each second, and the summary.
struct DemoOutput {
    seconds: Vec<String>,
    summary: String,
}

fn demo_output(arguments: &[&str]) -> DemoOutput {
    let output = demo(arguments);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let is_second = |line: &&str| line.contains(" s: admitted ");
    let (seconds, summary): (Vec<&str>, Vec<&str>) = text.lines().partition(is_second);
    DemoOutput { seconds: seconds.into_iter().map(str::to_owned).collect(), summary: summary.join("\n") }
}

/// Returns the number after these words.
fn after(line: &str, words: &str) -> u64 {
    let (_, rest) = line.split_once(words).unwrap_or_else(|| panic!("{words:?} in {line:?}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("a number after {words:?} in {line:?}"))
}

/// Asserts that every line states `held`, and that its numbers confirm it.
fn assert_held(demo_output: &DemoOutput) {
    assert!(!demo_output.seconds.is_empty(), "{}", demo_output.summary);
    for line in &demo_output.seconds {
        let (admitted, bound) = (after(line, " admitted "), after(line, "bound "));
        assert!(admitted <= bound, "{line}");
        assert!(line.contains(&format!("bound {bound}: held")), "{line}");
    }
    let (admitted, most) =
        (after(&demo_output.summary, "admitted "), after(&demo_output.summary, "three regions: at most "));
    assert!(admitted <= most && demo_output.summary.contains(": held"), "{}", demo_output.summary);
    // The attack costs other users nothing. The tolerance is for short stalls of the test machine.
    let (asked, denied) = (after(&demo_output.summary, "users: "), after(&demo_output.summary, "denied "));
    assert!(asked > 0 && denied * 20 <= asked, "{}", demo_output.summary);
}

#[test]
fn regions_under_attack_admit_no_more_than_they_promise() {
    let demo_output = demo_output(&["--plain", "--seconds", "5"]);
    assert_held(&demo_output);
    let last = demo_output.seconds.last().expect("a line");
    assert_eq!(last.matches(" connected ").count(), 3, "{last}");
    // The attacker requests far more than the limit, and gets at least the limit.
    let (asked, admitted) =
        (after(&demo_output.summary, "attacker: "), after(&demo_output.summary, "admitted "));
    assert!(admitted >= 100 && asked > 2 * after(last, "one bucket "), "{}", demo_output.summary);
    assert!(demo_output.summary.contains("(network partitions: 0)"), "{}", demo_output.summary);
}

#[test]
fn a_cut_makes_regions_go_on_with_their_parts_until_it_is_healed() {
    let demo_output =
        demo_output(&["--plain", "--seconds", "15", "--cut", "1", "--heal", "7", "--link", "2"]);
    assert_held(&demo_output);
    let cut = |line: &&String| line.contains("link 2 us-ap cut");
    let apart = |line: &&String| line.matches("isolated").count() == 3;
    assert!(demo_output.seconds.iter().filter(cut).any(|line| apart(&line)), "{:#?}", demo_output.seconds);
    let last = demo_output.seconds.last().expect("a line");
    assert!(!cut(&last) && last.matches(" connected ").count() == 3, "{:#?}", demo_output.seconds);
    assert!(demo_output.summary.contains("(network partitions: 1)"), "{}", demo_output.summary);
}

#[test]
fn invalid_arguments_are_a_usage_error() {
    for arguments in [
        &["--seconds", "0"][..],
        &["--delay", "251"],
        &["--heal", "3"],
        &["--cut", "3", "--heal", "3"],
        &["--cut", "1", "--link", "4"],
    ] {
        assert_eq!(demo(arguments).status.code(), Some(64), "{arguments:?}");
    }
}
