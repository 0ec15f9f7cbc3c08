//! Queries of the decision log.

use std::collections::BTreeSet;
use std::path::Path;

use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Connection, Row};

use crate::block::{SearchTerms, has_term, is_about, unpack};
use crate::entry::{DecisionRecord, RecordKey, RecordVerdict};
use crate::layout::{StoredDecision, records};
use crate::store::{LogError, open_to_read, signed, unsigned};

/// Maximum number of records in one answer.
pub const RECORDS_MAX: usize = 100;

/// Records that a search for similar keys scans at most. More: finds rarer keys; takes longer.
const SIMILAR_SCANNED_MAX: usize = 100_000;

/// The decision log, opened for queries. Queries run while the log is written.
#[derive(Debug)]
pub struct Archive {
    connection: SqliteConnection,
}

/// A query for the decisions about a key.
#[derive(Clone, Debug)]
pub struct WhyQuery<'q> {
    /// Tenant of the key.
    pub tenant: &'q str,
    /// The key that was counted, or any of the request's dimensions, such as `user:42`.
    pub key: &'q str,
    /// When, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// How far before and after that.
    pub window_ms: u64,
    /// Maximum number of records to return, up to [`RECORDS_MAX`].
    pub records: usize,
}

/// The time span of a block.
#[derive(Clone, Copy, Debug)]
struct BlockSpan {
    id: i64,
    from_ms: u64,
    to_ms: u64,
}

impl BlockSpan {
    fn distance_ms(&self, at_ms: u64) -> u64 {
        self.from_ms.saturating_sub(at_ms).max(at_ms.saturating_sub(self.to_ms))
    }
}

/// A block, unpacked.
struct UnpackedBlock {
    raw: Vec<u8>,
    region: String,
    node: String,
    sample_rate: f64,
}

impl UnpackedBlock {
    fn read(id: i64, row: &SqliteRow) -> Result<Self, LogError> {
        Ok(Self {
            raw: unpack(row.try_get("body")?).ok_or(LogError::Block(id))?,
            region: row.try_get("region")?,
            node: row.try_get("node")?,
            sample_rate: row.try_get("sample_rate")?,
        })
    }

    fn record(&self, written: StoredDecision<'_>) -> DecisionRecord {
        written.to_record(&self.region, &self.node, self.sample_rate)
    }
}

/// Keys that contain a text.
struct SimilarKeys<'q> {
    text: &'q str,
    suffix: String,
    most: usize,
    /// Keys whose value is the text.
    exact: BTreeSet<String>,
    other: BTreeSet<String>,
}

impl<'q> SimilarKeys<'q> {
    fn new(text: &'q str, most: usize) -> Self {
        let suffix = format!(":{text}");
        Self { text, suffix, most, exact: BTreeSet::new(), other: BTreeSet::new() }
    }

    fn is_full(&self) -> bool {
        self.exact.len() >= self.most
    }

    /// Takes the key of a record, and each dimension as a key has it.
    fn take(&mut self, written: &StoredDecision<'_>) {
        let dimensions = written.dimensions.iter().filter_map(|(_, text)| str::from_utf8(text).ok());
        for key in dimensions.chain([written.entry.key]) {
            let is_exact = key.ends_with(&self.suffix) && !key.contains(',');
            let found = if is_exact { &mut self.exact } else { &mut self.other };
            if (is_exact || key.contains(self.text)) && found.len() < self.most && !found.contains(key) {
                found.insert(key.to_owned());
            }
        }
    }

    fn into_keys(self) -> Vec<String> {
        self.exact.into_iter().chain(self.other).take(self.most).collect()
    }
}

impl Archive {
    /// Opens the log in `folder`.
    pub async fn open(folder: &Path) -> Result<Self, LogError> {
        Ok(Self { connection: open_to_read(folder).await? })
    }

    /// Returns the records about a key around a time. Denials come first, then shadow denials, then
    /// allowed requests; within each group, the nearest first.
    pub async fn why(&mut self, why: &WhyQuery<'_>) -> Result<Vec<DecisionRecord>, LogError> {
        let most = why.records.clamp(1, RECORDS_MAX);
        let key = RecordKey::of(why.key);
        let term = SearchTerms::new(why.tenant).of(key.as_str().as_bytes());
        let (from_ms, to_ms) =
            (why.at_ms.saturating_sub(why.window_ms), why.at_ms.saturating_add(why.window_ms));
        let rank = |record: &DecisionRecord| (record.verdict, record.at_ms.abs_diff(why.at_ms));
        let mut places = self.places(from_ms, to_ms).await?;
        places.sort_by_key(|place| place.distance_ms(why.at_ms));
        let mut found: Vec<DecisionRecord> = Vec::new();
        for place in places {
            // A block farther away than the last of `most` denials cannot change the result.
            let nearest = (RecordVerdict::Denied, place.distance_ms(why.at_ms));
            if found.len() == most && found.last().is_some_and(|last| rank(last) <= nearest) {
                break;
            }
            let Some(block) = self.block_with(place.id, term).await? else {
                continue;
            };
            let about = records(&block.raw).filter(|written| {
                (from_ms..=to_ms).contains(&written.entry.at_ms)
                    && is_about(written, why.tenant, key.as_str())
            });
            for written in about {
                let this = (written.entry.verdict, written.entry.at_ms.abs_diff(why.at_ms));
                let at = found.partition_point(|known| rank(known) <= this);
                if at < most {
                    found.truncate(most - 1);
                    found.insert(at, block.record(written));
                }
            }
        }
        Ok(found)
    }

