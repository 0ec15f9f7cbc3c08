//! Reads settings by their keys, and collects their problems.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use tidegate_rules::pattern::Pattern;
use tidegate_rules::{TomlLines, parse_network, parse_period};
use toml::{Table, Value};

use super::MEMORY_BYTES_STAND_IN;
use crate::rules::read_text;
use crate::settings::SETTINGS;

/// The least size of a setting. Of a table: room for some ten thousand keys.
const SIZE_BYTES_MIN: usize = 1 << 20;
/// The largest: 16 TiB. Of a table: more than any machine has.
const SIZE_BYTES_MAX: usize = 1 << 44;
/// The largest file: room for the most tokens, with names of ordinary length.
const FILE_BYTES_MAX: usize = 32 << 20;
/// Largest number of patterns in one setting: each request is compared with all of them.
const PATTERNS_MAX: usize = 100;
/// Largest number of host names: a request of an operator is compared with all of them.
const HOSTS_MAX: usize = 100;
/// The longest name of a tenant or a token.
pub(super) const NAME_BYTES_MAX: usize = 128;

pub(super) struct Reader<'g> {
    pub(super) given: &'g HashMap<String, String>,
    pub(super) file: Table,
    /// The text of the file, and its path if it has one.
    text: String,
    path: Option<PathBuf>,
    /// Whether all configured tokens could be read. If not, the missing tokens are not reported as
    /// a problem of their own.
    pub(super) tokens_known: bool,
    pub(super) problems: Vec<String>,
}

impl<'g> Reader<'g> {
    pub(super) fn new(given: &'g HashMap<String, String>) -> Self {
        Self {
            given,
            file: Table::new(),
            text: String::new(),
            path: None,
            tokens_known: true,
            problems: Vec::new(),
        }
    }

    pub(super) fn take_path(&mut self, path: &Path) {
        if path.as_os_str().is_empty() {
            return self.without_file("empty: leave it out, or name a file");
        }
        match read_text(path, FILE_BYTES_MAX) {
            Ok(text) => {
                self.path = Some(path.to_owned());
                self.take_file(text);
            }
            Err(problem) => self.without_file(problem),
        }
    }

    pub(super) fn take_file(&mut self, text: String) {
        let lines = TomlLines::read(&text);
        self.file = lines.table();
        // A token may be in the part that cannot be read.
        self.tokens_known = !lines.has_syntax_errors();
        self.text = text;
    }

    fn without_file(&mut self, problem: impl fmt::Display) {
        self.tokens_known = false;
        self.problem("config", problem);
    }

    /// Returns all problems: first those of flags and variables, then those of the file, each with
    /// its line and sorted by line.
    pub(super) fn into_problems(self) -> Vec<String> {
        let lines = TomlLines::read(&self.text);
        if self.problems.is_empty() && !lines.has_syntax_errors() {
            return Vec::new();
        }
        let is_given = |problem: &String| {
            let key = problem.split([':', '[', '.']).next().unwrap_or_default();
            key == "config" || self.given.contains_key(key)
        };
        let (mut problems, of_file): (Vec<_>, Vec<_>) = self.problems.into_iter().partition(is_given);
        let named = |problem: String| match &self.path {
            Some(path) if problem.starts_with("line ") => format!("{}: {problem}", path.display()),
            _ => problem,
        };
        problems.extend(lines.locate(of_file).into_iter().map(named));
        problems
    }

    pub(super) fn problem(&mut self, key: &str, problem: impl fmt::Display) {
        self.problems.push(format!("{key}: {problem}"));
    }

    pub(super) fn has_problem(&self, key: &str) -> bool {
        self.problems.iter().any(|problem| problem.starts_with(&format!("{key}: ")))
    }

