//! Checks of every page of the documentation.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Failure;

/// Suffix of a placeholder for a figure that is not measured yet.
const PLACEHOLDER: &str = "_FIGURES";

/// Every place of the pages below `root` that waits for a figure: a page, a line and the word.
pub(crate) fn placeholders(root: &Path) -> Result<Vec<String>, Failure> {
    let mut found = Vec::new();
    for page in pages(root)? {
        let text = fs::read_to_string(&page).map_err(|error| format!("{}: {error}", page.display()))?;
        let places = placeholders_in(&text).into_iter();
        found.extend(places.map(|(line, word)| format!("{}:{line}: {word}", page.display())));
    }
    Ok(found)
}

/// The pages: those of `docs`, and those beside it.
fn pages(root: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut pages = Vec::new();
    for folder in [root.to_owned(), root.join("docs")] {
        let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries {
            let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
            if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    Ok(pages)
}

/// Words such as `RULES_FIGURES`, with the number of the line.
fn placeholders_in(text: &str) -> Vec<(usize, &str)> {
    let lines = (1..).zip(text.lines());
    lines
        .flat_map(|(number, line)| words(line).map(move |word| (number, word)))
        .filter(is_placeholder)
        .collect()
}

/// Splits a line into words of capital letters and underscores.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_ascii_uppercase() || c == '_'))
}

fn is_placeholder((_, word): &(usize, &str)) -> bool {
    word.strip_suffix(PLACEHOLDER).is_some_and(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_found_with_their_lines() {
        let text = "one\n\nRULES_STORE_FIGURES\n_FIGURES and `A_FIGURES`, figures, FIGURES\n";
        assert_eq!(placeholders_in(text), [(3, "RULES_STORE_FIGURES"), (4, "A_FIGURES")]);
    }

    #[test]
    fn no_page_waits_for_a_figure() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace");
        assert!(pages(root).expect("pages").len() > 10, "the pages were not found");
        assert_eq!(placeholders(root), Ok(Vec::new()));
    }
}
