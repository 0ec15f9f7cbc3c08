//! `tidegate token`: makes tokens. A server keeps only their hashes.

use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command};
use serde_json::json;
use tidegate_server::auth::{Role, TokenHash, new_token};

use crate::client::json_arg;
use crate::{CommandResult, Failure};

/// The longest name of a tenant or a token, as the configuration has it.
const NAME_BYTES_MAX: usize = 128;

pub(crate) fn command() -> Command {
    Command::new("token")
        .about("Create tokens")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(new_command())
}

fn new_command() -> Command {
    Command::new("new")
        .about("Create a token, and print it with its entry for the configuration")
        .long_about(
            "Create a token, and print it once with its [[tokens]] entry for the configuration. The entry \
             holds a hash, which does not reveal the token.",
        )
        .arg(
            Arg::new("tenant")
                .long("tenant")
                .value_name("NAME")
                .help("Tenant of the token, the name of a [[tenants]] entry [default: none]"),
        )
        .arg(
            Arg::new("role")
                .long("role")
                .value_name("ROLE")
                .default_value(Role::Client.as_str())
                .value_parser(PossibleValuesParser::new(Role::ALL.map(Role::as_str)))
                .help("Role; each role includes the ones before it"),
        )
        .arg(
            Arg::new("name")
                .long("name")
                .value_name("NAME")
                .default_value("unnamed")
                .help("Name of the token, for the audit"),
        )
        .arg(json_arg())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.subcommand() {
        Some(("new", matches)) => make(matches),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn make(matches: &ArgMatches) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let tenant = text("tenant").map(|tenant| checked("tenant", tenant)).transpose()?;
    let name = checked("name", text("name").unwrap_or_default())?;
    let role = text("role").unwrap_or_default();
    let token = new_token().map_err(Failure::failed)?;
    let hash = TokenHash::of(token.as_bytes()).to_string();
    if matches.get_flag("json") {
        let made = json!({ "token": token, "name": name, "tenant": tenant, "role": role, "hash": hash });
        say!("{made}")?;
        return Ok(ExitCode::SUCCESS);
    }
    say!(
        "{token}\n\nThe token is printed once. Entry for the configuration file:\n\n[[tokens]]\nname = {}",
        quoted(name)
    )?;
    if let Some(tenant) = tenant {
        say!("tenant = {}", quoted(tenant))?;
    }
    say!("role = {}\nhash = {}", quoted(role), quoted(&hash))?;
    Ok(ExitCode::SUCCESS)
}

fn checked<'n>(flag: &str, name: &'n str) -> Result<&'n str, Failure> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(name);
    }
    Err(Failure::usage(format!("{flag}: {name:?} does not have 1 to {NAME_BYTES_MAX} printable bytes")))
}

/// A string of JSON is one of TOML too.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
