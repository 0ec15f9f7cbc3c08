//! Values of a rule's key, as arguments of commands.
//!
//! `why` and `heavy` print keys as `user:mallory`, and commands that name a key of a rule take the
//! value alone. A copied key would be a value that no request has.

use clap::{Arg, ArgAction, ArgMatches};

use crate::Failure;
use crate::client::{Client, segment};

/// The flags for the values of a rule's key.
pub(crate) fn args() -> [Arg; 2] {
    let key = Arg::new("key").long("key").value_name("KEY").action(ArgAction::Append);
    let verbatim = Arg::new("verbatim").long("verbatim").action(ArgAction::SetTrue).requires("key");
    [
        key.help("Value or pattern with `*`; repeat it for each part of the rule's key, in order"),
        verbatim.help("Take a value that begins with its dimension and a colon, such as arn:aws:s3"),
    ]
}

/// Returns the values of the key.
pub(crate) fn values(matches: &ArgMatches) -> Vec<&str> {
    matches.get_many::<String>("key").into_iter().flatten().map(String::as_str).collect()
}

/// Refuses a value that begins with its dimension and a colon, unless `--verbatim` is given.
pub(crate) fn check(client: &Client, rule: &str, matches: &ArgMatches) -> Result<(), Failure> {
    let key = values(matches);
    if matches.get_flag("verbatim") || !key.iter().any(|value| value.contains(':')) {
        return Ok(());
    }
    let answer = client.get(&format!("/v1/rules/rule/{}", segment(rule)), &[])?;
    // The request itself reports an unknown rule.
    let parts = answer.body["row"]["key"].as_array().map(Vec::as_slice).unwrap_or_default();
    let parts: Vec<&str> = parts.iter().filter_map(serde_json::Value::as_str).collect();
    bare(rule, &parts, &key).map_or(Ok(()), |problem| Err(Failure::usage(problem)))
}

/// Returns the problem of values that begin with their dimensions.
fn bare(rule: &str, parts: &[&str], key: &[&str]) -> Option<String> {
    let after = |part: &str, value: &str| value.strip_prefix(part)?.strip_prefix(':').map(str::to_owned);
    let bare: Vec<Option<String>> = parts.iter().zip(key).map(|(part, value)| after(part, value)).collect();
    let at = bare.iter().position(Option::is_some)?;
    let flags = key
        .iter()
        .enumerate()
        .map(|(at, value)| format!("--key {}", bare.get(at).and_then(Option::as_deref).unwrap_or(value)));
    Some(format!(
        "the key of rule {rule:?} is the value only: {}; if the value itself begins with \"{}:\", add --verbatim",
        flags.collect::<Vec<_>>().join(" "),
        parts[at],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_with_its_dimension_is_refused() {
        assert_eq!(
            bare("per_user", &["user"], &["user:m2"]).as_deref(),
            Some(
                "the key of rule \"per_user\" is the value only: --key m2; if the value itself begins with \
                 \"user:\", add --verbatim"
            )
        );
        let two = bare("r", &["ip", "user"], &["::1", "user:*"]).expect("a problem");
        assert!(two.contains(": --key ::1 --key *; "), "{two}");
        for value in ["m2", "users:m2", "user", "*", "m2:user:x"] {
            assert_eq!(bare("per_user", &["user"], &[value]), None, "{value}");
        }
        assert_eq!(bare("unknown", &[], &["user:m2"]), None);
    }
}
