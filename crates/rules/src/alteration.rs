//! Parts of a store that are not as its audit has them.

use std::fmt;

use serde::Serialize;

/// How many alterations an answer names. More: longer answers about a store that lost its audit.
pub const ALTERATIONS_NAMED_MAX: usize = 100;

/// A part of a store that is not as the audit has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Alteration {
    /// Kind of the part.
    pub kind: StorePart,
    /// Its name, or the number of a change.
    pub name: String,
    /// The revision that wrote it last, of its kind; `None` if no entry of the audit wrote it.
    pub revision: Option<u64>,
    /// How it differs.
    pub way: AlterationWay,
}

/// The kinds of parts that the audit covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StorePart {
    /// A change, with its operations and its history.
    Change,
    /// A template.
    Template,
    /// A rule.
    Rule,
    /// An override.
    Override,
    /// An emergency.
    Emergency,
    /// A credential.
    Credential,
    /// The record of the actor that made a credential. It restricts approvers.
    Maker,
    /// The latest revisions.
    Heads,
}

/// How a part differs from the audit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AlterationWay {
    /// These columns have other values.
    Edited(Vec<&'static str>),
    /// It is missing.
    Removed,
    /// No entry of the audit wrote it.
    Added,
    /// The operations of this change, which wrote it, were edited or removed.
    Unproven(u64),
}

impl fmt::Display for StorePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Change => "change",
            Self::Template => "template",
            Self::Rule => "rule",
            Self::Override => "override",
            Self::Emergency => "emergency",
            Self::Credential => "credential",
            Self::Maker => "maker",
            Self::Heads => "heads",
        })
    }
}

impl fmt::Display for Alteration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind, self.name)?;
        if let Some(revision) = self.revision {
            write!(f, " (revision {revision})")?;
        }
        match &self.way {
            AlterationWay::Edited(columns) => write!(f, " was edited: {}", columns.join(", ")),
            AlterationWay::Removed => f.write_str(" was removed"),
            AlterationWay::Added => f.write_str(" was added"),
            AlterationWay::Unproven(change) => write!(f, " is not proven: change {change} wrote it"),
        }
    }
}

/// The alterations of a store: the first of them, and their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Alterations {
    named: Vec<Alteration>,
    count: usize,
}

impl Alterations {
    /// Adds one, which is named if there is room.
    pub(crate) fn add(&mut self, alteration: Alteration) {
        self.count += 1;
        if self.named.len() < ALTERATIONS_NAMED_MAX {
            self.named.push(alteration);
        }
    }

    /// Sorts them by kind and name.
    pub(crate) fn sort(&mut self) {
        self.named.sort_unstable();
    }

    /// The first of them, in order of kind and name.
    pub fn named(&self) -> &[Alteration] {
        &self.named
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }
}

impl fmt::Display for Alterations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "audit: the store has {} parts that its audit does not prove: ", self.count)?;
        for (at, alteration) in self.named.iter().enumerate() {
            write!(f, "{}{alteration}", if at == 0 { "" } else { "; " })?;
        }
        match self.count - self.named.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}
