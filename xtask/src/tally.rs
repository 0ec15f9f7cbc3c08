//! Adds up the results that test programs print.

use std::fmt;

/// How many tests and checks ended in which way.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TestTally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl TestTally {
    /// Counts a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`, and ignores other
    /// lines.
    pub(crate) fn count_line(&mut self, line: &str) {
        let Some((_verdict, counts)) =
            line.trim_end().strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split("; ") {
            match count.split_once(' ') {
                Some((number, "passed")) => self.passed += number.parse::<u64>().unwrap_or(0),
                Some((number, "failed")) => self.failed += number.parse::<u64>().unwrap_or(0),
                Some((number, "ignored")) => self.skipped += number.parse::<u64>().unwrap_or(0),
                _ => {}
            }
        }
    }
}

impl std::ops::AddAssign for TestTally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for TestTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally_of(lines: &[&str]) -> TestTally {
        let mut tally = TestTally::default();
        for line in lines {
            tally.count_line(line);
        }
        tally
    }

    #[test]
    fn adds_up_results_over_programs() {
        let tally = tally_of(&[
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.01s\n",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in \
             1.50s\r\n",
        ]);
        assert_eq!(tally, TestTally { passed: 13, failed: 2, skipped: 1 });
        assert_eq!(tally.to_string(), "13 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn counts_nothing_else() {
        let tally = tally_of(&[
            "",
            "test result: ",
            "test result: ok",
            "test tally::tests::x ... ok",
            "the test result: ok. 3 passed; 0 failed",
            "warning: 4 passed; 1 failed",
        ]);
        assert_eq!(tally, TestTally::default());
    }
}
