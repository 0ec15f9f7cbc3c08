//! `tidegate credential`: manages the credentials in a rule store.

use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command};
use comfy_table::Table;
use serde_json::{Value, json};
use tidegate_server::auth::Role;
use tidegate_server::timestamp;

use crate::client::{self, Client, segment, text_arg};
use crate::out::shown;
use crate::rules::change::print_not_in_force;
use crate::rules::unexpected;
use crate::table::{self, cell_text};
use crate::{CommandResult, expiry, style};

pub(crate) fn command() -> Command {
    Command::new("credential")
        .about("Create, list and revoke credentials of a store")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(Command::new("list").about("List credentials by their hashes").args(client::args()))
        .subcommand(new_command())
        .subcommand(
            Command::new("revoke")
                .about("Revoke a credential at once, on all servers of the store")
                .arg(
                    Arg::new("hash")
                        .value_name("HASH")
                        .required(true)
                        .help("Hash of the credential; see `list`"),
                )
                .args(client::args()),
        )
}

fn new_command() -> Command {
    Command::new("new")
        .about("Create a token and print it once; the store keeps its hash")
        .arg(text_arg("name", "NAME", "Name of the holder, for the audit").required(true))
        .arg(
            text_arg("role", "ROLE", "Role; each role includes the ones before it")
                .required(true)
                .value_parser(PossibleValuesParser::new(Role::ALL.map(Role::as_str))),
        )
        .arg(text_arg("tenant", "NAME", "Tenant of the token [default: none]"))
        .arg(text_arg("expires", "TIME", expiry::EXPIRES_HELP).value_parser(expiry::parse))
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
        let credentials = body["credentials"].as_array().ok_or_else(|| unexpected("credentials"))?;
        if matches.get_flag("json") {
            for credential in credentials {
                say!("{credential}")?;
            }
        } else if !credentials.is_empty() {
            say!("{}", credentials_table(credentials))?;
        } else if after.is_empty() {
            say!("no credentials")?;
        }
        match body["next"].as_str() {
            Some(next) => next.clone_into(&mut after),
            None => return Ok(ExitCode::SUCCESS),
        }
    }
}

fn credentials_table(credentials: &[Value]) -> Table {
    let mut table = table::with_header(["hash", "name", "role", "tenant", "expires"]);
    for credential in credentials {
        table.add_row([
            cell_text(&credential["hash"]),
            cell_text(&credential["name"]),
            cell_text(&credential["role"]),
            cell_text(&credential["tenant"]),
            credential["expires_ms"].as_u64().map(timestamp).unwrap_or_default(),
        ]);
    }
    table::hide_empty(&mut table);
    table
}

fn make(matches: &ArgMatches) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map_or("", String::as_str);
    let question = json!({
        "name": text("name"),
        "role": text("role"),
        "tenant": text("tenant"),
        "expires_ms": matches.get_one::<u64>("expires"),
    });
    let body = Client::new(matches)?.post("/v1/credentials", &question)?.decided(&[200])?.body;
    if matches.get_flag("json") {
        say!("{body}")?;
    } else {
        say!("{}\n\nThe token is printed once.", body["token"].as_str().ok_or_else(|| unexpected("token"))?)?;
    }
    print_not_in_force(&body);
    if let Some(warning) = body["warning"].as_str() {
        aside!("{} {}", style::paint_aside(style::WARNING, "warning:"), shown(warning));
    }
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
    print_not_in_force(&body);
    Ok(ExitCode::SUCCESS)
}
