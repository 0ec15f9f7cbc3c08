//! The lines of a TOML text: where a problem is, and all syntax errors of the text.

use std::ops::Range;

use serde::Deserialize as _;
use toml::Table;
use toml::de::{DeTable, DeValue, Deserializer};

/// Maximum number of listed syntax errors; the others are counted.
const SYNTAX_ERRORS_MAX: usize = 100;

/// A TOML text, parsed as far as possible, with the places of its keys.
#[derive(Debug)]
pub struct TomlLines<'t> {
    text: &'t str,
    /// Offsets of the line breaks.
    breaks: Vec<usize>,
    root: toml::Spanned<DeTable<'t>>,
    table: Table,
    /// Syntax errors with their lines.
    syntax: Vec<(usize, String)>,
    /// Syntax errors beyond [`SYNTAX_ERRORS_MAX`].
    unlisted: usize,
}

impl<'t> TomlLines<'t> {
    /// Parses a text. After a syntax error, the rest of the text is still parsed.
    pub fn read(text: &'t str) -> Self {
        let (root, mut errors) = DeTable::parse_recoverable(text);
        // A number out of range is valid syntax, and an error only here.
        let table = Table::deserialize(Deserializer::from(root.clone())).unwrap_or_else(|error| {
            errors.push(error);
            Table::default()
        });
        let breaks = text.match_indices('\n').map(|(at, _)| at).collect();
        let unlisted = errors.len().saturating_sub(SYNTAX_ERRORS_MAX);
        let mut lines = Self { text, breaks, root, table, syntax: Vec::new(), unlisted };
        lines.syntax =
            errors.iter().take(SYNTAX_ERRORS_MAX).map(|error| lines.syntax_problem(error)).collect();
        lines
    }

    /// Returns the keys and values of the text, also after syntax errors. It is empty if a value is
    /// out of the range of TOML.
    pub fn table(&self) -> Table {
        self.table.clone()
    }

    /// Whether the text is not valid TOML.
    pub fn has_syntax_errors(&self) -> bool {
        !self.syntax.is_empty()
    }

    /// Returns all problems, each after its line, sorted by line: syntax errors, and those of
    /// `problems` that begin with a path such as `rules[0].limit: `. Problems without a line come
    /// first, a count of further problems last. Syntax errors may hide keys, so they replace
    /// problems of their lines and problems without a line.
    pub fn locate(&self, problems: Vec<String>) -> Vec<String> {
        let is_count = |problem: &String| problem.starts_with("and ") && problem.ends_with(" more");
        let (counts, problems): (Vec<_>, Vec<_>) = problems.into_iter().partition(is_count);
        let lines: Vec<usize> = self.syntax.iter().map(|(line, _)| *line).collect();
        let hides = |line: Option<usize>| line.is_none_or(|line| lines.contains(&line));
        let located = problems.into_iter().filter_map(|problem| {
            let line = self.line_of(&problem);
            let is_missing = problem.contains(": missing");
            let is_dropped = self.has_syntax_errors() && (is_missing || hides(line));
            (!is_dropped).then(|| match line {
                Some(at) => (line, format!("line {at}: {problem}")),
                None => (None, problem),
            })
        });
        let syntax = self.syntax.iter().map(|(line, problem)| (Some(*line), problem.clone()));
        let mut all: Vec<(Option<usize>, String)> = syntax.chain(located).collect();
        all.sort_by_key(|(line, _)| *line);
        let unlisted = (self.unlisted > 0).then(|| format!("and {} more syntax errors", self.unlisted));
        all.into_iter().map(|(_, problem)| problem).chain(unlisted).chain(counts).collect()
    }

    /// Returns the line of the key or row that a problem begins with; `None` if the text has no
    /// part of its path.
    pub fn line_of(&self, problem: &str) -> Option<usize> {
        // A problem of a table's header begins with it, such as `[[rule]]: `.
        in_table(self.root.get_ref(), problem.trim_start_matches('[')).map(|span| self.line_at(span.start))
    }

    fn line_at(&self, offset: usize) -> usize {
        1 + self.breaks.partition_point(|at| *at < offset)
    }

    /// Describes a syntax error in one line, with its line and column.
    fn syntax_problem(&self, error: &toml::de::Error) -> (usize, String) {
        let message = error.message().replace('\n', ", ");
        let start = error.span().map_or(0, |span| span.start);
        let line = self.line_at(start);
        let line_start = line.checked_sub(2).and_then(|at| self.breaks.get(at)).map_or(0, |at| at + 1);
        let column = 1 + self.text.get(line_start..start).map_or(0, |before| before.chars().count());
        (line, format!("line {line}, column {column}: {message}"))
    }
}

