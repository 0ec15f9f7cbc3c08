//! Snapshots: the book in one file of a folder, so that a server starts with the last good rules when their store is gone.
//!
//! A file is a head of 24 bytes (what it is, the version of its format, how long the book is), the book, and the SHA-256
//! of all before it. It gets its name when it is complete and on disk; one that was damaged later is passed over.

use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::book::{Book, EmergencyRow, Kind, Row};

/// How many snapshots are kept. More: more damaged ones can be passed over; more space.
pub const KEPT: usize = 3;

/// What a file begins with.
const MAGIC: &[u8; 12] = b"tidegatebook";

/// Of what is below. A later one is not read by an earlier program.
const FORMAT: u32 = 1;

const HEAD_BYTES: usize = MAGIC.len() + size_of::<u32>() + size_of::<u64>();
const CHECKSUM_BYTES: usize = 32;

/// What names begin and end with; between them is a number that grows with each snapshot.
const PREFIX: &str = "book-";
const SUFFIX: &str = ".snapshot";

/// What a file is called that is not complete.
const UNFINISHED: &str = "unfinished.tmp";

/// A snapshot that cannot be used, and why.
#[derive(Debug)]
pub struct Damaged {
    /// Which.
    pub file: PathBuf,
    /// Why.
    pub why: Damage,
}

/// What is wrong with a snapshot.
#[derive(Debug)]
pub enum Damage {
    /// It cannot be read.
    Read(std::io::Error),
    /// It is something else, or of another format.
    Format,
    /// It is shorter or longer than it says.
    Length {
        /// What it says, bytes.
        wanted: u64,
        /// What there is, bytes.
        found: u64,
    },
    /// It is not what was written.
    Checksum,
    /// It is what was written, but by a program that did it otherwise.
    Contents,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(error) => error.fmt(f),
            Self::Format => write!(f, "is no snapshot of format {FORMAT}"),
            Self::Length { wanted, found } => write!(f, "has {found} bytes of {wanted}"),
            Self::Checksum => f.write_str("has another checksum than it says"),
            Self::Contents => f.write_str("holds something that this version does not write"),
        }
    }
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "snapshot {}: {}", self.file.display(), self.why)
    }
}

impl std::error::Error for Damaged {}

/// What was found in a folder.
#[derive(Debug, Default)]
pub struct LastGood {
    /// The latest book that can be used.
    pub book: Option<Book>,
    /// The file it is in.
    pub file: Option<PathBuf>,
    /// The snapshots after it, which cannot.
    pub skipped: Vec<Damaged>,
}

/// Writes a book to a folder, which is made if need be, and removes all but the last [`KEPT`] snapshots. The folder is
/// one server's own. Gives the file, which is on disk under its name when this returns.
pub fn write(folder: &Path, book: &Book) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(folder)?;
    let earlier = snapshots(folder)?;
    let number = earlier.first().map_or(1, |(number, _)| number.saturating_add(1));
    let unfinished = folder.join(UNFINISHED);
    write_file(File::create(&unfinished)?, book)?;
    // As many digits as the largest number has, so that files are listed in order.
    let file = folder.join(format!("{PREFIX}{number:020}{SUFFIX}"));
    std::fs::rename(&unfinished, &file)?;
    File::open(folder)?.sync_all()?;
    for (_, old) in earlier.iter().skip(KEPT - 1) {
        std::fs::remove_file(old)?;
    }
    Ok(file)
}

/// Reads the latest snapshot that is whole. Without a folder there is none.
pub fn load_last_good(folder: &Path) -> std::io::Result<LastGood> {
    let mut found = LastGood::default();
    let files = match snapshots(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        files => files?,
    };
    for (_, file) in files {
        match std::fs::read(&file).map_err(Damage::Read).and_then(|bytes| read(&bytes)) {
            Ok(book) => {
                (found.book, found.file) = (Some(book), Some(file));
                break;
            }
            Err(why) => found.skipped.push(Damaged { file, why }),
        }
    }
    Ok(found)
}

/// The snapshots of a folder, the latest first.
fn snapshots(folder: &Path) -> std::io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let number = name.and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok());
        found.extend(number.map(|number| (number, path)));
    }
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

fn write_file(file: File, book: &Book) -> std::io::Result<()> {
    let mut to = Hashing { to: BufWriter::with_capacity(1 << 20, file), hasher: Sha256::new() };
    to.write_all(MAGIC)?;
    to.write_all(&FORMAT.to_le_bytes())?;
    to.write_all(&book_bytes(book).to_le_bytes())?;
    write_book(&mut to, book)?;
    let Hashing { mut to, hasher } = to;
    to.write_all(&hasher.finalize())?;
    to.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
}

