//! Rule rows as the rule store keeps them, with their versions.

use std::sync::Arc;

/// Kind of a rule row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowKind {
    /// Fields that rules may share.
    Template,
    /// A rule.
    Rule,
    /// Another limit for some keys of a rule.
    Override,
}

/// One row: a name that is unique within its kind, and a JSON object with the fields of a rules
/// file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleRow {
    /// Kind of the row.
    pub kind: RowKind,
    /// Unique within its kind.
    pub name: String,
    /// A JSON object.
    pub body: String,
    /// Raised by each change of the row.
    pub version: u32,
}

/// An emergency. It takes precedence over all rules for a limited time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmergencyRow {
    /// Unique.
    pub id: String,
    /// A JSON object.
    pub body: String,
    /// When it ends, in milliseconds since the Unix epoch.
    pub expires_ms: u64,
}

/// All rule rows and emergencies of a store, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleRows {
    /// Raised by every change of rows.
    pub revision: u64,
    /// Raised by every change of emergencies.
    pub emergency_revision: u64,
    /// Templates, rules and overrides, in the order of kind and name. Books that only differ in
    /// their emergencies share them: there may be a million.
    pub rows: Arc<[RuleRow]>,
    /// Emergencies, which take precedence over the rows.
    pub emergencies: Vec<EmergencyRow>,
}

impl RuleRows {
    /// Returns the same rows with other emergencies. The rows are shared, not copied.
    #[must_use]
    pub fn under(&self, emergency_revision: u64, emergencies: Vec<EmergencyRow>) -> Self {
        Self { revision: self.revision, emergency_revision, rows: Arc::clone(&self.rows), emergencies }
    }

    /// Returns the rows of one kind, or of all, that follow a given row. The rows are sorted, so
    /// those before are not scanned.
    pub fn rows_behind(&self, only: Option<RowKind>, after: Option<(RowKind, &str)>) -> &[RuleRow] {
        let begin = self.rows.partition_point(|row| {
            only.is_some_and(|only| row.kind < only)
                || after.is_some_and(|after| (row.kind, row.name.as_str()) <= after)
        });
        let end = self.rows.partition_point(|row| only.is_none_or(|only| row.kind <= only));
        self.rows.get(begin..end).unwrap_or_default()
    }

    /// Returns the row with this kind and name.
    pub fn row(&self, kind: RowKind, name: &str) -> Option<&RuleRow> {
        let found = self.rows.binary_search_by(|row| (row.kind, row.name.as_str()).cmp(&(kind, name)));
        found.ok().and_then(|at| self.rows.get(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_listed_after_a_given_row() {
        let row = |(kind, name): (RowKind, &str)| RuleRow {
            kind,
            name: name.to_owned(),
            body: String::new(),
            version: 1,
        };
        let all =
            [(RowKind::Template, "b"), (RowKind::Rule, "a"), (RowKind::Rule, "c"), (RowKind::Override, "b")];
        let rule_rows = RuleRows { rows: all.map(row).into(), ..RuleRows::default() };
        let behind = |only, after| {
            let rows = rule_rows.rows_behind(only, after).iter();
            rows.map(|row| (row.kind, row.name.as_str())).collect::<Vec<_>>()
        };
        assert_eq!(behind(None, None), all);
        assert_eq!(behind(None, Some((RowKind::Rule, "a"))), all[2..]);
        assert_eq!(behind(None, Some((RowKind::Rule, "b"))), all[2..], "one that is gone");
        assert_eq!(behind(Some(RowKind::Rule), None), all[1..3]);
        assert_eq!(behind(Some(RowKind::Rule), Some((RowKind::Template, "z"))), all[1..3]);
        assert_eq!(behind(Some(RowKind::Rule), Some((RowKind::Rule, "a"))), all[2..3]);
        assert_eq!(behind(Some(RowKind::Rule), Some((RowKind::Override, "a"))), []);
        assert_eq!(behind(None, Some((RowKind::Override, "b"))), []);
    }

    #[test]
    fn other_emergencies_copy_no_rows() {
        let row = RuleRow { kind: RowKind::Rule, name: "a".to_owned(), body: "{}".to_owned(), version: 1 };
        let rule_rows = RuleRows { revision: 3, rows: [row].into(), ..RuleRows::default() };
        let emergency = EmergencyRow { id: "e".to_owned(), body: "{}".to_owned(), expires_ms: 1 };
        let under = rule_rows.under(2, vec![emergency]);
        assert!(Arc::ptr_eq(&rule_rows.rows, &under.rows));
        assert_eq!((under.revision, under.emergency_revision, under.emergencies.len()), (3, 2, 1));
    }
}