/// Finds the key of a table that a path begins with, or a key below it. Names of dimensions have
/// dots, so the longest key that fits is meant.
fn in_table(table: &DeTable<'_>, path: &str) -> Option<Range<usize>> {
    let fits = |key: &str| {
        path.strip_prefix(key).filter(|rest| rest.is_empty() || rest.starts_with(['.', '[', ':', ']']))
    };
    let keys = table.iter().filter_map(|(key, value)| Some((key, value, fits(key.get_ref())?)));
    let (key, value, rest) = keys.min_by_key(|(_, _, rest)| rest.len())?;
    Some(in_value(value.get_ref(), rest).unwrap_or_else(|| key.span()))
}

/// Finds the rest of a path in a value; `None` if the path ends here.
fn in_value(value: &DeValue<'_>, path: &str) -> Option<Range<usize>> {
    match value {
        DeValue::Table(table) => {
            let below = path.strip_prefix('.').or_else(|| path.strip_prefix(": "))?;
            in_table(table, below)
        }
        DeValue::Array(rows) => {
            let (row, rest) = rows.iter().enumerate().rev().find_map(|(at, row)| {
                let name = row.get_ref().get("name").and_then(|name| name.get_ref().as_str());
                let by_name = name.and_then(|name| path.strip_prefix(&format!("[{name:?}]")));
                // Of several rows with one name, the last repeats it.
                Some((row, path.strip_prefix(&format!("[{at}]")).or(by_name)?))
            })?;
            Some(in_value(row.get_ref(), rest).unwrap_or_else(|| row.span()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "memory = '1'\n\n[[rules]]\nname = 'a'\nlimit = -1\n[rules.when]\n'header.x' = 3\n\
                        \n[[rules]]\nname = 'b]'\n\n[[rules]]\nname = 'a'\n";

    #[test]
    fn problem_has_the_line_of_its_key_or_row() {
        let lines = TomlLines::read(TEXT);
        for (problem, line) in [
            ("memory: too little", Some(1)),
            ("rules[0].limit: -1 is outside", Some(5)),
            ("rules[0].period: missing", Some(3)),
            ("rules[0].when.header.x: a pattern is text", Some(7)),
            ("rules[1]: name: wrong", Some(10)),
            ("rules[1].name: wrong", Some(10)),
            ("rules[\"b]\"].tenant: unknown", Some(9)),
            ("rules[\"a\"].name: given twice", Some(13)),
            ("rules[7].limit: not there", Some(3)),
            ("memories: not a setting", None),
            ("workers: given as a flag", None),
        ] {
            assert_eq!(lines.line_of(problem), line, "{problem}");
        }
    }

    #[test]
    fn problems_are_sorted_by_line() {
        let problems = ["rules[1].limit: missing", "memory: wrong", "peer: wrong", "and 3 more"];
        assert_eq!(
            TomlLines::read(TEXT).locate(problems.map(str::to_owned).into()),
            ["peer: wrong", "line 1: memory: wrong", "line 9: rules[1].limit: missing", "and 3 more"]
        );
    }

    #[test]
    fn number_out_of_range_is_a_syntax_error_of_its_line() {
        for value in ["99999999999999999999", "9223372036854775808", "-9223372036854775809"] {
            let text = format!("memory = '1'\nworkers = {value}\n");
            let lines = TomlLines::read(&text);
            assert!(lines.has_syntax_errors(), "{value}");
            let located = lines.locate(Vec::new());
            assert!(located.len() == 1 && located[0].starts_with("line 2"), "{located:?}");
        }
    }

    #[test]
    fn syntax_errors_are_listed_up_to_a_limit() {
        let text = "=\n".repeat(1_000);
        let located = TomlLines::read(&text).locate(Vec::new());
        assert_eq!(located.len(), SYNTAX_ERRORS_MAX + 1);
        assert!(located.last().is_some_and(|last| last.ends_with(" more syntax errors")), "{located:?}");
    }

    #[test]
    fn all_syntax_errors_are_listed_with_problems_of_other_lines() {
        let lines = TomlLines::read("a = \nb = 'x\nc = 1\nc = 2\nd = -1\n");
        assert!(lines.has_syntax_errors());
        let problems = ["a: missing", "b: wrong", "d: -1 is outside 0 to 1", "e: wrong"];
        let located = lines.locate(problems.map(str::to_owned).into());
        let places: Vec<&str> = located.iter().filter_map(|line| line.split(": ").next()).collect();
        assert_eq!(
            places,
            ["line 1, column 5", "line 2, column 7", "line 4, column 1", "line 5"],
            "{located:#?}"
        );
        assert_eq!(lines.table().get("d").and_then(toml::Value::as_integer), Some(-1));
    }
}
