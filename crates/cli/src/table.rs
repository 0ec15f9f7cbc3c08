//! Tables on standard output.

use comfy_table::{Attribute, Cell, CellAlignment, Color, ColumnConstraint, Table, presets};
use serde_json::Value;

use crate::out::shown;
use crate::style;

/// A table without rows. Its header is bold where standard output has colours.
pub(crate) fn with_header<const N: usize>(header: [&str; N]) -> Table {
    let mut table = without_header();
    table.set_header(header.map(|name| Cell::new(name).add_attribute(Attribute::Bold)));
    table
}

/// A table of names and values.
pub(crate) fn without_header() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if style::is_on() {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table
}

/// Aligns the columns from this one on to the right.
pub(crate) fn align_right(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Hides the columns that are empty in every row.
pub(crate) fn hide_empty(table: &mut Table) {
    for index in 0..table.column_count() {
        let is_empty = |cell: Option<&Cell>| cell.is_none_or(|cell| cell.content().is_empty());
        if table.column_cells_iter(index).all(is_empty)
            && let Some(column) = table.column_mut(index)
        {
            column.set_constraint(ColumnConstraint::Hidden);
        }
    }
}

/// The cell of a verdict, in its colour.
pub(crate) fn verdict(text: &str) -> Cell {
    let cell = Cell::new(shown(text));
    match text {
        "allow" | "allowed" => cell.fg(Color::Green),
        "deny" | "denied" => cell.fg(Color::Red),
        "shadow_denied" => cell.fg(Color::Yellow),
        _ => cell,
    }
}

/// A JSON value as a cell: a list with commas, an object as `name=value` pairs.
pub(crate) fn cell_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => shown(text),
        Value::Array(values) => values.iter().map(cell_text).collect::<Vec<_>>().join(","),
        Value::Object(fields) => {
            let pairs = fields.iter().map(|(name, value)| format!("{}={}", shown(name), cell_text(value)));
            pairs.collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_printed_without_json_syntax() {
        for (value, text) in [
            (json!(null), ""),
            (json!("per_user"), "per_user"),
            (json!(["user", "endpoint"]), "user,endpoint"),
            (json!({ "path": ["/x*", "/y"], "plan": "pro" }), "path=/x*,/y plan=pro"),
            (json!(7), "7"),
            (json!("\u{1b}[2J"), r"\u{1b}[2J"),
        ] {
            assert_eq!(cell_text(&value), text);
        }
    }

    #[test]
    fn empty_columns_are_hidden() {
        let mut table = with_header(["name", "tenant", "limit"]);
        table.add_row(["a", "", "1"]);
        table.add_row(["b", "", "20"]);
        align_right(&mut table, 2);
        hide_empty(&mut table);
        assert_eq!(table.to_string(), " name  limit \n a         1 \n b        20 ");
    }
}
