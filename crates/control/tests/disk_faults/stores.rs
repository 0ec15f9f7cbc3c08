//! The stores of a server on one disk, and their expected content.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_record::{
    Archive, DecisionEntry, LimitTerms, Log, LogSettings, RecordKind, RecordVerdict, WhyQuery,
};
use tidegate_rules::change::{Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow};
use tidegate_rules::store::{Attribution, OverrideLimit, OverrideOutcome, OverrideWrite, Store, StoreError};

use crate::ledger::{Ledger, RECORDS, REVISION};

pub(crate) const NOW_MS: u64 = 1_794_839_537_000;

/// Short, because a schedule lasts some milliseconds.
const FLUSH_EVERY: Duration = Duration::from_millis(3);

/// Base of the expiry of emergencies, which has the value.
const EXPIRES_MS: u64 = NOW_MS + 60_000;

const BY: Attribution<'static> = Attribution { by: "ada", now_ms: NOW_MS };

/// Two servers with one rule store; the first has a data folder.
pub(crate) struct Stores {
    /// Rule stores of the two servers: one file, other connections.
    pub(crate) rules: [Store; 2],
    pub(crate) embedded: Store,
    pub(crate) log: Log,
    /// The clock of the log.
    now_ms: Arc<AtomicU64>,
}

/// The store that a write is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Rule(usize),
    Override(usize),
    Emergency(usize),
    Embedded,
}

async fn open_rules(disk: &Path) -> Result<Store, StoreError> {
    let address = format!("sqlite:{}", disk.join("rules.db").display());
    Store::open(&address.parse().expect("an address")).await
}

impl Stores {
    /// Opens all, on a disk without faults.
    pub(crate) async fn open(disk: &Path) -> Self {
        std::fs::create_dir_all(disk).expect("a folder");
        let settings = LogSettings {
            threads: 1,
            sample_rate: 0.0,
            retention: Duration::from_hours(24),
            bytes_max: 1 << 30,
            region: String::new(),
            node: "n".to_owned(),
            seed: 1,
            otlp: None,
            flush_every: FLUSH_EVERY,
        };
        let now_ms = Arc::new(AtomicU64::new(NOW_MS));
        let clock = Arc::clone(&now_ms);
        Self {
            rules: [open_rules(disk).await.expect("opens"), open_rules(disk).await.expect("opens")],
            embedded: Store::open_embedded(Some(disk)).await.expect("opens"),
            log: Log::open(disk, settings, move || clock.load(Ordering::Relaxed)).expect("opens"),
            now_ms,
        }
    }

    /// Lets a minute pass, after which the log forgets expired records.
    pub(crate) fn pass_minute(&self) {
        self.now_ms.fetch_add(60_000, Ordering::Relaxed);
    }

