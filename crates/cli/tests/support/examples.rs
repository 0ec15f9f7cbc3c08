//! The files of the folder `examples`, adapted to the addresses of a test.

use std::path::PathBuf;

/// Returns the path of a file in the root of the repository.
pub fn in_repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

/// Returns the text of an example.
pub fn example(name: &str) -> String {
    let path = in_repository("examples").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Replaces a text that the example must contain.
pub fn fill(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "{old} is not in {text}");
    text.replace(old, new)
}
