//! Snapshots: the rule rows, credentials and a checkpoint of the audit in one file of a folder, or
//! in other storage of named bytes. While the rule store is unavailable, a server can start with
//! the last good rules and credentials. The checkpoint shows later whether the store still has the
//! audit that it had.
//!
//! A file has a head of 24 bytes (magic, format version, length of the contents), the rule rows,
//! the credentials, the checkpoint, and the SHA-256 of everything before. It gets its name when it
//! is complete and on disk. A file that was damaged later is skipped.

use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::audit::Checkpoint;
use crate::private_files;
use crate::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use crate::store::Credential;

/// Number of snapshots kept. More: more damaged ones can be skipped, but they take more space.
pub const SNAPSHOTS_KEPT: usize = 3;

/// First bytes of a file.
const MAGIC: &[u8; 12] = b"tidegatebook";

/// Version of the format. Earlier programs do not read later formats.
const FORMAT: u32 = 3;

/// Of snapshots that have no checkpoint. They are still read.
const FORMAT_WITHOUT_CHECKPOINT: u32 = 2;

/// Of snapshots that have no credentials either. They are still read.
const FORMAT_WITHOUT_CREDENTIALS: u32 = 1;

const HEAD_BYTES: usize = MAGIC.len() + size_of::<u32>() + size_of::<u64>();
const CHECKSUM_BYTES: usize = 32;

/// Prefix of names. The number after it grows with each snapshot.
pub const PREFIX: &str = "book-";

/// Suffix of names.
const SUFFIX: &str = ".snapshot";

/// Name of an incomplete file.
const UNFINISHED: &str = "unfinished.tmp";

/// The data that a server needs to start without its rule store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The rules.
    pub rule_rows: RuleRows,
    /// Credentials, with the hashes of tokens only.
    pub credentials: Arc<[Credential]>,
    /// A checkpoint that the audit of the store passed through.
    pub checkpoint: Option<Checkpoint>,
}

/// A snapshot that cannot be used, and why.
#[derive(Debug)]
pub struct DamagedSnapshot {
    /// Which.
    pub file: PathBuf,
    /// Why.
    pub why: Damage,
}

/// Reason why a snapshot cannot be used.
#[derive(Debug)]
pub enum Damage {
    /// It cannot be read.
    Read(std::io::Error),
    /// It is not a snapshot, or has an unknown format.
    Format,
    /// Its length is not the stated one.
    Length {
        /// Stated length, in bytes.
        wanted: u64,
        /// Actual length, in bytes.
        found: u64,
    },
    /// Its bytes do not match the checksum.
    Checksum,
    /// The checksum matches, but a program with another encoding wrote the contents.
    Contents,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(error) => error.fmt(f),
            Self::Format => write!(f, "not a snapshot of a format from 1 to {FORMAT}"),
            Self::Length { wanted, found } => write!(f, "{found} bytes, expected {wanted}"),
            Self::Checksum => f.write_str("the checksum does not match the contents"),
            Self::Contents => f.write_str("the contents are not supported by this version"),
        }
    }
}

impl fmt::Display for DamagedSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "snapshot {}: {}", self.file.display(), self.why)
    }
}

impl std::error::Error for DamagedSnapshot {}

/// Result of a search in a folder.
#[derive(Debug, Default)]
pub struct LastGoodSnapshot {
    /// The latest that can be used.
    pub snapshot: Option<Snapshot>,
    /// The file it is in.
    pub file: Option<PathBuf>,
    /// The snapshots after it, which cannot.
    pub skipped: Vec<DamagedSnapshot>,
}

/// Writes a snapshot to a folder, which is made if need be, and removes all but the last
/// [`SNAPSHOTS_KEPT`]. The folder is one server's own. Gives the file, which is on disk under its
/// name when this returns.
pub fn write(folder: &Path, snapshot: &Snapshot) -> std::io::Result<PathBuf> {
    private_files::create_folder(folder)?;
    let earlier = snapshots(folder)?;
    let number = earlier.first().map_or(1, |(number, _)| number.saturating_add(1));
    let unfinished = folder.join(UNFINISHED);
    let written =
        write_whole(BufWriter::with_capacity(1 << 20, private_files::create(&unfinished)?), snapshot)?;
    written.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    let file = folder.join(name_of(number));
    std::fs::rename(&unfinished, &file)?;
    File::open(folder)?.sync_all()?;
    for (_, old) in earlier.iter().skip(SNAPSHOTS_KEPT - 1) {
        std::fs::remove_file(old)?;
    }
    Ok(file)
}

