//! The book of the documentation: its pages, their links, and the build.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::command;
use crate::metadata::Project;
use crate::tools;

/// The page that lists the chapters of the book.
const SUMMARY: &str = "SUMMARY.md";

/// The ending of a word that stands for a figure which is not measured yet.
const PLACEHOLDER: &str = "_FIGURES";

/// Checks the pages, and builds the book into the folder `book` of the target folder.
pub(crate) fn run(project: &Project) -> Result<(), Failure> {
    let problems = problems(&project.root)?;
    for problem in &problems {
        println!("docs: {problem}");
    }
    if !problems.is_empty() {
        return Err(format!("docs: the pages have {} problems", problems.len()));
    }
    let book = project.target_dir.join("book");
    build(project, &book)?;
    add_examples(&project.root.join("examples"), &book)?;
    println!("docs: {}", book.join("index.html").display());
    Ok(())
}

fn build(project: &Project, book: &Path) -> Result<(), Failure> {
    let mdbook = tools::mdbook(project)?;
    command::run(Command::new(mdbook).arg("build").arg(&project.root).arg("--dest-dir").arg(book))
}

/// Copies the examples into the book. They lie beside `docs`, so mdBook does not copy them.
fn add_examples(examples: &Path, book: &Path) -> Result<(), Failure> {
    let copies = book.join("examples");
    fs::create_dir_all(&copies).map_err(|error| failure(&copies, &error))?;
    for example in files(examples)? {
        let copy = copies.join(example.file_name().unwrap_or_default());
        fs::copy(&example, &copy).map_err(|error| failure(&example, &error))?;
    }
    for page in files(book)?.iter().filter(|file| has_extension(file, "html")) {
        let html = read(page)?.replace("href=\"../examples/", "href=\"examples/");
        fs::write(page, html).map_err(|error| failure(page, &error))?;
    }
    Ok(())
}

/// Returns every problem of the pages in `root` and in its folder `docs`: a broken link, a page
/// that the summary omits, a figure that is missing.
fn problems(root: &Path) -> Result<Vec<String>, Failure> {
    let docs = root.join("docs");
    let mut problems = Vec::new();
    for path in pages(root)?.into_iter().chain(pages(&docs)?) {
        let page = Page { text: read(&path)?, path };
        let is_in_book = page.folder() == docs;
        let found = page.links().filter_map(|(line, link)| Some((line, link.problem(&page, is_in_book)?)));
        let found = found.chain(page.placeholders());
        problems.extend(found.map(|(line, problem)| format!("{}:{line}: {problem}", page.path.display())));
    }
    problems.extend(omitted_pages(&docs)?);
    Ok(problems)
}

/// Returns a problem for each page that the summary does not link.
fn omitted_pages(docs: &Path) -> Result<Vec<String>, Failure> {
    let path = docs.join(SUMMARY);
    let summary = Page { text: read(&path)?, path };
    let chapters: Vec<&str> = summary.links().map(|(_, link)| link.path).collect();
    let names = pages(docs)?.into_iter().filter_map(|page| Some(page.file_name()?.to_str()?.to_owned()));
    let omitted = names.filter(|name| name != SUMMARY && !chapters.contains(&name.as_str()));
    Ok(omitted.map(|name| format!("{}: {name} is missing", summary.path.display())).collect())
}

/// A page, with its text in Markdown.
struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Returns the relative links, each with its line.
    fn links(&self) -> impl Iterator<Item = (usize, Link<'_>)> {
        let lines = prose(&self.text);
        let targets = lines.flat_map(|(number, line)| targets(line).map(move |target| (number, target)));
        targets.filter_map(|(number, target)| Some((number, Link::new(target)?)))
    }

    /// Returns the anchors of all headings. A repeated one is numbered, as on GitHub.
    fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        for heading in prose(&self.text).filter_map(|(_, line)| heading(line)) {
            let slug = slug(heading);
            let numbered = (1..).map(|number| format!("{slug}-{number}"));
            let mut candidates = std::iter::once(slug.clone()).chain(numbered);
            anchors.extend(candidates.find(|candidate| !anchors.contains(candidate)));
        }
        anchors
    }

    /// Returns the words that stand for missing figures, each with its line.
    fn placeholders(&self) -> impl Iterator<Item = (usize, String)> {
        let words = (1..).zip(self.text.lines()).flat_map(|(number, line)| {
            line.split(|c: char| !(c.is_ascii_uppercase() || c == '_')).map(move |word| (number, word))
        });
        words
            .filter(|(_, word)| word.strip_suffix(PLACEHOLDER).is_some_and(|name| !name.is_empty()))
            .map(|(number, word)| (number, format!("{word} is not measured")))
    }
}

/// A link to a file, to an anchor of a page, or to both.
#[derive(Debug, PartialEq, Eq)]
struct Link<'t> {
    path: &'t str,
    anchor: Option<&'t str>,
}

impl<'t> Link<'t> {
    /// Returns `None` for an address on the network.
    fn new(target: &'t str) -> Option<Self> {
        if target.contains("://") || target.starts_with("mailto:") {
            return None;
        }
        let (path, anchor) =
            target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
        Some(Self { path, anchor })
    }

    fn problem(&self, page: &Page, is_in_book: bool) -> Option<String> {
        let target = if self.path.is_empty() { page.path.clone() } else { page.folder().join(self.path) };
        if !target.exists() {
            return Some(format!("{} does not exist", self.path));
        }
        if is_in_book && self.path.contains('/') && !self.path.starts_with("../examples/") {
            return Some(format!("{} is not part of the book", self.path));
        }
        let anchor = self.anchor?;
        let anchors = read(&target).map(|text| Page { path: target, text }.anchors());
        let is_known = anchors.is_ok_and(|anchors| anchors.iter().any(|known| known == anchor));
        (!is_known).then(|| format!("{}#{anchor} is not a heading", self.path))
    }
}

