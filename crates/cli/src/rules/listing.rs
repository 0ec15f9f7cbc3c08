//! Rows of a rule store as tables, one for each kind.

use comfy_table::Table;
use serde_json::Value;
use tidegate_server::timestamp;

use super::operations::LISTS;
use crate::out::shown;
use crate::table::{self, cell_text};

/// The fields of a row with their own columns. Others are in the last column.
const COLUMN_FIELDS: [&str; 13] = [
    "template",
    "rule",
    "key",
    "namespace",
    "identifier",
    "when",
    "limit",
    "period",
    "burst",
    "mode",
    "class",
    "tenant",
    "expires",
];

/// The place of the column of versions, which are aligned to the right.
const VERSION_COLUMN: usize = 13;

/// A table for each kind that has rows: templates, rules, overrides.
pub(super) fn tables(rows: &[Value]) -> impl Iterator<Item = Table> + '_ {
    let of_kind = |(_, kind): (&'static str, &'static str)| {
        let of_kind: Vec<&Value> = rows.iter().filter(|row| row["kind"] == kind).collect();
        (!of_kind.is_empty()).then(|| rows_table(kind, &of_kind))
    };
    LISTS.into_iter().filter_map(of_kind)
}

/// The number of rows of each kind, such as `2 rules, 1 override`.
pub(super) fn counts(rows: &[Value]) -> String {
    let count = |(list, kind): (&str, &str)| {
        let count = rows.iter().filter(|row| row["kind"] == kind).count();
        (count > 0).then(|| format!("{count} {}", if count == 1 { kind } else { list }))
    };
    let counts: Vec<String> = LISTS.into_iter().filter_map(count).collect();
    if counts.is_empty() { "no rows".to_owned() } else { counts.join(", ") }
}

fn rows_table(kind: &str, rows: &[&Value]) -> Table {
    let mut table = table::with_header([
        kind,
        "rule",
        "template",
        "key",
        "namespace",
        "identifier",
        "when",
        "tenant",
        "limit",
        "mode",
        "class",
        "expires",
        "more",
        "version",
        "bound",
    ]);
    for row in rows {
        let body = &row["body"];
        let field = |name: &str| cell_text(&body[name]);
        table.add_row([
            shown(row["name"].as_str().unwrap_or_default()),
            field("rule"),
            field("template"),
            key(body),
            field("namespace"),
            field("identifier"),
            field("when"),
            field("tenant"),
            limit_text(body),
            field("mode"),
            field("class"),
            body["expires"].as_u64().map(timestamp).unwrap_or_default(),
            more(body),
            cell_text(&row["version"]),
            cell_text(&row["bound"]["total"]),
        ]);
    }
    table::align_right(&mut table, VERSION_COLUMN);
    table::hide_empty(&mut table);
    table
}

/// The key of a rule. An empty key counts all requests together.
fn key(body: &Value) -> String {
    match body["key"].as_array() {
        Some(parts) if parts.is_empty() => "all requests".to_owned(),
        _ => cell_text(&body["key"]),
    }
}

/// Limit, period and burst, such as `100 per 1m, burst 20`. An override may inherit the period.
pub(crate) fn limit_text(body: &Value) -> String {
    let mut text = cell_text(&body["limit"]);
    for (prefix, field) in [(" per ", "period"), (", burst ", "burst")] {
        if !body[field].is_null() {
            text = format!("{text}{prefix}{}", cell_text(&body[field]));
        }
    }
    text.trim_start_matches([',', ' ']).to_owned()
}

/// The fields without a column of their own.
fn more(body: &Value) -> String {
    let others = body.as_object().into_iter().flatten();
    let others = others.filter(|(name, _)| !COLUMN_FIELDS.contains(&name.as_str()));
    let pairs: Vec<String> =
        others.map(|(name, value)| format!("{}={}", shown(name), cell_text(value))).collect();
    pairs.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_kind_has_a_table_without_empty_columns() {
        let rows = [
            json!({
                "kind": "template", "name": "pro", "version": 1,
                "body": { "limit": 50, "period": "1h" },
            }),
            json!({
                "kind": "rule", "name": "user", "version": 2, "bound": { "total": 7 },
                "body": { "key": ["user", "path"], "when": { "a": "b" }, "limit": 100, "period": "1m",
                          "burst": 20, "priority": -3 },
            }),
            json!({ "kind": "rule", "name": "all", "version": 1, "body": { "key": [], "template": "pro" } }),
            json!({
                "kind": "override", "name": "vip", "version": 1,
                "body": { "rule": "per_user", "key": ["ann"], "limit": 9, "expires": 1_798_761_600_000_u64 },
            }),
            json!({
                "kind": "override", "name": "ovr_1", "version": 3,
                "body": { "namespace": "emails", "identifier": "vip-*", "limit": 7, "period": "60000ms" },
            }),
        ];
        let tables: Vec<String> = tables(&rows).map(|table| table.trim_fmt()).collect();
        assert_eq!(
            tables,
            [
                " template  limit      version\n pro       50 per 1h        1",
                " rule  template  key           when  limit                 more         version  bound\n \
                 user            user,path     a=b   100 per 1m, burst 20  priority=-3        2      7\n \
                 all   pro       all requests                                                 1",
                " override  rule      key  namespace  identifier  limit          expires                   \
                 version\n vip       per_user  ann                         9              \
                 2027-01-01T00:00:00.000Z        1\n ovr_1                    emails     vip-*       7 per \
                 60000ms                                  3",
            ]
        );
        assert_eq!(counts(&rows), "1 template, 2 rules, 2 overrides");
        assert_eq!(counts(&[]), "no rows");
    }

    #[test]
    fn no_text_of_a_row_reaches_the_terminal_raw() {
        let wild = "\u{1b}[2Jx\ny";
        let body = json!({ "key": [wild], "mode": wild, wild: wild, "limit": 1, "period": wild });
        let rows = [json!({ "kind": "rule", "name": wild, "version": 1, "body": body })];
        let table = tables(&rows).next().expect("a table").to_string();
        assert_eq!(table.lines().count(), 2, "{table:?}");
        assert!(!table.contains('\u{1b}'), "{table:?}");
    }
}
