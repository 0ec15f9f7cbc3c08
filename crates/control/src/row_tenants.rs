//! The tenant that a row of the rule store concerns.

use serde::Deserialize;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::{RowKind, RuleRows};

/// The fields of a row that decide which tenants it concerns.
#[derive(Default, Deserialize)]
struct RowReferences {
    tenant: Option<String>,
    rule: Option<String>,
    template: Option<String>,
}

/// Finds the tenant of a row, by its bodies before a change and after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTenants<'r> {
    pub(crate) before: &'r RuleRows,
    pub(crate) after: &'r RuleRows,
}

impl<'r> RowTenants<'r> {
    /// Returns the tenant that an operation concerns: of a rule, of an override, or of all rules of
    /// a template. `None` if it concerns several tenants.
    pub(crate) fn of(self, operation: &Operation) -> Option<String> {
        let (kind, name) = operation.row();
        let bodies = || self.bodies(kind, name).chain(operation.body());
        match kind {
            RowKind::Rule => the_one(bodies().map(|body| references(body).tenant)),
            RowKind::Override => the_one(bodies().flat_map(|body| self.of_override(body))),
            RowKind::Template => {
                let rules = self.versions().flat_map(|rows| rows.rows.iter());
                let rules = rules.filter(|row| row.kind == RowKind::Rule).map(|row| references(&row.body));
                let follows = rules.filter(|rule| rule.template.as_deref() == Some(name));
                the_one(follows.map(|rule| rule.tenant))
            }
        }
    }

    /// Returns the tenant that all operations concern.
    pub(crate) fn of_all<'o>(self, operations: impl IntoIterator<Item = &'o Operation>) -> Option<String> {
        the_one(operations.into_iter().map(|operation| self.of(operation)))
    }

    /// The tenant of an override, or else those of its rule.
    fn of_override(self, body: &str) -> Vec<Option<String>> {
        let RowReferences { tenant, rule, .. } = references(body);
        if tenant.is_some() {
            return vec![tenant];
        }
        let Some(rule) = rule else { return vec![None] };
        self.bodies(RowKind::Rule, &rule).map(|body| references(body).tenant).collect()
    }

    fn bodies(self, kind: RowKind, name: &str) -> impl Iterator<Item = &'r str> {
        let name = name.to_owned();
        self.versions().filter_map(move |rows| rows.row(kind, &name)).map(|row| row.body.as_str())
    }

    fn versions(self) -> impl Iterator<Item = &'r RuleRows> {
        [self.before, self.after].into_iter()
    }
}

fn references(body: &str) -> RowReferences {
    serde_json::from_str(body).unwrap_or_default()
}

/// Returns the tenant if all are the same one.
fn the_one(mut tenants: impl Iterator<Item = Option<String>>) -> Option<String> {
    let first = tenants.next()??;
    tenants.all(|tenant| tenant.as_deref() == Some(&*first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::RuleRow;

    use super::*;

    fn rows(rows: &[(RowKind, &str, &str)]) -> RuleRows {
        let row = |(kind, name, body): &(RowKind, &str, &str)| RuleRow {
            kind: *kind,
            name: (*name).to_owned(),
            body: (*body).to_owned(),
            version: 1,
        };
        // A rule store gives its rows in this order.
        let mut all: Vec<RuleRow> = rows.iter().map(row).collect();
        all.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        RuleRows { rows: all.into(), ..RuleRows::default() }
    }

    #[test]
    fn a_row_concerns_the_tenant_of_all_its_bodies() {
        const ACME: &str = r#"{"tenant":"acme","template":"pro"}"#;
        let before = rows(&[
            (RowKind::Rule, "acme", ACME),
            (RowKind::Rule, "all", r#"{"template":"free"}"#),
            (RowKind::Rule, "of_both", r#"{"tenant":"globex","template":"both"}"#),
            (RowKind::Rule, "also", r#"{"tenant":"acme","template":"both"}"#),
            (RowKind::Override, "vip", r#"{"tenant":"acme","rule":"all"}"#),
        ]);
        let tenants = RowTenants { before: &before, after: &before };
        let put = |kind, name: &str, body: &str| {
            tenants.of(&Operation::Put { kind, name: name.to_owned(), body: body.to_owned() })
        };
        let acme = Some("acme".to_owned());
        assert_eq!(put(RowKind::Rule, "acme", ACME), acme);
        assert_eq!(put(RowKind::Rule, "acme", r#"{"tenant":"globex"}"#), None, "it moves");
        assert_eq!(put(RowKind::Rule, "all", "{}"), None);
        assert_eq!(put(RowKind::Override, "vip", r#"{"tenant":"acme","rule":"all"}"#), acme);
        assert_eq!(put(RowKind::Override, "vip", r#"{"rule":"all"}"#), None);
        assert_eq!(put(RowKind::Override, "guest", r#"{"rule":"acme"}"#), acme, "its rule is for one");
        assert_eq!(put(RowKind::Template, "pro", "{}"), acme);
        assert_eq!(
            [put(RowKind::Template, "free", "{}"), put(RowKind::Template, "both", "{}")],
            [None, None]
        );
        let gone = Operation::Delete { kind: RowKind::Override, name: "vip".to_owned() };
        assert_eq!(tenants.of(&gone), acme);
        let other = Operation::Delete { kind: RowKind::Rule, name: "all".to_owned() };
        assert_eq!((tenants.of_all([&gone]), tenants.of_all([&gone, &other])), (acme, None));
    }
}