/// Passes on what is written, and hashes it.
struct Hashing<W> {
    to: W,
    hasher: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hasher.update(bytes.get(..written).unwrap_or(bytes));
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Of a row without its texts, and of an emergency without its own.
const ROW_BYTES: usize = 1 + 3 * size_of::<u32>();
const EMERGENCY_BYTES: usize = 2 * size_of::<u32>() + size_of::<u64>();

/// Exactly what [`write_book`] writes.
fn book_bytes(book: &Book) -> u64 {
    let rows: usize = book.rows.iter().map(|row| ROW_BYTES + row.name.len() + row.body.len()).sum();
    let emergencies = book.emergencies.iter();
    let emergencies: usize = emergencies.map(|row| EMERGENCY_BYTES + row.id.len() + row.body.len()).sum();
    (4 * size_of::<u64>() + rows + emergencies) as u64
}

fn write_book(to: &mut impl Write, book: &Book) -> std::io::Result<()> {
    let (rows, emergencies) = (book.rows.len() as u64, book.emergencies.len() as u64);
    for number in [book.revision, book.emergency_revision, rows, emergencies] {
        to.write_all(&number.to_le_bytes())?;
    }
    for row in &book.rows {
        to.write_all(&[kind_byte(row.kind)])?;
        to.write_all(&row.version.to_le_bytes())?;
        write_text(to, &row.name)?;
        write_text(to, &row.body)?;
    }
    for emergency in &book.emergencies {
        to.write_all(&emergency.expires_ms.to_le_bytes())?;
        write_text(to, &emergency.id)?;
        write_text(to, &emergency.body)?;
    }
    Ok(())
}

fn write_text(to: &mut impl Write, text: &str) -> std::io::Result<()> {
    let length = u32::try_from(text.len()).map_err(std::io::Error::other)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(text.as_bytes())
}

fn kind_byte(kind: Kind) -> u8 {
    match kind {
        Kind::Template => 0,
        Kind::Rule => 1,
        Kind::Override => 2,
    }
}

fn read(bytes: &[u8]) -> Result<Book, Damage> {
    let length = bytes.len() as u64;
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or(Damage::Format)?;
    let mut head = Reader(head);
    if head.take(MAGIC.len()) != Some(MAGIC) || head.number32() != Some(FORMAT) {
        return Err(Damage::Format);
    }
    let book_length = head.number64().ok_or(Damage::Format)?;
    let wanted = book_length.saturating_add((HEAD_BYTES + CHECKSUM_BYTES) as u64);
    if length != wanted {
        return Err(Damage::Length { wanted, found: length });
    }
    let (book, checksum) = rest.split_at_checked(rest.len() - CHECKSUM_BYTES).ok_or(Damage::Format)?;
    let hashed = bytes.get(..HEAD_BYTES + book.len()).ok_or(Damage::Format)?;
    if Sha256::digest(hashed)[..] != *checksum {
        return Err(Damage::Checksum);
    }
    let mut reader = Reader(book);
    let book = reader.book().ok_or(Damage::Contents)?;
    if reader.0.is_empty() { Ok(book) } else { Err(Damage::Contents) }
}

/// Takes what a book is made of from bytes, as long as there are any.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn number32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn number64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.number32()?).ok()?;
        Some(std::str::from_utf8(self.take(length)?).ok()?.to_owned())
    }

    fn book(&mut self) -> Option<Book> {
        let (revision, emergency_revision) = (self.number64()?, self.number64()?);
        let (rows, emergencies) = (self.count(ROW_BYTES)?, self.count(EMERGENCY_BYTES)?);
        let rows = (0..rows).map(|_| self.row()).collect::<Option<_>>()?;
        let emergencies = (0..emergencies).map(|_| self.emergency()).collect::<Option<_>>()?;
        Some(Book { revision, emergency_revision, rows, emergencies })
    }

    /// How many things follow, none of which is smaller than this.
    fn count(&mut self, bytes_min: usize) -> Option<usize> {
        let count = usize::try_from(self.number64()?).ok()?;
        (count <= self.0.len() / bytes_min).then_some(count)
    }

    fn row(&mut self) -> Option<Row> {
        let kind = self.take(1)?.first().copied()?;
        let kind = [Kind::Template, Kind::Rule, Kind::Override]
            .into_iter()
            .find(|known| kind_byte(*known) == kind)?;
        let version = self.number32()?;
        Some(Row { kind, version, name: self.text()?, body: self.text()? })
    }

    fn emergency(&mut self) -> Option<EmergencyRow> {
        let expires_ms = self.number64()?;
        Some(EmergencyRow { expires_ms, id: self.text()?, body: self.text()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn book(revision: u64) -> Book {
        let row = |(kind, name): (Kind, &str)| Row {
            kind,
            name: name.to_owned(),
            body: format!("{{\"limit\": {revision}, \"é\": \"\"}}"),
            version: u32::MAX,
        };
        let rows = [(Kind::Template, "pro"), (Kind::Rule, "per_user"), (Kind::Override, "")];
        let emergency = EmergencyRow { id: "e".to_owned(), body: "{}".to_owned(), expires_ms: u64::MAX };
        Book {
            revision,
            emergency_revision: 9,
            rows: rows.into_iter().map(row).collect(),
            emergencies: vec![emergency],
        }
    }

    fn bytes_of(book: &Book) -> Vec<u8> {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::read(write(folder.path(), book).expect("written")).expect("read")
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("one").file_name().into_string().expect("text")).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn the_latest_book_is_read_as_it_was_written_and_the_last_few_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("made");
        assert!(load_last_good(&inner).expect("no folder").book.is_none());
        // A store that was set back has a lower revision: what was written last counts.
        for revision in [7, 8, 9, 10, 3] {
            std::fs::create_dir_all(&inner).expect("a folder");
            std::fs::write(inner.join(UNFINISHED), "left by one that was killed").expect("written");
            write(&inner, &book(revision)).expect("written");
        }
        let wanted = [3, 4, 5].map(|number| format!("book-{number:020}.snapshot"));
        assert_eq!(names(&inner), wanted);
        std::fs::write(inner.join("book-x.snapshot"), "").expect("written");
        let found = load_last_good(&inner).expect("reads");
        assert_eq!(found.book, Some(book(3)));
        assert!(found.skipped.is_empty());
        write(&inner, &Book::default()).expect("written");
        assert_eq!(load_last_good(&inner).expect("reads").book, Some(Book::default()));
    }

    #[test]
    fn damaged_ones_are_passed_over_and_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let files: Vec<PathBuf> =
            (1..=3).map(|revision| write(folder.path(), &book(revision)).expect("written")).collect();
        let mut flipped = std::fs::read(&files[2]).expect("read");
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(&files[2], flipped).expect("written");
        let whole = std::fs::read(&files[1]).expect("read");
        std::fs::write(&files[1], &whole[..whole.len() - 1]).expect("written");
        let found = load_last_good(folder.path()).expect("reads");
        assert_eq!(found.book, Some(book(1)));
        let said: Vec<String> = found.skipped.iter().map(|damaged| damaged.why.to_string()).collect();
        let length = format!("has {} bytes of {}", whole.len() - 1, whole.len());
        assert_eq!(said, ["has another checksum than it says".to_owned(), length]);
        assert_eq!(found.skipped[0].file, files[2]);
        std::fs::write(&files[0], "something else").expect("written");
        let found = load_last_good(folder.path()).expect("reads");
        assert!(found.book.is_none());
        assert_eq!(found.skipped.len(), 3);
        assert!(found.skipped[2].to_string().ends_with("snapshot: is no snapshot of format 1"));
    }

    #[test]
    fn another_format_is_not_guessed_at() {
        let mut bytes = bytes_of(&book(1));
        bytes[MAGIC.len()] = 2;
        assert!(matches!(read(&bytes), Err(Damage::Format)));
    }

    #[test]
    fn a_book_that_lies_about_itself_under_a_right_checksum_is_refused() {
        let mut bytes = bytes_of(&book(1));
        let end = bytes.len() - CHECKSUM_BYTES;
        // The number of rows.
        bytes[HEAD_BYTES + 16..HEAD_BYTES + 24].copy_from_slice(&u64::MAX.to_le_bytes());
        let checksum = Sha256::digest(&bytes[..end]);
        bytes[end..].copy_from_slice(&checksum);
        assert!(matches!(read(&bytes), Err(Damage::Contents)));
    }

    proptest! {
        #[test]
        fn a_flipped_bit_anywhere_is_found(place in any::<prop::sample::Index>(), bit in 0_u32..8) {
            let mut bytes = bytes_of(&book(1));
            let at = place.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(read(&bytes).is_err());
        }

        #[test]
        fn no_bytes_are_read_out_of_bounds(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            // With a right head and checksum, so that the book itself is reached.
            let mut file = [&MAGIC[..], &FORMAT.to_le_bytes(), &(bytes.len() as u64).to_le_bytes(), &bytes].concat();
            file.extend_from_slice(&Sha256::digest(&file));
            prop_assert!(matches!(read(&file), Ok(_) | Err(Damage::Contents)));
        }
    }
}
