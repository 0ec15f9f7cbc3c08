//! The text of the scripts as sent to the store.
//!
//! A store runs the whole text for every call, and creating a Lua function takes longer the more
//! outer variables it uses. So the text is sent without comments, and with constants replaced by
//! their values. This saves a sixth of a small call's time.

use std::collections::HashMap;

use sha1_smol::Sha1;

/// Sources of the scripts: the shared part, and the part of each. The script for calls without
/// cross-region limits omits the code that only those limits need.
pub(super) const CALL: &str = concat!(
    "local IS_CROSS_REGION = false\n",
    include_str!("meter.lua"),
    include_str!("store.lua"),
    include_str!("transition.lua")
);
pub(super) const CALL_CROSS_REGION: &str = concat!(
    "local IS_CROSS_REGION = true\n",
    include_str!("meter.lua"),
    include_str!("store.lua"),
    include_str!("transition.lua")
);
pub(super) const ROUND: &str =
    concat!("local IS_CROSS_REGION = true\n", include_str!("meter.lua"), include_str!("round.lua"));
pub(super) const GATHER: &str =
    concat!("local IS_CROSS_REGION = true\n", include_str!("meter.lua"), include_str!("gather.lua"));
pub(super) const JOIN: &str = concat!(
    "local IS_CROSS_REGION = true\n",
    include_str!("meter.lua"),
    include_str!("store.lua"),
    include_str!("join.lua")
);
pub(super) const MERGE: &str =
    concat!("local IS_CROSS_REGION = true\n", include_str!("meter.lua"), include_str!("merge.lua"));
pub(super) const LEASE: &str = include_str!("lease.lua");
pub(super) const PROBE: &str = include_str!("probe.lua");

/// A script, and the hash that a store knows it by.
pub(super) struct Script {
    pub(super) text: String,
    pub(super) hash: String,
}

impl Script {
    pub(super) fn new(source: &str) -> Self {
        let text = condensed(source);
        Self { hash: Sha1::from(&text).digest().to_string(), text }
    }
}

/// Every script of an origin.
pub(super) struct Scripts {
    pub(super) call: Script,
    pub(super) call_cross_region: Script,
    pub(super) round: Script,
    pub(super) gather: Script,
    pub(super) join: Script,
    pub(super) merge: Script,
    pub(super) lease: Script,
    pub(super) probe: Script,
}

impl Scripts {
    pub(super) fn new() -> Self {
        let [call, call_cross_region, round, gather, join, merge, lease, probe] =
            [CALL, CALL_CROSS_REGION, ROUND, GATHER, JOIN, MERGE, LEASE, PROBE].map(Script::new);
        Self { call, call_cross_region, round, gather, join, merge, lease, probe }
    }
}

/// The same script in fewer words.
fn condensed(source: &str) -> String {
    let mut constants = HashMap::new();
    let mut lines = Vec::new();
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("--");
    for line in needed(source).into_iter().map(str::trim_start).filter(is_code) {
        match constants_of(line) {
            Some(found) => constants.extend(found),
            None => lines.push(line),
        }
    }
    replaced(&lines.join("\n"), &constants)
}

/// Returns the lines of a script, without the code under `IS_CROSS_REGION` if that is false.
/// Creating a Lua function takes longer the more outer functions it names, even if they never run.
fn needed(source: &str) -> Vec<&str> {
    let mut lines = source.lines();
    if !source.starts_with("local IS_CROSS_REGION = false") {
        return lines.collect();
    }
    let mut kept = Vec::new();
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        if !code.starts_with("if IS_CROSS_REGION ") {
            kept.push(line);
        } else if !code.ends_with(" end") {
            lines.by_ref().find(|line| line.trim_start() == "end" && line.len() == indent + 3);
        }
    }
    kept
}

/// The names and values of a line that gives names to values: `local ONE, TWO = 1, 2`.
fn constants_of(line: &str) -> Option<impl Iterator<Item = (&str, &str)>> {
    let (names, values) = line.strip_prefix("local ")?.split_once(" = ")?;
    let is_constant = |name: &str| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    names.split(", ").all(is_constant).then(|| names.split(", ").zip(values.split(", ")))
}

fn replaced(text: &str, constants: &HashMap<&str, &str>) -> String {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let mut rest = text;
    let mut result = String::with_capacity(text.len());
    while let Some(start) = rest.find(is_part) {
        let (before, from) = rest.split_at(start);
        let (word, after) = from.split_at(from.find(|letter| !is_part(letter)).unwrap_or(from.len()));
        result.push_str(before);
        result.push_str(constants.get(word).unwrap_or(&word));
        rest = after;
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condensed_script_is_equivalent_and_shorter() {
        let source = "-- About it.\nlocal MOST, FORM = 7, '<dd'\n\nlocal most = 1\n  -- Why.\n  return \
            f(FORM, MOST + most, MOSTLY, 'PX')\n";
        assert_eq!(condensed(source), "local most = 1\nreturn f('<dd', 7 + most, MOSTLY, 'PX')");
    }

    #[test]
    fn cross_region_code_is_removed_from_the_regional_script() {
        let source = "local IS_CROSS_REGION = false\nif IS_CROSS_REGION then\n  if a then\n    b()\n  \
            end\nend\nif IS_CROSS_REGION and c then d() end\nif not IS_CROSS_REGION then e() end\n";
        assert_eq!(condensed(source), "if not false then e() end");
        let wide = source.replace("= false", "= true");
        assert!(condensed(&wide).contains("b()") && condensed(&wide).contains("d()"));
        assert!(condensed(CALL).len() * 5 < condensed(CALL_CROSS_REGION).len() * 4);
    }

    /// Words in quotes are no names: one that is both would be replaced.
    #[test]
    fn no_constant_is_called_as_something_that_is_quoted() {
        for source in [CALL, CALL_CROSS_REGION, ROUND, GATHER, JOIN, MERGE, LEASE] {
            let constants: Vec<&str> =
                source.lines().filter_map(constants_of).flatten().map(|(name, _)| name).collect();
            let code: Vec<&str> =
                source.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
            let code = code.join("\n");
            let quoted: Vec<&str> = code.split('\'').skip(1).step_by(2).collect();
            assert!(quoted.iter().any(|word| word.ends_with("MGET")), "{quoted:?}");
            assert!(constants.iter().all(|name| !quoted.contains(name)));
            let text = condensed(source);
            let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            assert_eq!(words.filter(|word| constants.contains(word)).count(), 0);
        }
        assert!(CALL.lines().filter_map(constants_of).flatten().count() > 20);
    }
}
