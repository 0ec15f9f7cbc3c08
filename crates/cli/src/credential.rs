//! `tidegate credential`: who may ask servers that keep their rules in a store.

use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use tidegate_server::auth::Role;
use tidegate_server::timestamp;

use crate::client::{self, Client, segment};
use crate::out::shown;
use crate::rules::change::tell_not_in_force;
use crate::rules::unexpected;
use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("credential")
        .about("Makes, lists and revokes credentials of a store")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(Command::new("list").about("Lists credentials, by their hashes").args(client::args()))
        .subcommand(new_command())
        .subcommand(
            Command::new("revoke")
                .about("Ends a credential at once, on every server")
                .arg(Arg::new("hash").value_name("HASH").required(true).help("Its hash, as `list` shows it"))
                .args(client::args()),
        )
}

fn new_command() -> Command {
    let text = |id: &'static str, value: &'static str, help: &'static str| {
        Arg::new(id).long(id).value_name(value).help(help)
    };
    Command::new("new")
        .about("Makes a token and prints it, once; the store keeps its hash")
        .arg(text("name", "NAME", "Whose it is: by this name the audit knows who acts").required(true))
        .arg(
            text("role", "ROLE", "What it allows")
                .required(true)
                .value_parser(PossibleValuesParser::new(Role::ALL.map(Role::as_str))),
        )
        .arg(text("tenant", "NAME", "Whose keys it opens [default: those of no tenant]"))
        .arg(
            Arg::new("expires_ms")
                .long("expires-ms")
                .value_name("MS")
                .value_parser(value_parser!(u64))
                .help("When it ends, in milliseconds since 1970 [default: when it is revoked]"),
        )
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.subcommand() {
        Some(("list", matches)) => list(matches),
        Some(("new", matches)) => make(matches),
        Some(("revoke", matches)) => revoke(matches),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn list(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let mut after = String::new();
    loop {
        let query: Vec<(&str, &str)> = if after.is_empty() { Vec::new() } else { vec![("after", &after)] };
        let body = client.get("/v1/credentials", &query)?.decided(&[200])?.body;
        for credential in body["credentials"].as_array().ok_or_else(|| unexpected("credentials"))? {
            if matches.get_flag("json") {
                say!("{credential}")?;
            } else {
                print(credential)?;
            }
        }
        match body["next"].as_str() {
            Some(next) => next.clone_into(&mut after),
            None => return Ok(ExitCode::SUCCESS),
        }
    }
}

fn print(credential: &Value) -> Result<(), Failure> {
    let text = |field: &str| credential[field].as_str().unwrap_or_default();
    let of = match text("tenant") {
        "" => String::new(),
        tenant => format!(" of {tenant}"),
    };
    let until =
        credential["expires_ms"].as_u64().map_or_else(String::new, |ms| format!(", until {}", timestamp(ms)));
    let (hash, name, role) = (text("hash"), text("name"), text("role"));
    say!("{}", shown(format_args!("{hash} {name}: {role}{of}{until}")))?;
    Ok(())
}

fn make(matches: &ArgMatches) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map_or("", String::as_str);
    let question = json!({
        "name": text("name"),
        "role": text("role"),
        "tenant": text("tenant"),
        "expires_ms": matches.get_one::<u64>("expires_ms"),
    });
    let body = Client::new(matches)?.post("/v1/credentials", &question)?.decided(&[200])?.body;
    if matches.get_flag("json") {
        say!("{body}")?;
    } else {
        say!("{}\n\nThis is shown once.", body["token"].as_str().ok_or_else(|| unexpected("token"))?)?;
    }
    tell_not_in_force(&body);
    Ok(ExitCode::SUCCESS)
}

fn revoke(matches: &ArgMatches) -> CommandResult {
    let hash = matches.get_one::<String>("hash").map_or("", String::as_str);
    let body =
        Client::new(matches)?.delete(&format!("/v1/credentials/{}", segment(hash)))?.decided(&[200])?.body;
    if matches.get_flag("json") {
        say!("{body}")?;
    } else {
        say!("revoked")?;
    }
    tell_not_in_force(&body);
    Ok(ExitCode::SUCCESS)
}
