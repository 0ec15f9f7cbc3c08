//! `tidegate block` and `tidegate unblock`: emergencies that deny every request.

use clap::{Arg, ArgMatches, Command};
use serde_json::json;

use crate::client::{self, Client, segment};
use crate::emergency::{scope_line, tell};
use crate::naming::name_of;
use crate::rules::change::{ask, reason_arg, yes_arg};
use crate::{CommandResult, Failure, key_values};

pub(crate) fn command() -> Command {
    Command::new("block")
        .about("Deny all requests of a key, at once and for a limited time")
        .long_about(
            "Deny all requests of a key, at once and for at most an hour. A repeated block starts its time \
             again. Without a key, the block denies all requests of the rule. Without a rule, it denies \
             all requests under any rule. Both require a confirmation. So do blocks of yours that cover more \
             addresses together than a /16 (IPv6: a /32). Above a /8 (IPv6: a /16) they require a token \
             that may approve. Direct limits, such as CL.THROTTLE, are no rules: their requests still pass.",
        )
        .args(place_args())
        .arg(Arg::new("for").long("for").value_name("PERIOD").default_value("1h").help(
            "Duration of the \
                                                                                        block, at most 1h",
        ))
        .args([reason_arg(), yes_arg()])
        .args(client::args())
}

pub(crate) fn unblock_command() -> Command {
    Command::new("unblock").about("End a block").args(place_args()).args(client::args())
}

/// The parts of a key belong to a rule, so a key alone selects nothing.
const RULE_HELP: &str = "Rule to block; required with --key [default: all rules]";

fn place_args() -> [Arg; 3] {
    let [key, verbatim] = key_values::args();
    [Arg::new("rule").long("rule").value_name("RULE").help(RULE_HELP), key.requires("rule"), verbatim]
}

/// The target of a block. It determines the id of the emergency, so a repeated block is the same
/// emergency.
struct BlockTarget<'m> {
    rule: Option<&'m str>,
    key: Vec<&'m str>,
}

impl<'m> BlockTarget<'m> {
    fn new(matches: &'m ArgMatches) -> Self {
        let rule = matches.get_one::<String>("rule").map(String::as_str);
        Self { rule, key: key_values::values(matches) }
    }

    fn check(&self, client: &Client, matches: &ArgMatches) -> Result<(), Failure> {
        self.rule.map_or(Ok(()), |rule| key_values::check(client, rule, matches))
    }

    fn id(&self) -> String {
        match self.rule {
            Some(rule) => name_of("block:", rule, &self.key),
            None => "block".to_owned(),
        }
    }

    /// Describes the target for people.
    fn words(&self) -> String {
        match self.rule {
            None => "all requests under any rule".to_owned(),
            Some(rule) if self.key.is_empty() => format!("all requests of rule {rule}"),
            Some(rule) => format!("{} of rule {rule}", self.key.join(", ")),
        }
    }
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let place = BlockTarget::new(matches);
    let text = |id: &str| matches.get_one::<String>(id);
    let mut question = json!({
        "id": place.id(),
        "action": "block",
        "for": text("for"),
        "reason": text("reason"),
    });
    if let Some(rule) = place.rule {
        question["rule"] = rule.into();
    }
    if !place.key.is_empty() {
        question["key"] = place.key.clone().into();
    }
    let client = Client::new(matches)?;
    place.check(&client, matches)?;
    let answer = ask(&client, "/v1/emergencies", question, matches, None)?.decided(&[200])?;
    tell(matches, &answer.body, |body| {
        let expires = body["emergency"]["expires"].as_str().unwrap_or_default();
        let scope = scope_line(body).map_or_else(String::new, |scope| format!("; {scope}"));
        format!("blocked until {expires}: {}{scope}", place.words())
    })
}

pub(crate) fn run_unblock(matches: &ArgMatches) -> CommandResult {
    let place = BlockTarget::new(matches);
    let client = Client::new(matches)?;
    place.check(&client, matches)?;
    let answer = client.delete(&format!("/v1/emergencies/{}", segment(&place.id())))?;
    if answer.status == 404 {
        return Err(Failure::failed(format!("not blocked: {}", place.words())));
    }
    tell(matches, &answer.decided(&[200])?.body, |_| format!("no longer blocked: {}", place.words()))
}
