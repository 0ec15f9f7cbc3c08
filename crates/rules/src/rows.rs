//! Rule rows as the rule store keeps them, with their versions.

use std::collections::HashSet;
use std::sync::Arc;

use memchr::memmem;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Kind of a rule row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowKind {
    /// Fields that rules may share.
    Template,
    /// A rule.
    Rule,
    /// Another limit for some keys of a rule, or for some identifiers of a namespace.
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

impl RuleRow {
    /// Whether the row is an override of a namespace. Its body need not be valid.
    pub fn is_namespace_override(&self) -> bool {
        self.kind == RowKind::Override && NamespaceKey::read(&self.body).is_some()
    }
}

/// The tenant, namespace and identifier of a namespace override. Only one row of a store has them.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NamespaceKey {
    /// `None`: for every tenant.
    pub(crate) tenant: Option<String>,
    pub(crate) namespace: String,
    #[serde(default)]
    pub(crate) identifier: String,
    /// An override of a rule has no namespace; one with both is invalid.
    rule: Option<IgnoredAny>,
}

impl NamespaceKey {
    /// Reads the key of a namespace override; `None` for a body of another row. There may be a
    /// million others, so most are not parsed.
    pub(crate) fn read(body: &str) -> Option<Self> {
        memmem::find(body.as_bytes(), b"namespace")?;
        let key: Self = serde_json::from_str(body).ok()?;
        key.rule.is_none().then_some(key)
    }
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

/// A namespace override that a client set or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverrideChange {
    /// The name of its row.
    pub name: String,
    /// `None`: deleted.
    pub body: Option<String>,
    /// Of the row, after the change.
    pub version: u32,
}

/// All rule rows and emergencies of a store, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleRows {
    /// Raised by every change of rows.
    pub revision: u64,
    /// Raised by every change of emergencies.
    pub emergency_revision: u64,
    /// Raised by every change of namespace overrides that clients make.
    pub override_revision: u64,
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
        let rows = Arc::clone(&self.rows);
        Self { emergency_revision, rows, emergencies, ..*self }
    }

    /// Returns the same emergencies with other rows: those of `changes` that have a body replace
    /// rows of their name, and those without remove them.
    #[must_use]
    pub fn with_overrides(&self, override_revision: u64, changes: Vec<OverrideChange>) -> Self {
        let names: HashSet<&str> = changes.iter().map(|change| change.name.as_str()).collect();
        let is_kept = |row: &&RuleRow| row.kind != RowKind::Override || !names.contains(row.name.as_str());
        let mut rows: Vec<RuleRow> = self.rows.iter().filter(is_kept).cloned().collect();
        rows.extend(changes.into_iter().filter_map(|OverrideChange { name, body, version }| {
            Some(RuleRow { kind: RowKind::Override, name, body: body?, version })
        }));
        // The kept rows are in order, so little is left to sort.
        rows.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        Self { override_revision, rows: rows.into(), emergencies: self.emergencies.clone(), ..*self }
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
