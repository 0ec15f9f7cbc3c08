//! Finds lines that are wider than a reader's window. `rustfmt` leaves comments and strings alone.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Failure;

/// Columns of a Rust line that is only a comment.
const COMMENT_MAX: usize = 100;
/// Columns of any other Rust line, code in comments included, and of Markdown prose.
const LINE_MAX: usize = 120;

/// Folders of the repository with text that people read.
const FOLDERS: [&str; 4] = ["crates", "docs", "fuzz", "xtask"];
/// Folders of other programs below them.
const SKIPPED: [&str; 3] = ["target", "node_modules", "corpus"];

/// Fails with the place of every line that is too wide.
pub(crate) fn check(root: &Path) -> Result<(), Failure> {
    let mut files = root_pages(root)?;
    for folder in FOLDERS {
        collect(&root.join(folder), &mut files)?;
    }
    let mut wide = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).map_err(|error| unreadable(file, &error))?;
        let name = file.strip_prefix(root).unwrap_or(file);
        let places = wide_lines(&text, is_rust(file));
        wide.extend(places.map(|(line, columns)| format!("{}:{line}: {columns} columns", name.display())));
    }
    match wide.as_slice() {
        [] => Ok(()),
        wide => Err(format!(
            "{} lines are too wide (comments: {COMMENT_MAX} columns, other lines: {LINE_MAX}):\n{}",
            wide.len(),
            wide.join("\n")
        )),
    }
}

/// Returns the line numbers and widths of lines that are too wide.
fn wide_lines(text: &str, is_rust: bool) -> impl Iterator<Item = (usize, usize)> {
    let numbered = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    let mut is_code_block = false;
    numbered.filter_map(move |(number, line)| {
        let start = line.trim_start();
        let is_comment = is_rust && start.starts_with("//");
        let prose = if is_comment { start.trim_start_matches(['/', '!']).trim_start() } else { start };
        if is_comment || !is_rust {
            is_code_block ^= prose.starts_with("```");
        } else {
            is_code_block = false;
        }
        // A table row, a link and a command in a page cannot be wrapped.
        let is_table_row = (is_comment || !is_rust) && prose.starts_with('|');
        let is_fixed = is_table_row || start.contains("://") || (is_code_block && !is_rust);
        let columns = line.chars().count();
        let columns_max = if is_comment && !is_code_block { COMMENT_MAX } else { LINE_MAX };
        (columns > columns_max && !is_fixed).then_some((number, columns))
    })
}

fn root_pages(root: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(root).map_err(|error| unreadable(root, &error))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter(|path| has_extension(path, "md")).collect())
}

/// Adds the Rust and Markdown files below a folder.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Failure> {
    for entry in fs::read_dir(folder).map_err(|error| unreadable(folder, &error))? {
        let path = entry.map_err(|error| unreadable(folder, &error))?.path();
        if path.is_dir() {
            let is_skipped =
                path.file_name().is_some_and(|name| SKIPPED.iter().any(|skipped| name == *skipped));
            if !is_skipped {
                collect(&path, files)?;
            }
        } else if is_rust(&path) || has_extension(&path, "md") {
            files.push(path);
        }
    }
    Ok(())
}

fn is_rust(path: &Path) -> bool {
    has_extension(path, "rs")
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension() == Some(OsStr::new(extension))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    format!("cannot read {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widths(text: &str, is_rust: bool) -> Vec<(usize, usize)> {
        wide_lines(text, is_rust).collect()
    }

    #[test]
    fn comments_are_narrower_than_code() {
        let comment = format!("    // {}", "c".repeat(94));
        let code = format!("let a = {:?};", "c".repeat(105));
        assert_eq!(widths(&format!("{comment}\n{code}"), true), [(1, 101)]);
        assert_eq!(widths(&format!("{code}c"), true), []);
        assert_eq!(widths(&format!("{code}ccccc"), true), [(1, 121)]);
    }

    #[test]
    fn tables_and_links_keep_their_width() {
        let long = "m".repeat(121);
        assert_eq!(widths(&long, false), [(1, 121)]);
        assert_eq!(widths(&format!("| {long} |"), false), []);
        assert_eq!(widths(&format!("see https://{long}"), false), []);
        assert_eq!(widths(&format!("// see https://{long}"), true), []);
        assert_eq!(widths(&format!("/// | {long} |"), true), []);
    }

    #[test]
    fn commands_in_pages_keep_their_width_and_code_in_comments_is_code() {
        let long = "m".repeat(121);
        assert_eq!(widths(&format!("```sh\n{long}\n```\n{long}"), false), [(4, 121)]);
        let code = "c".repeat(110);
        assert_eq!(widths(&format!("/// ```\n/// {code}\n/// ```\n/// {code}"), true), [(4, 114)]);
        assert_eq!(widths(&format!("/// ```\nfn a() {{}}\n/// {code}"), true), [(3, 114)]);
    }
}