    /// Writes a value, and notes in the ledger that it was tried and, if so, acknowledged.
    pub(crate) async fn write(&self, target: Target, ledger: &mut Ledger) -> Result<(), String> {
        let value = ledger.next_value();
        ledger.note_try(&target.key(), value);
        match target {
            Target::Rule(server) => {
                let revision = self.apply(server, value, ledger).await?;
                ledger.note_try(REVISION, revision);
                ledger.note_acknowledged(REVISION, revision);
            }
            Target::Override(server) => set_override(&self.rules[server], value).await?,
            Target::Emergency(server) => {
                let (id, body) = ("stop".to_owned(), r#"{"action":"block"}"#.to_owned());
                let row = EmergencyRow { id, body, expires_ms: EXPIRES_MS + value };
                self.rules[server].put_emergency(&row, BY).await.map_err(|error| error.to_string())?;
            }
            Target::Embedded => set_override(&self.embedded, value).await?,
        }
        ledger.note_acknowledged(&target.key(), value);
        Ok(())
    }

    /// Applies a change. A write that was abandoned before may end in between.
    async fn apply(&self, server: usize, value: u64, ledger: &mut Ledger) -> Result<u64, String> {
        loop {
            let base_revision = self.read_revision(server, ledger).await?;
            let body = format!(r#"{{"key":["user"],"limit":{value},"period":"1m"}}"#);
            let operation = Operation::Put { kind: RowKind::Rule, name: "a".to_owned(), body };
            let proposal = Proposal::new(base_revision, "a test", vec![operation]);
            match self.rules[server].apply_new(&proposal, false, BY).await {
                Ok(change) => return change.revision.ok_or_else(|| "applied without a revision".to_owned()),
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Starts a write, and drops it after so many steps of its future.
    pub(crate) async fn abandon(&self, steps: u32, ledger: &mut Ledger) {
        let value = ledger.next_value();
        ledger.note_try(&Target::Override(0).key(), value);
        let store = self.rules[0].clone();
        let writing = tokio::spawn(async move { set_override(&store, value).await });
        for _ in 0..steps {
            tokio::task::yield_now().await;
        }
        writing.abort();
        let _ = writing.await;
    }

    /// Reads the revision, which must not be older than an acknowledged one.
    pub(crate) async fn read_revision(&self, server: usize, ledger: &mut Ledger) -> Result<u64, String> {
        let store = &self.rules[server];
        let revision = store.revisions().await.map_err(|error| error.to_string())?.revision;
        let known = ledger.of(REVISION);
        if revision < known {
            return Err(format!("{STALE}: server {server} reads revision {revision} after {known}"));
        }
        ledger.note_checkpoint(&store.checkpoint().await.map_err(|error| error.to_string())?);
        Ok(revision)
    }

    /// Reads all rows, which must have the acknowledged values.
    pub(crate) async fn read_rows(&self, server: usize, ledger: &Ledger) -> Result<(), String> {
        let store = &self.rules[server];
        let found = store_values(store, "").await.map_err(|error| error.to_string())?;
        let acknowledged = ledger.acknowledged.iter().filter(|(key, _)| found_in_rules(key));
        for (key, value) in acknowledged {
            let found = found.get(key.as_str()).copied().unwrap_or(0);
            if found < *value {
                return Err(format!("{STALE}: server {server} reads {key} {found} after {value}"));
            }
        }
        Ok(())
    }

    /// Records denials of a key.
    pub(crate) fn record(&self, key: &str, count: u64, ledger: &mut Ledger) {
        let before = ledger.tried.get(RECORDS).copied().unwrap_or(0);
        ledger.note_try(RECORDS, before + count);
        (0..count).for_each(|at| self.log.recorder().write(0, &denial(key, NOW_MS + before + at), []));
    }

    /// Notes the records that are counted as written.
    pub(crate) fn note_written(&self, key: &str, ledger: &mut Ledger) {
        let written = self.log.recorder().counts().written(RecordKind::Denial);
        if written > ledger.of(RECORDS) {
            ledger.note_acknowledged(RECORDS, written);
        }
        if ledger.tried.get(RECORDS) == Some(&written) {
            ledger.note_logged(key);
        }
    }
}

/// The beginning of a violation of a reader.
pub(crate) const STALE: &str = "stale";

impl Target {
    fn key(self) -> String {
        match self {
            Self::Rule(_) => "rule".to_owned(),
            Self::Override(_) => "override".to_owned(),
            Self::Emergency(_) => "emergency".to_owned(),
            Self::Embedded => "embedded-override".to_owned(),
        }
    }
}

fn found_in_rules(key: &str) -> bool {
    ["rule", "override", "emergency"].contains(&key)
}

async fn set_override(store: &Store, value: u64) -> Result<(), String> {
    let write = OverrideWrite {
        tenant: "acme".to_owned(),
        namespace: "n".to_owned(),
        identifier: "vip".to_owned(),
        limit: Some(OverrideLimit { amount: u32::try_from(value).expect("small"), period_ms: 1_000 }),
        by: "ada".to_owned(),
        now_ms: NOW_MS,
    };
    match store.write_overrides(&[write]).await.map_err(|error| error.to_string())?.1.as_slice() {
        [OverrideOutcome::Set { .. }] => Ok(()),
        other => Err(format!("an override was not set: {other:?}")),
    }
}

fn denial(key: &str, at_ms: u64) -> DecisionEntry<'_> {
    DecisionEntry {
        at_ms,
        tenant: "acme",
        surface: "check",
        key,
        cost: 1,
        verdict: RecordVerdict::Denied,
        rule: "a",
        rule_version: 1,
        set_version: "5f2a",
        replaced_by: "",
        limit: LimitTerms { amount: 100, burst: 120, period_ms: 60_000 },
        remaining: 0,
        retry_ms: Some(600),
        source: "local",
        reason: "limit",
        until_ms: None,
    }
}

/// The values in a store, by key.
async fn store_values(store: &Store, prefix: &str) -> Result<BTreeMap<String, u64>, StoreError> {
    let loaded = store.load().await?;
    let of_row = |row: &RuleRow| {
        let body: serde_json::Value = serde_json::from_str(&row.body).expect("JSON");
        let key = if row.kind == RowKind::Rule { "rule" } else { "override" };
        (format!("{prefix}{key}"), body["limit"].as_u64().expect("a limit"))
    };
    let mut values: BTreeMap<_, _> = loaded.rows.iter().map(of_row).collect();
    let stop = loaded.emergencies.iter().map(|row| ("emergency".to_owned(), row.expires_ms - EXPIRES_MS));
    values.extend(stop);
    values.insert(REVISION.to_owned(), loaded.revision);
    Ok(values)
}

/// Checks a disk without faults: acknowledged values are there, and no value that was never tried.
pub(crate) async fn verify(disk: &Path, ledger: &Ledger) -> Result<(), String> {
    let rules = open_rules(disk).await.map_err(|error| error.to_string())?;
    let audit = rules.verify_audit(ledger.checkpoint.as_ref()).await;
    audit.map_err(|error| format!("the audit: {error}"))?;
    let mut values = store_values(&rules, "").await.map_err(|error| error.to_string())?;
    rules.close().await;
    let embedded = Store::open_embedded(Some(disk)).await.map_err(|error| error.to_string())?;
    let of_embedded = store_values(&embedded, "embedded-").await.map_err(|error| error.to_string())?;
    values.extend(of_embedded.into_iter().filter(|(key, _)| key != REVISION));
    embedded.close().await;
    values.insert(RECORDS.to_owned(), verify_log(disk, ledger).await?);
    for (key, tried) in &ledger.tried {
        let (acknowledged, found) = (ledger.of(key), values.get(key).copied().unwrap_or(0));
        // A failed commit may have reached the disk, so the revision may be higher.
        if found < acknowledged || (found > *tried && key != REVISION) {
            return Err(format!("{key}: {acknowledged} was acknowledged, {tried} tried, {found} is there"));
        }
    }
    Ok(())
}

/// Returns the number of records in the log, in which `why` must find every logged key.
async fn verify_log(disk: &Path, ledger: &Ledger) -> Result<u64, String> {
    let failed = |error| format!("the decision log: {error}");
    let mut archive = Archive::open(disk).await.map_err(failed)?;
    let mut count = 0;
    let each = |_| {
        count += 1;
        true
    };
    archive.replay(0, u64::MAX, each).await.map_err(failed)?;
    for key in &ledger.logged {
        let query = WhyQuery { tenant: "acme", key, at_ms: NOW_MS, window_ms: 60_000, records: 1 };
        if archive.why(&query).await.map_err(failed)?.is_empty() {
            return Err(format!("`why` finds nothing of {key}, which was counted as written"));
        }
    }
    archive.close().await.map_err(failed)?;
    Ok(count)
}
