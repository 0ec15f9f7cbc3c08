//! Files and folders that only their owner may read: they hold keys, addresses and hashes of
//! tokens.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Creates a folder, and those above it, if they are missing. Existing ones keep their permissions.
pub fn create_folder(folder: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)
}

/// Creates an empty file if it is missing, for a library that would create it with more
/// permissions. `SQLite` gives its `-wal` and `-shm` files the permissions of the database.
pub fn create_if_missing(file: &Path) -> Result<()> {
    match OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(file) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        created => created.map(drop),
    }
}

/// Creates a file to write, and empties an existing one. An existing file becomes private before
/// the first byte is written: the mode of an `open` applies to new files only.
pub fn create(file: &Path) -> Result<File> {
    let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(FILE_MODE).open(file)?;
    opened.set_permissions(Permissions::from_mode(FILE_MODE))?;
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).expect("there").permissions().mode() & 0o777
    }

    #[test]
    fn new_files_and_folders_are_private_and_existing_ones_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("a/b");
        create_folder(&inner).expect("created");
        assert_eq!([mode(&inner), mode(&folder.path().join("a"))], [FOLDER_MODE; 2]);
        let (empty, written) = (inner.join("empty"), inner.join("written"));
        create_if_missing(&empty).expect("created");
        create(&written).expect("created");
        assert_eq!([mode(&empty), mode(&written)], [FILE_MODE; 2]);
        std::fs::write(&empty, "content").expect("written");
        create_if_missing(&empty).expect("exists");
        assert_eq!(std::fs::read_to_string(&empty).expect("text"), "content");
        let missing = create_if_missing(&inner.join("no/folder")).expect_err("no folder");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn leftover_file_becomes_private_and_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let leftover = folder.path().join("leftover");
        std::fs::write(&leftover, "content").expect("written");
        std::fs::set_permissions(&leftover, Permissions::from_mode(0o644)).expect("set");
        create(&leftover).expect("created");
        assert_eq!(mode(&leftover), FILE_MODE);
        assert_eq!(std::fs::read_to_string(&leftover).expect("text"), "");
    }
}
