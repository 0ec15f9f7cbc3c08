//! What is wrong with a set, told so that it can be mended in one go.

use std::fmt;

/// The most problems that are told of one set; of more it is told how many there are.
pub const PROBLEMS_MAX: usize = 100;

/// Everything that is wrong with a set, or as much as can be read: the last line says how much more there is.
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
    /// Notes a problem; it is put into words only if it is told.
    pub(crate) fn add(&mut self, problem: impl fmt::Display) {
        if self.listed.len() < PROBLEMS_MAX {
            self.listed.push(problem.to_string());
        } else {
            self.more += 1;
        }
    }

    /// Nothing, or all that was found.
    pub(crate) fn into_result(self) -> Result<(), Problems> {
        if self.listed.is_empty() { Ok(()) } else { Err(Problems(self.into_lines())) }
    }

    /// What is told of all that was found.
    pub(crate) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.listed.push(format!("and {} more", self.more));
        }
        self.listed
    }
}
