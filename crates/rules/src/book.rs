//! What a store of rules holds: rows as they were written, with the versions that they were given.

/// What a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Fields that rules may share.
    Template,
    /// A rule.
    Rule,
    /// Another limit for some keys of a rule.
    Override,
}

/// One row: a name that is unique within its kind, and a JSON object with the fields of a rules file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What it is.
    pub kind: Kind,
    /// Unique within its kind.
    pub name: String,
    /// A JSON object.
    pub body: String,
    /// Raised by each change of the row.
    pub version: u32,
}

/// What goes before all rules, for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmergencyRow {
    /// Unique.
    pub id: String,
    /// A JSON object.
    pub body: String,
    /// When it ends, in milliseconds since the Unix epoch.
    pub expires_ms: u64,
}

/// Everything that a store holds, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Book {
    /// Raised by every change of rows.
    pub revision: u64,
    /// Raised by every change of emergencies.
    pub emergency_revision: u64,
    /// Templates, rules and overrides.
    pub rows: Vec<Row>,
    /// What goes before them.
    pub emergencies: Vec<EmergencyRow>,
}
