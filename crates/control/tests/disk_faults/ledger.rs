//! Acknowledged writes of the stores, in a file that outlives the process. It is on another disk,
//! without faults.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use tidegate_rules::audit::Checkpoint;

/// The values of each key that were tried and acknowledged, and the records of the decision log.
#[derive(Debug)]
pub(crate) struct Ledger {
    file: File,
    last_value: u64,
    /// The latest value that was sent for a key. The values of a key only rise.
    pub(crate) tried: BTreeMap<String, u64>,
    /// The latest value that the store has acknowledged.
    pub(crate) acknowledged: BTreeMap<String, u64>,
    /// An end of the audit that a reader has seen.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Keys whose records were all counted as written.
    pub(crate) logged: Vec<String>,
}

/// The key of the number of records that were recorded: tried, and counted as written.
pub(crate) const RECORDS: &str = "records";

/// The key of the revision of the rules.
pub(crate) const REVISION: &str = "revision";

impl Ledger {
    /// Opens the file with the lines that a killed process has left, if any.
    pub(crate) fn open(path: &Path) -> Self {
        let lines = std::fs::read_to_string(path).unwrap_or_default();
        let file = File::options().append(true).create(true).open(path).expect("a ledger");
        let mut ledger = Self {
            file,
            last_value: 0,
            tried: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            checkpoint: None,
            logged: Vec::new(),
        };
        lines.lines().for_each(|line| ledger.take(line));
        ledger
    }

    /// Returns a value higher than all before.
    pub(crate) fn next_value(&mut self) -> u64 {
        self.last_value += 1;
        self.last_value
    }

    pub(crate) fn note_try(&mut self, key: &str, value: u64) {
        self.add(&format!("try {key} {value}"));
    }

    pub(crate) fn note_acknowledged(&mut self, key: &str, value: u64) {
        self.add(&format!("acknowledged {key} {value}"));
    }

    pub(crate) fn note_checkpoint(&mut self, checkpoint: &Checkpoint) {
        self.add(&format!("checkpoint {checkpoint}"));
    }

    pub(crate) fn note_logged(&mut self, key: &str) {
        self.add(&format!("logged {key}"));
    }

    /// Returns the latest acknowledged value of a key, or 0.
    pub(crate) fn of(&self, key: &str) -> u64 {
        self.acknowledged.get(key).copied().unwrap_or(0)
    }

    fn add(&mut self, line: &str) {
        self.take(line);
        self.file.write_all(format!("{line}\n").as_bytes()).expect("a ledger");
    }

    fn take(&mut self, line: &str) {
        let (kind, rest) = line.split_once(' ').expect("a line of a ledger");
        let pair = || {
            let (key, value) = rest.split_once(' ').expect("a line of a ledger");
            (key.to_owned(), value.parse().expect("a number"))
        };
        match kind {
            "try" => self.tried.extend([pair()]),
            "acknowledged" => self.acknowledged.extend([pair()]),
            "checkpoint" => self.checkpoint = Some(rest.parse().expect("a checkpoint")),
            "logged" => self.logged.push(rest.to_owned()),
            other => panic!("a line of a ledger: {other}"),
        }
    }
}