    /// Returns up to `most` keys in the window that contain the key of the query: first those whose
    /// value it is, such as `user:mallory` for `mallory`. Scans the blocks nearest to the time.
    pub async fn similar(&mut self, why: &WhyQuery<'_>, most: usize) -> Result<Vec<String>, LogError> {
        let (from_ms, to_ms) =
            (why.at_ms.saturating_sub(why.window_ms), why.at_ms.saturating_add(why.window_ms));
        let mut places = self.places(from_ms, to_ms).await?;
        places.sort_by_key(|place| place.distance_ms(why.at_ms));
        let mut similar = SimilarKeys::new(why.key, most);
        let mut scanned = 0;
        for place in places {
            if scanned >= SIMILAR_SCANNED_MAX || similar.is_full() {
                break;
            }
            let Some(block) = self.block(place.id).await? else { continue };
            for written in records(&block.raw) {
                scanned += 1;
                if written.entry.tenant == why.tenant && (from_ms..=to_ms).contains(&written.entry.at_ms) {
                    similar.take(&written);
                }
            }
        }
        Ok(similar.into_keys())
    }

    /// Passes all records between two times to `each`, of all tenants and in time order. Stops when
    /// `each` returns `false`.
    pub async fn replay(
        &mut self,
        from_ms: u64,
        to_ms: u64,
        mut each: impl FnMut(DecisionRecord) -> bool,
    ) -> Result<(), LogError> {
        let mut places = self.places(from_ms, to_ms).await?;
        places.sort_by_key(|place| place.from_ms);
        // Blocks of several threads and a restart overlap a little: a record waits until no earlier
        // one can come.
        let mut waiting: Vec<DecisionRecord> = Vec::new();
        for (at, place) in places.iter().enumerate() {
            let Some(block) = self.block(place.id).await? else { continue };
            let within =
                records(&block.raw).filter(|written| (from_ms..=to_ms).contains(&written.entry.at_ms));
            waiting.extend(within.map(|written| block.record(written)));
            waiting.sort_by_key(|record| record.at_ms);
            let settled = match places.get(at + 1) {
                Some(next) => waiting.partition_point(|record| record.at_ms < next.from_ms),
                None => waiting.len(),
            };
            if !waiting.drain(..settled).all(&mut each) {
                break;
            }
        }
        Ok(())
    }

    /// Returns a time between two others from which on the blocks contain about `records` records.
    /// A replay of that many records then covers the latest, not the first. The time is never later
    /// than the start of the last block.
    pub async fn since(&mut self, from_ms: u64, to_ms: u64, records: u64) -> Result<u64, LogError> {
        let query = sqlx::query(
            "SELECT from_ms, records FROM blocks WHERE to_ms >= ?1 AND from_ms <= ?2 ORDER BY from_ms DESC",
        );
        let blocks = query.bind(signed(from_ms)).bind(signed(to_ms)).fetch_all(&mut self.connection).await?;
        let (mut since_ms, mut seen) = (None, 0_u64);
        for block in blocks {
            seen = seen.saturating_add(unsigned(block.try_get("records")?));
            if let Some(since_ms) = since_ms.filter(|_| seen > records) {
                return Ok(since_ms);
            }
            since_ms = Some(from_ms.max(unsigned(block.try_get("from_ms")?)));
        }
        Ok(from_ms)
    }

    /// Returns the spans of the blocks that may have a record between two moments.
    async fn places(&mut self, from_ms: u64, to_ms: u64) -> Result<Vec<BlockSpan>, LogError> {
        let query = sqlx::query("SELECT id, from_ms, to_ms FROM blocks WHERE to_ms >= ?1 AND from_ms <= ?2");
        let rows = query.bind(signed(from_ms)).bind(signed(to_ms)).fetch_all(&mut self.connection).await?;
        let place = |row: &SqliteRow| {
            Ok(BlockSpan {
                id: row.try_get("id")?,
                from_ms: unsigned(row.try_get("from_ms")?),
                to_ms: unsigned(row.try_get("to_ms")?),
            })
        };
        rows.iter().map(place).collect()
    }

    /// The block, if it is still there and has `term`.
    async fn block_with(&mut self, id: i64, term: u32) -> Result<Option<UnpackedBlock>, LogError> {
        let terms = sqlx::query("SELECT terms FROM blocks WHERE id = ?1").bind(id);
        match terms.fetch_optional(&mut self.connection).await? {
            Some(row) if has_term(row.try_get("terms")?, term) => self.block(id).await,
            _ => Ok(None),
        }
    }

    /// The block, if it is still there.
    async fn block(&mut self, id: i64) -> Result<Option<UnpackedBlock>, LogError> {
        let block = sqlx::query("SELECT region, node, sample_rate, body FROM blocks WHERE id = ?1").bind(id);
        let row = block.fetch_optional(&mut self.connection).await?;
        row.map(|row| UnpackedBlock::read(id, &row)).transpose()
    }

    /// Lets go of the file.
    pub async fn close(self) -> Result<(), LogError> {
        Ok(self.connection.close().await?)
    }
}
