//! The script as it is sent.
//!
//! A store runs the whole text for every call, and making a function takes the longer the more it takes from outside of it.
//! So the text is sent without remarks, and with what the names of constants stand for in place of them: a sixth of a small
//! call's time.

use std::collections::HashMap;

use sha1_smol::Sha1;

/// What is sent, as it is written.
pub(super) const SOURCE: &str = include_str!("transition.lua");

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

/// The same script in fewer words.
fn condensed(source: &str) -> String {
    let mut constants = HashMap::new();
    let mut lines = Vec::new();
    for line in source.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with("--"))
    {
        match constants_of(line) {
            Some(found) => constants.extend(found),
            None => lines.push(line),
        }
    }
    replaced(&lines.join("\n"), &constants)
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
    fn a_script_says_the_same_in_fewer_words() {
        let source = "-- About it.\nlocal MOST, FORM = 7, '<dd'\n\nlocal most = 1\n  -- Why.\n  return f(FORM, MOST + most, MOSTLY, 'PX')\n";
        assert_eq!(condensed(source), "local most = 1\nreturn f('<dd', 7 + most, MOSTLY, 'PX')");
    }

    /// Words in quotes are no names: one that is both would be replaced.
    #[test]
    fn no_constant_is_called_as_something_that_is_quoted() {
        let constants: Vec<&str> =
            SOURCE.lines().filter_map(constants_of).flatten().map(|(name, _)| name).collect();
        assert!(constants.len() > 20, "{constants:?}");
        let quoted: Vec<&str> = SOURCE.split('\'').skip(1).step_by(2).collect();
        assert!(quoted.contains(&"HMGET"), "{quoted:?}");
        assert!(constants.iter().all(|name| !quoted.contains(name)));
        let text = condensed(SOURCE);
        let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        assert_eq!(words.filter(|word| constants.contains(word)).count(), 0);
    }
}
