//! `tidegate block` and `tidegate unblock`: emergencies that let nothing pass.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::{Value, json};

use crate::client::{self, Client, segment};
use crate::rules::change::reason_arg;
use crate::{Done, Failure};

pub(crate) fn command() -> Command {
    Command::new("block")
        .about("Lets nothing of a key pass, at once and for a while")
        .long_about(
            "Lets nothing of a key pass, at once and for a while: an hour unless something shorter is said. The same said \
             again lets it last for as long once more.",
        )
        .args(place_args())
        .arg(Arg::new("for").long("for").value_name("PERIOD").default_value("1h").help("For how long, at most 1h"))
        .arg(reason_arg())
        .args(client::args())
}

pub(crate) fn unblock_command() -> Command {
    Command::new("unblock").about("Ends what `tidegate block` began").args(place_args()).args(client::args())
}

fn place_args() -> [Arg; 2] {
    [
        Arg::new("rule").long("rule").value_name("RULE").required(true).help("The rule"),
        Arg::new("key")
            .long("key")
            .value_name("KEY")
            .required(true)
            .action(ArgAction::Append)
            .help("A value or pattern with * for each part of the rule's key, in order"),
    ]
}

/// What is blocked, and the id of the emergency that does it: the same block is the same emergency.
struct Place<'m> {
    rule: &'m str,
    key: Vec<&'m str>,
}

impl<'m> Place<'m> {
    fn new(matches: &'m ArgMatches) -> Self {
        let rule = matches.get_one::<String>("rule").map_or("", String::as_str);
        let key = matches.get_many::<String>("key").into_iter().flatten().map(String::as_str).collect();
        Self { rule, key }
    }

    fn id(&self) -> String {
        format!("block:{}:{}", self.rule, self.key.join(":"))
    }
}

pub(crate) fn run(matches: &ArgMatches) -> Done {
    let place = Place::new(matches);
    let text = |id: &str| matches.get_one::<String>(id);
    let question = json!({
        "id": place.id(),
        "action": "block",
        "rule": place.rule,
        "key": place.key,
        "for": text("for"),
        "reason": text("reason"),
    });
    let answer = Client::new(matches)?.post("/v1/emergencies", &question)?.decided(&[200])?;
    Ok(tell(matches, &answer.body, |body| {
        let expires = body["emergency"]["expires"].as_str().unwrap_or_default();
        format!("blocked until {expires}: {} of {}", place.key.join(", "), place.rule)
    }))
}

pub(crate) fn run_unblock(matches: &ArgMatches) -> Done {
    let place = Place::new(matches);
    let answer = Client::new(matches)?.delete(&format!("/v1/emergencies/{}", segment(&place.id())))?;
    if answer.status == 404 {
        return Err(Failure::failed(format!("not blocked: {} of {}", place.key.join(", "), place.rule)));
    }
    Ok(tell(matches, &answer.decided(&[200])?.body, |_| {
        format!("no longer blocked: {} of {}", place.key.join(", "), place.rule)
    }))
}

fn tell(matches: &ArgMatches, body: &Value, words: impl FnOnce(&Value) -> String) -> ExitCode {
    if matches.get_flag("json") {
        println!("{body}");
    } else {
        println!("{}", words(body));
    }
    ExitCode::SUCCESS
}