/// Reads the latest intact snapshot. A missing folder has none.
pub fn load_last_good(folder: &Path) -> std::io::Result<LastGoodSnapshot> {
    let mut found = LastGoodSnapshot::default();
    let files = match snapshots(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        files => files?,
    };
    for (_, file) in files {
        match std::fs::read(&file).map_err(Damage::Read).and_then(|bytes| decode(&bytes)) {
            Ok(snapshot) => {
                (found.snapshot, found.file) = (Some(snapshot), Some(file));
                break;
            }
            Err(why) => found.skipped.push(DamagedSnapshot { file, why }),
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
        let number = name.and_then(number_of);
        found.extend(number.map(|number| (number, path)));
    }
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

/// Returns the name of the snapshot with this number.
pub fn name_of(number: u64) -> String {
    // Padded to the digits of the largest number, so that names sort in order.
    format!("{PREFIX}{number:020}{SUFFIX}")
}

/// Returns the number in the name of a snapshot; `None` for another name.
pub fn number_of(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()
}

/// The bytes of a snapshot.
pub fn encode(snapshot: &Snapshot) -> Vec<u8> {
    // Writes to memory do not fail, and all texts of a store fit the length field.
    write_whole(Vec::new(), snapshot).unwrap_or_default()
}

fn write_whole<W: Write>(to: W, snapshot: &Snapshot) -> std::io::Result<W> {
    let Snapshot { rule_rows, credentials, checkpoint } = snapshot;
    let checkpoint = checkpoint.as_ref().map(Checkpoint::to_string).unwrap_or_default();
    let bytes = rule_rows_bytes(rule_rows) + credentials_bytes(credentials) + text_bytes(&checkpoint);
    let mut to = HashingWriter { to, hasher: Sha256::new() };
    to.write_all(MAGIC)?;
    to.write_all(&FORMAT.to_le_bytes())?;
    to.write_all(&bytes.to_le_bytes())?;
    write_rule_rows(&mut to, rule_rows)?;
    write_credentials(&mut to, credentials)?;
    write_text(&mut to, &checkpoint)?;
    let HashingWriter { mut to, hasher } = to;
    to.write_all(&hasher.finalize())?;
    Ok(to)
}

/// Hashes the bytes that it forwards.
struct HashingWriter<W> {
    to: W,
    hasher: Sha256,
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hasher.update(bytes.get(..written).unwrap_or(bytes));
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Of a row without its texts, of an emergency without its own, and of a credential.
const ROW_BYTES: usize = 1 + 3 * size_of::<u32>();
const EMERGENCY_BYTES: usize = 2 * size_of::<u32>() + size_of::<u64>();
const CREDENTIAL_BYTES: usize = 4 * size_of::<u32>() + 1 + 2 * size_of::<u64>();

/// Returns the exact number of bytes that [`write_rule_rows`] writes.
fn rule_rows_bytes(rule_rows: &RuleRows) -> u64 {
    let rows: usize = rule_rows.rows.iter().map(|row| ROW_BYTES + row.name.len() + row.body.len()).sum();
    let emergencies = rule_rows.emergencies.iter();
    let emergencies: usize = emergencies.map(|row| EMERGENCY_BYTES + row.id.len() + row.body.len()).sum();
    (4 * size_of::<u64>() + rows + emergencies) as u64
}

fn write_rule_rows(to: &mut impl Write, rule_rows: &RuleRows) -> std::io::Result<()> {
    let (rows, emergencies) = (rule_rows.rows.len() as u64, rule_rows.emergencies.len() as u64);
    for number in [rule_rows.revision, rule_rows.emergency_revision, rows, emergencies] {
        to.write_all(&number.to_le_bytes())?;
    }
    for row in &*rule_rows.rows {
        to.write_all(&[kind_byte(row.kind)])?;
        to.write_all(&row.version.to_le_bytes())?;
        write_text(to, &row.name)?;
        write_text(to, &row.body)?;
    }
    for emergency in &rule_rows.emergencies {
        to.write_all(&emergency.expires_ms.to_le_bytes())?;
        write_text(to, &emergency.id)?;
        write_text(to, &emergency.body)?;
    }
    Ok(())
}

/// Returns the exact number of bytes that [`write_credentials`] writes.
fn credentials_bytes(credentials: &[Credential]) -> u64 {
    let texts = |credential: &Credential| texts_of(credential).map(str::len).iter().sum::<usize>();
    let all: usize = credentials.iter().map(|credential| CREDENTIAL_BYTES + texts(credential)).sum();
    (size_of::<u64>() + all) as u64
}

fn write_credentials(to: &mut impl Write, credentials: &[Credential]) -> std::io::Result<()> {
    to.write_all(&(credentials.len() as u64).to_le_bytes())?;
    for credential in credentials {
        to.write_all(&credential.created_ms.to_le_bytes())?;
        to.write_all(&[u8::from(credential.expires_ms.is_some())])?;
        to.write_all(&credential.expires_ms.unwrap_or_default().to_le_bytes())?;
        for text in texts_of(credential) {
            write_text(to, text)?;
        }
    }
    Ok(())
}

fn texts_of(credential: &Credential) -> [&str; 4] {
    let Credential { hash, name, tenant, role, created_ms: _, expires_ms: _ } = credential;
    [hash, name, tenant, role]
}

/// Returns the exact number of bytes that [`write_text`] writes.
fn text_bytes(text: &str) -> u64 {
    (size_of::<u32>() + text.len()) as u64
}

fn write_text(to: &mut impl Write, text: &str) -> std::io::Result<()> {
    let length = u32::try_from(text.len()).map_err(std::io::Error::other)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(text.as_bytes())
}

fn kind_byte(kind: RowKind) -> u8 {
    match kind {
        RowKind::Template => 0,
        RowKind::Rule => 1,
        RowKind::Override => 2,
    }
}

/// Decodes the bytes of a snapshot, if they are intact.
pub fn decode(bytes: &[u8]) -> Result<Snapshot, Damage> {
    let length = bytes.len() as u64;
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or(Damage::Format)?;
    let mut head = Reader(head);
    if head.take(MAGIC.len()) != Some(MAGIC) {
        return Err(Damage::Format);
    }
    let format = head.number32().filter(|format| (FORMAT_WITHOUT_CREDENTIALS..=FORMAT).contains(format));
    let format = format.ok_or(Damage::Format)?;
    let contents_length = head.number64().ok_or(Damage::Format)?;
    let wanted = contents_length.saturating_add((HEAD_BYTES + CHECKSUM_BYTES) as u64);
    if length != wanted {
        return Err(Damage::Length { wanted, found: length });
    }
    let (contents, checksum) = rest.split_at_checked(rest.len() - CHECKSUM_BYTES).ok_or(Damage::Format)?;
    let hashed = bytes.get(..HEAD_BYTES + contents.len()).ok_or(Damage::Format)?;
    if Sha256::digest(hashed)[..] != *checksum {
        return Err(Damage::Checksum);
    }
    let mut reader = Reader(contents);
    let snapshot = reader.snapshot(format).ok_or(Damage::Contents)?;
    if reader.0.is_empty() { Ok(snapshot) } else { Err(Damage::Contents) }
}

/// Reads the fields of a snapshot, within the bounds of the bytes.
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

    fn snapshot(&mut self, format: u32) -> Option<Snapshot> {
        let rule_rows = self.rule_rows()?;
        let has_credentials = format >= FORMAT_WITHOUT_CHECKPOINT;
        let credentials = if has_credentials { self.credentials()? } else { [].into() };
        let text = if format == FORMAT { self.text()? } else { String::new() };
        let checkpoint = if text.is_empty() { None } else { Some(text.parse().ok()?) };
        Some(Snapshot { rule_rows, credentials, checkpoint })
    }

    fn rule_rows(&mut self) -> Option<RuleRows> {
        let (revision, emergency_revision) = (self.number64()?, self.number64()?);
        let (rows, emergencies) = (self.count(ROW_BYTES)?, self.count(EMERGENCY_BYTES)?);
        let rows = (0..rows).map(|_| self.row()).collect::<Option<_>>()?;
        let emergencies = (0..emergencies).map(|_| self.emergency()).collect::<Option<_>>()?;
        // The store counts changes of overrides. With 0, all of them are read again.
        Some(RuleRows { revision, emergency_revision, override_revision: 0, rows, emergencies })
    }

    /// Reads the number of items that follow. Refuses a number that does not fit, given the minimum
    /// size of an item.
    fn count(&mut self, bytes_min: usize) -> Option<usize> {
        let count = usize::try_from(self.number64()?).ok()?;
        (count <= self.0.len() / bytes_min).then_some(count)
    }

    fn row(&mut self) -> Option<RuleRow> {
        let kind = self.take(1)?.first().copied()?;
        let kind = [RowKind::Template, RowKind::Rule, RowKind::Override]
            .into_iter()
            .find(|known| kind_byte(*known) == kind)?;
        let version = self.number32()?;
        Some(RuleRow { kind, version, name: self.text()?, body: self.text()? })
    }

    fn emergency(&mut self) -> Option<EmergencyRow> {
        let expires_ms = self.number64()?;
        Some(EmergencyRow { expires_ms, id: self.text()?, body: self.text()? })
    }

    fn credentials(&mut self) -> Option<Arc<[Credential]>> {
        let count = self.count(CREDENTIAL_BYTES)?;
        (0..count).map(|_| self.credential()).collect()
    }

    fn credential(&mut self) -> Option<Credential> {
        let created_ms = self.number64()?;
        let expires = self.take(1)?.first().copied()?;
        let expires_ms = self.number64()?;
        let expires_ms = match expires {
            0 => None,
            1 => Some(expires_ms),
            _ => return None,
        };
        let (hash, name) = (self.text()?, self.text()?);
        Some(Credential { hash, name, tenant: self.text()?, role: self.text()?, created_ms, expires_ms })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn snapshot(revision: u64) -> Snapshot {
        let credential = |name: &str, expires_ms| Credential {
            hash: "0a".repeat(32),
            name: name.to_owned(),
            tenant: String::new(),
            role: "viewer".to_owned(),
            created_ms: 7,
            expires_ms,
        };
        let credentials = [credential("ci", None), credential("é", Some(u64::MAX))].into();
        let checkpoint = Some(Checkpoint { count: 7, hash: "0b".repeat(32) });
        Snapshot { rule_rows: rule_rows(revision), credentials, checkpoint }
    }

    fn rule_rows(revision: u64) -> RuleRows {
        let row = |(kind, name): (RowKind, &str)| RuleRow {
            kind,
            name: name.to_owned(),
            body: format!("{{\"limit\": {revision}, \"é\": \"\"}}"),
            version: u32::MAX,
        };
        let rows = [(RowKind::Template, "pro"), (RowKind::Rule, "per_user"), (RowKind::Override, "")];
        let emergency = EmergencyRow { id: "e".to_owned(), body: "{}".to_owned(), expires_ms: u64::MAX };
        RuleRows {
            revision,
            emergency_revision: 9,
            override_revision: 0,
            rows: rows.into_iter().map(row).collect(),
            emergencies: vec![emergency],
        }
    }

    fn bytes_of(snapshot: &Snapshot) -> Vec<u8> {
        let folder = tempfile::tempdir().expect("a folder");
        let bytes = std::fs::read(write(folder.path(), snapshot).expect("written")).expect("read");
        assert_eq!(bytes, encode(snapshot), "the file contains the encoded snapshot");
        bytes
    }

    /// Right again, after it was changed.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let end = bytes.len() - CHECKSUM_BYTES;
        let checksum = Sha256::digest(&bytes[..end]);
        bytes[end..].copy_from_slice(&checksum);
        bytes
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("one").file_name().into_string().expect("text")).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn latest_snapshot_is_read_and_the_last_few_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("made");
        assert!(load_last_good(&inner).expect("no folder").snapshot.is_none());
        // A store restored to an earlier state has a lower revision: the snapshot written last
        // counts.
        for revision in [7, 8, 9, 10, 3] {
            std::fs::create_dir_all(&inner).expect("a folder");
            std::fs::write(inner.join(UNFINISHED), "a temporary file of a killed writer").expect("written");
            write(&inner, &snapshot(revision)).expect("written");
        }
        let wanted = [3, 4, 5].map(|number| format!("book-{number:020}.snapshot"));
        assert_eq!(names(&inner), wanted);
        std::fs::write(inner.join("book-x.snapshot"), "").expect("written");
        let found = load_last_good(&inner).expect("reads");
        assert_eq!(found.snapshot, Some(snapshot(3)));
        assert!(found.skipped.is_empty());
        write(&inner, &Snapshot::default()).expect("written");
        assert_eq!(load_last_good(&inner).expect("reads").snapshot, Some(Snapshot::default()));
    }

    #[test]
    fn damaged_ones_are_passed_over_and_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let files: Vec<PathBuf> =
            (1..=3).map(|revision| write(folder.path(), &snapshot(revision)).expect("written")).collect();
        let mut flipped = std::fs::read(&files[2]).expect("read");
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(&files[2], flipped).expect("written");
        let whole = std::fs::read(&files[1]).expect("read");
        std::fs::write(&files[1], &whole[..whole.len() - 1]).expect("written");
        let found = load_last_good(folder.path()).expect("reads");
        assert_eq!(found.snapshot, Some(snapshot(1)));
        let reasons: Vec<String> = found.skipped.iter().map(|damaged| damaged.why.to_string()).collect();
        let length = format!("{} bytes, expected {}", whole.len() - 1, whole.len());
        assert_eq!(reasons, ["the checksum does not match the contents".to_owned(), length]);
        assert_eq!(found.skipped[0].file, files[2]);
        std::fs::write(&files[0], "something else").expect("written");
        let found = load_last_good(folder.path()).expect("reads");
        assert!(found.snapshot.is_none());
        assert_eq!(found.skipped.len(), 3);
        assert!(found.skipped[2].to_string().ends_with("snapshot: not a snapshot of a format from 1 to 3"));
    }

    #[test]
    fn another_format_is_not_guessed_at() {
        let mut bytes = bytes_of(&snapshot(1));
        bytes[MAGIC.len()] = 4;
        assert!(matches!(decode(&bytes), Err(Damage::Format)));
    }

    #[test]
    fn snapshot_format_without_credentials_is_read() {
        let contents = &bytes_of(&snapshot(1))[HEAD_BYTES..];
        let rule_rows_bytes = usize::try_from(rule_rows_bytes(&rule_rows(1))).expect("small");
        let head =
            [&MAGIC[..], &FORMAT_WITHOUT_CREDENTIALS.to_le_bytes(), &rule_rows_bytes.to_le_bytes()].concat();
        let bytes = sealed([&head, &contents[..rule_rows_bytes], &[0; CHECKSUM_BYTES]].concat());
        assert_eq!(
            decode(&bytes).expect("whole"),
            Snapshot { rule_rows: rule_rows(1), ..Snapshot::default() }
        );
        let with_more = [&head, &contents[..rule_rows_bytes], &[0; 8 + CHECKSUM_BYTES]].concat();
        assert!(matches!(decode(&sealed(with_more)), Err(Damage::Length { .. })));
    }

    #[test]
    fn snapshot_format_without_a_checkpoint_is_read() {
        let wanted = Snapshot { checkpoint: None, ..snapshot(1) };
        let bytes = bytes_of(&wanted);
        let end = bytes.len() - CHECKSUM_BYTES - size_of::<u32>();
        let length = (end - HEAD_BYTES) as u64;
        let head = [&MAGIC[..], &FORMAT_WITHOUT_CHECKPOINT.to_le_bytes(), &length.to_le_bytes()].concat();
        let earlier = sealed([&head, &bytes[HEAD_BYTES..end], &[0; CHECKSUM_BYTES]].concat());
        assert_eq!(decode(&earlier).expect("whole"), wanted);
    }

    #[test]
    fn inconsistent_snapshot_with_a_valid_checksum_is_refused() {
        let mut bytes = bytes_of(&snapshot(1));
        // The number of rows.
        bytes[HEAD_BYTES + 16..HEAD_BYTES + 24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(decode(&sealed(bytes)), Err(Damage::Contents)));
    }

    proptest! {
        #[test]
        fn a_flipped_bit_anywhere_is_found(place in any::<prop::sample::Index>(), bit in 0_u32..8) {
            let mut bytes = bytes_of(&snapshot(1));
            let at = place.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(decode(&bytes).is_err());
        }

        #[test]
        fn no_bytes_are_read_out_of_bounds(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            // With a valid head and checksum, so that decoding reaches the contents.
            let mut file = [&MAGIC[..], &FORMAT.to_le_bytes(), &(bytes.len() as u64).to_le_bytes(), &bytes].concat();
            file.extend_from_slice(&Sha256::digest(&file));
            prop_assert!(matches!(decode(&file), Ok(_) | Err(Damage::Contents)));
        }
    }
}
