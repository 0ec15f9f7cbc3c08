//! The problems of a rule set, listed together so that an author can fix them in one pass.

use std::fmt;

/// Maximum problems listed for one set. The others are only counted.
pub const PROBLEMS_MAX: usize = 100;

/// All problems of a set. If there are too many to read, the last line counts the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for Problems {}

impl From<String> for Problems {
    fn from(problem: String) -> Self {
        Self(vec![problem])
    }
}

/// Problems as they are found.
#[derive(Debug, Default)]
pub(crate) struct ProblemList {
    listed: Vec<String>,
    more: usize,
}

impl ProblemList {
    /// Adds a problem. It is formatted only if it is listed.
    pub(crate) fn add(&mut self, problem: impl fmt::Display) {
        if self.listed.len() < PROBLEMS_MAX {
            self.listed.push(problem.to_string());
        } else {
            self.more += 1;
        }
    }

    /// Returns an error with all problems, if there are any.
    pub(crate) fn into_result(self) -> Result<(), Problems> {
        if self.listed.is_empty() { Ok(()) } else { Err(Problems(self.into_lines())) }
    }

    /// Returns the listed problems, and a line that counts the others.
    pub(crate) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.listed.push(format!("and {} more", self.more));
        }
        self.listed
    }
}
