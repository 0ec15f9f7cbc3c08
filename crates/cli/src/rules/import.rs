//! `tidegate rules import`: converts the configuration of other limiters into a change.

use clap::{Arg, ArgMatches, Command};
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_server::import_descriptors;

use super::change::{confirmed_args, make};
use super::validate;
use crate::naming::name_of;
use crate::out::shown;
use crate::{CommandResult, Failure, client, style};

pub(super) fn command() -> Command {
    let file = |help: &'static str| Arg::new("file").value_name("FILE").required(true).help(help);
    Command::new("import")
        .about("Import rules of other limiters as a change")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("envoy")
                .about("Import a descriptor file of envoyproxy/ratelimit as rules")
                .arg(file("Descriptor file (YAML)"))
                .args(confirmed_args())
                .args(client::args()),
        )
        .subcommand(
            Command::new("unkey")
                .about("Import the overrides of an Unkey namespace")
                .arg(
                    file(
                        "Responses of ratelimit.listOverrides (JSON), all pages, or the lists in their \
                          `data`",
                    )
                    .num_args(1..),
                )
                .arg(
                    Arg::new("namespace")
                        .long("namespace")
                        .value_name("NAMESPACE")
                        .required(true)
                        .help("Namespace of the overrides; the pages do not name it"),
                )
                .arg(
                    Arg::new("tenant")
                        .long("tenant")
                        .value_name("NAME")
                        .help("Tenant of the overrides [default: all tenants]"),
                )
                .args(confirmed_args())
                .args(client::args()),
        )
}

pub(super) fn run(matches: &ArgMatches) -> CommandResult {
    let Some((from, matches)) = matches.subcommand() else { return Ok(std::process::ExitCode::SUCCESS) };
    let paths: Vec<&str> =
        matches.get_many::<String>("file").into_iter().flatten().map(String::as_str).collect();
    let wrong = |path: &str, problem: String| Failure::usage(format!("{path}: {problem}"));
    let (mut operations, mut pages_before_others) = (Vec::new(), 0);
    for path in &paths {
        let text = validate::read(path).map_err(|problem| wrong(path, problem))?;
        if from == "envoy" {
            let imported = import_descriptors(&text).map_err(|problems| wrong(path, problems.join("\n")))?;
            for words in imported.left_out {
                aside!("{} left out: {}", style::paint_aside(style::WARNING, "warning:"), shown(words));
            }
            operations.extend(imported.operations);
        } else {
            let text_of = |id: &str| matches.get_one::<String>(id).map(String::as_str);
            let (namespace, tenant) = (text_of("namespace").unwrap_or_default(), text_of("tenant"));
            let page = of_unkey(&text, namespace, tenant).map_err(|problem| wrong(path, problem))?;
            pages_before_others += usize::from(page.has_more);
            operations.extend(page.operations);
        }
    }
    // Each page but the last is marked as followed by another.
    if pages_before_others == paths.len() {
        return Err(Failure::usage(
            "file: the last page is missing: each file has `hasMore`, so another page follows",
        ));
    }
    make(matches, &operations)
}

/// An override in Unkey's format.
#[derive(Deserialize)]
struct UnkeyOverride {
    identifier: String,
    limit: u64,
    /// In milliseconds.
    duration: u64,
}

/// Overrides of a page, as operations.
struct UnkeyPage {
    operations: Vec<Value>,
    /// Whether another page follows, according to Unkey.
    has_more: bool,
}

fn of_unkey(text: &str, namespace: &str, tenant: Option<&str>) -> Result<UnkeyPage, String> {
    let mut answer: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let has_more = answer.pointer("/pagination/hasMore") == Some(&Value::Bool(true));
    let list = if answer.is_array() { answer } else { answer["data"].take() };
    let all: Vec<UnkeyOverride> = serde_json::from_value(list).map_err(|error| format!("data: {error}"))?;
    let operation = |UnkeyOverride { identifier, limit, duration }: UnkeyOverride| {
        let prefix = tenant.map_or_else(String::new, |tenant| format!("{tenant}/"));
        let name = name_of(&prefix, namespace, &[&identifier]);
        let period = format!("{duration}ms");
        let mut body =
            json!({ "namespace": namespace, "identifier": identifier, "limit": limit, "period": period });
        if let Some(tenant) = tenant {
            body["tenant"] = tenant.into();
        }
        json!({ "do": "put", "kind": "override", "name": name, "body": body })
    };
    Ok(UnkeyPage { operations: all.into_iter().map(operation).collect(), has_more })
}
