//! Operations of a change: rows of the rules file are put, rows named by flags are deleted.

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::{Value, json};

use tidegate_server::check_rules_part;

use super::validate;
use crate::Failure;

/// The lists of a rules file, and the kinds of their rows.
pub(super) const LISTS: [(&str, &str); 3] =
    [("templates", "template"), ("rules", "rule"), ("overrides", "override")];

pub(super) fn args() -> [Arg; 2] {
    [
        Arg::new("file")
            .value_name("FILE")
            .help("Rules file (TOML): its templates, rules and overrides are put, other rows stay"),
        Arg::new("delete")
            .long("delete")
            .value_name("KIND/NAME")
            .action(ArgAction::Append)
            .help("Row to delete, such as rule/per_user"),
    ]
}

pub(super) fn read(matches: &ArgMatches) -> Result<Vec<Value>, Failure> {
    let mut operations = Vec::new();
    if let Some(file) = matches.get_one::<String>("file") {
        let text = validate::read(file).map_err(|problem| Failure::usage(format!("{file}: {problem}")))?;
        let checked = check_rules_part(&text).map_err(|problems| problems.0);
        let read = checked.and_then(|()| of_file(&text).map_err(|problem| vec![problem]));
        operations = read.map_err(|problems| validate::refused(file, &problems))?;
    }
    for row in matches.get_many::<String>("delete").into_iter().flatten() {
        let (kind, name) = row.split_once('/').ok_or_else(|| {
            Failure::usage(format!("delete: {row:?} is not KIND/NAME, such as rule/per_user"))
        })?;
        operations.push(json!({ "do": "delete", "kind": kind, "name": name }));
    }
    if operations.is_empty() {
        return Err(Failure::usage(
            "the change is empty: name a rules file with rows, or --delete KIND/NAME",
        ));
    }
    Ok(operations)
}

/// Makes operations of a file whose rows are valid.
fn of_file(text: &str) -> Result<Vec<Value>, String> {
    let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut operations = Vec::new();
    for (list, kind) in LISTS {
        let rows = match table.remove(list) {
            None => continue,
            Some(toml::Value::Array(rows)) => rows,
            Some(other) => {
                return Err(format!(
                    "{list}: expected a list, found a {}: write [[{list}]]",
                    other.type_str()
                ));
            }
        };
        for (at, row) in rows.into_iter().enumerate() {
            operations
                .push(put(kind, row).ok_or_else(|| format!("{list}[{at}].name: missing, or not a string"))?);
        }
    }
    let Some(other) = table.keys().next() else { return Ok(operations) };
    Err(format!("{other}: a rule store has only templates, rules and overrides"))
}

/// The store counts versions itself. JSON has no dates, so the server gets their text.
fn put(kind: &str, mut row: toml::Value) -> Option<Value> {
    if let Some(expires) = row.get_mut("expires")
        && let Some(date) = expires.as_datetime().map(ToString::to_string)
    {
        *expires = date.into();
    }
    let mut body = serde_json::to_value(row).ok()?;
    let fields = body.as_object_mut()?;
    fields.remove("version");
    let name = fields.remove("name")?.as_str()?.to_owned();
    Some(json!({ "do": "put", "kind": kind, "name": name, "body": body }))
}