    /// Returns the value of a setting as text: from `given`, else from the file, else the default.
    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        let setting = SETTINGS.iter().find(|setting| setting.key == key)?;
        let default = Some(setting.default.to_owned()).filter(|default| !default.is_empty());
        let text = match (self.given.get(key), self.file.remove(key)) {
            (Some(given), _) => given.clone(),
            (None, None) => return default,
            (None, Some(value)) => {
                let Some(text) = as_text(&value) else {
                    self.problem(key, format!("a {} is not a value of this setting", value.type_str()));
                    return default;
                };
                text
            }
        };
        if text.is_empty() && !setting.is_list {
            // An empty value is more often an unset variable than intended.
            let otherwise = default.as_ref().map(|default| format!(" for {default}")).unwrap_or_default();
            self.problem(key, format!("empty: leave it out{otherwise}, or give it a value"));
            return default;
        }
        Some(text).filter(|text| !text.is_empty())
    }

    pub(super) fn path(&mut self, key: &str) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    /// Returns the `NAME=VALUE` pairs of a setting.
    pub(super) fn pairs(&mut self, key: &str) -> Vec<(String, String)> {
        let text = self.text(key).unwrap_or_default();
        let mut pairs = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some((name, said)) => pairs.push((name.to_owned(), said.to_owned())),
                None => self.problem(key, format!("{part:?} is not NAME=...")),
            }
        }
        pairs
    }

    pub(super) fn patterns(&mut self, key: &str) -> Vec<Pattern> {
        let text = self.text(key).unwrap_or_default();
        let patterns: Vec<Pattern> =
            text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(Pattern::new).collect();
        if patterns.len() > PATTERNS_MAX {
            self.problem(key, format!("{} patterns is outside 0 to {PATTERNS_MAX}", patterns.len()));
        }
        patterns
    }

    pub(super) fn networks(&mut self, key: &str) -> Vec<IpNet> {
        let text = self.text(key).unwrap_or_default();
        let mut networks = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match parse_network(part) {
                Ok(network) => networks.push(network),
                Err(problem) => self.problem(key, problem),
            }
        }
        networks
    }

    /// Returns host names, without ports, in lower case.
    pub(super) fn hosts(&mut self, key: &str) -> Vec<String> {
        let text = self.text(key).unwrap_or_default().to_ascii_lowercase();
        let mut hosts = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            if part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte)) {
                hosts.push(part.to_owned());
            } else {
                self.problem(
                    key,
                    format!("{part:?} is not a host name without a port, such as gate.example"),
                );
            }
        }
        if hosts.len() > HOSTS_MAX {
            self.problem(key, format!("{} host names is outside 0 to {HOSTS_MAX}", hosts.len()));
        }
        hosts
    }

    pub(super) fn size(&mut self, key: &str) -> usize {
        let text = self.text(key).unwrap_or_default();
        let bytes = parse_size(&text).filter(|bytes| (SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(bytes));
        bytes.unwrap_or_else(|| {
            self.problem(key, format!("{text:?} is not a size from 1MB to 16TB, such as \"256MB\""));
            MEMORY_BYTES_STAND_IN
        })
    }

    pub(super) fn number(&mut self, key: &str, least: usize, most: usize) -> usize {
        let Some(text) = self.text(key) else { return least };
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.unwrap_or_else(|| {
            self.problem(key, format!("{text:?} is not a number from {least} to {most}"));
            least
        })
    }

    pub(super) fn share(&mut self, key: &str) -> f64 {
        let text = self.text(key).unwrap_or_default();
        let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        share.unwrap_or_else(|| {
            self.problem(key, format!("{text:?} is not a share from 0 to 1, such as \"0.001\""));
            0.0
        })
    }

    pub(super) fn time(&mut self, key: &str, least: Duration, most: Duration) -> Duration {
        let text = self.text(key).unwrap_or_default();
        self.time_of(key, &text, least, most)
    }

    /// A time of a setting that has no default.
    pub(super) fn optional_time(&mut self, key: &str, least: Duration, most: Duration) -> Option<Duration> {
        let text = self.text(key)?;
        Some(self.time_of(key, &text, least, most))
    }

    fn time_of(&mut self, key: &str, text: &str, least: Duration, most: Duration) -> Duration {
        match parse_period(text) {
            Ok(time) if (least..=most).contains(&time) => time,
            Ok(time) => {
                self.problem(key, format!("{time:?} is outside {least:?} to {most:?}"));
                most
            }
            Err(problem) => {
                self.problem(key, problem);
                most
            }
        }
    }

    pub(super) fn rows(&mut self, key: &str, most: usize) -> Vec<Value> {
        match self.file.remove(key) {
            None => Vec::new(),
            Some(Value::Array(rows)) if rows.len() <= most => rows,
            Some(Value::Array(rows)) => {
                self.problem(key, format!("{} is outside 0 to {most}", rows.len()));
                Vec::new()
            }
            Some(other) => {
                self.problem(key, format!("a {} is not a list: write [[{key}]]", other.type_str()));
                Vec::new()
            }
        }
    }

    pub(super) fn unknown_keys(&mut self) {
        let unknown: Vec<String> = self.file.keys().cloned().collect();
        for key in unknown {
            self.problem(&key, "not a setting");
        }
    }
}

pub(super) fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Array(values) => {
            let parts: Option<Vec<_>> = values.iter().map(Value::as_str).collect();
            parts.map(|parts| parts.join(","))
        }
        _ => None,
    }
}

/// Bytes from a size such as `256MB` or `1GB` (powers of 1024), or a plain number of bytes.
fn parse_size(text: &str) -> Option<usize> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "KB" | "KiB" => 10,
        "MB" | "MiB" => 20,
        "GB" | "GiB" => 30,
        "TB" | "TiB" => 40,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_powers_of_1024() {
        let cases = [
            ("10", Some(10)),
            ("2KB", Some(2048)),
            ("3MiB", Some(3 << 20)),
            ("1GB", Some(1 << 30)),
            ("x", None),
            ("1.5GB", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), bytes, "{text}");
        }
    }
}