/// Returns the lines outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence = None;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let line = line.trim_start();
        match fence {
            None => fence = ["```", "~~~"].into_iter().find(|fence| line.starts_with(fence)),
            Some(open) if line.trim_end() == open => {
                fence = None;
                return false;
            }
            Some(_) => {}
        }
        fence.is_none()
    })
}

/// Returns the targets of the links in a line, except those in code spans.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let is_in_code = move |at: usize| !line[..at].matches('`').count().is_multiple_of(2);
    let inline =
        line.match_indices("](").filter(move |(at, _)| !is_in_code(*at)).map(|(at, _)| &line[at + 2..]);
    let inline = inline.filter_map(|rest| Some(rest.split_once(')')?.0));
    let definition = line.strip_prefix('[').and_then(|rest| Some(rest.split_once("]: ")?.1));
    inline.chain(definition).filter_map(|target| target.split_whitespace().next())
}

fn heading(line: &str) -> Option<&str> {
    let text = line.trim_start_matches('#');
    (1..=6).contains(&(line.len() - text.len())).then(|| text.strip_prefix(' ')).flatten()
}

/// Returns the anchor of a heading, as GitHub and mdBook form it.
fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Returns the pages of a folder, in order.
fn pages(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    Ok(files(folder)?.into_iter().filter(|file| has_extension(file, "md")).collect())
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| failure(folder, &error))?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    Ok(files)
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| failure(path, &error))
}

fn failure(path: &Path, error: &std::io::Error) -> Failure {
    format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository in a temporary folder, which is removed with it.
    struct Repository(PathBuf);

    impl Repository {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("tidegate-docs-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }

        /// Returns the problems, without the folder of the repository.
        fn problems(&self) -> Vec<String> {
            let root = format!("{}/", self.0.display());
            problems(&self.0).unwrap().iter().map(|problem| problem.replace(&root, "")).collect()
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn page(text: &str) -> Page {
        Page { path: PathBuf::from("page.md"), text: text.to_owned() }
    }

    #[test]
    fn broken_links_are_reported_with_their_lines() {
        let repository = Repository::new(
            "broken",
            &[
                ("README.md", "[a](docs/a.md#one) [b](docs/b.md)\n\n[no](docs/a.md#two) [no](LICENSE)\n"),
                ("docs/SUMMARY.md", "- [A](a.md)\n"),
                (
                    "docs/a.md",
                    "# One\n[self](#one) [no](#two) [e](../examples/e.toml)\n[out](../README.md)\n",
                ),
                ("docs/b.md", "[web](https://example.com/no) `[code](no.md)`\n```\n[code](no.md)\n```\n"),
                ("examples/e.toml", ""),
            ],
        );
        let expected = [
            "README.md:3: docs/a.md#two is not a heading",
            "README.md:3: LICENSE does not exist",
            "docs/a.md:2: #two is not a heading",
            "docs/a.md:3: ../README.md is not part of the book",
            "docs/SUMMARY.md: b.md is missing",
        ];
        assert_eq!(repository.problems(), expected);
    }

    #[test]
    fn placeholders_are_reported_with_their_lines() {
        let text = "one\n\nRULES_STORE_FIGURES\n_FIGURES and `A_FIGURES`, figures, FIGURES\n";
        let page = page(text);
        let found: Vec<(usize, String)> = page.placeholders().collect();
        let expected = [(3, "RULES_STORE_FIGURES is not measured"), (4, "A_FIGURES is not measured")];
        assert_eq!(found, expected.map(|(line, problem)| (line, problem.to_owned())));
    }

    #[test]
    fn anchors_follow_github() {
        let text = "# `POST /v1/check`, and more\n## Same\n### Same\n# A_b-c\n#no\n```sh\n# not a \
            heading\n```\n## Same\n";
        let expected = ["post-v1check-and-more", "same", "same-1", "a_b-c", "same-2"];
        assert_eq!(page(text).anchors(), expected);
    }

    #[test]
    fn links_are_found_in_text_images_and_definitions() {
        let page =
            page("![i](a.png) [`code`](b.md#x \"title\")\n[c]: c.md\n[d](mailto:a@b) `[e](e.md)` [f](#g)\n");
        let found: Vec<(usize, Link<'_>)> = page.links().collect();
        let link = |path, anchor| Link { path, anchor };
        let expected = [
            (1, link("a.png", None)),
            (1, link("b.md", Some("x"))),
            (2, link("c.md", None)),
            (3, link("", Some("g"))),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn examples_become_part_of_the_book() {
        let link = "<a href=\"../examples/e.toml\">e</a>";
        let repository =
            Repository::new("examples", &[("examples/e.toml", "a = 1"), ("book/page.html", link)]);
        let book = repository.0.join("book");
        add_examples(&repository.0.join("examples"), &book).unwrap();
        assert_eq!(fs::read_to_string(book.join("examples/e.toml")).unwrap(), "a = 1");
        let html = fs::read_to_string(book.join("page.html")).unwrap();
        assert_eq!(html, "<a href=\"examples/e.toml\">e</a>");
    }

    #[test]
    fn the_pages_of_this_repository_have_no_problem() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace");
        assert!(pages(&root.join("docs")).expect("pages").len() > 10, "the pages were not found");
        assert_eq!(problems(root), Ok(Vec::new()));
    }
}
