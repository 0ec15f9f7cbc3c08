//! Reads a rule's meters from an origin on Redis.

use std::collections::BTreeMap;

use tidegate_testkit::{Redis, ask};

/// Positions of numbers in a meter as the script stores it: see `OriginMeter::numbers`.
const CHARGED: usize = 8;
const REFUNDED: usize = 9;
/// Positions of numbers in a node's grant as the script stores it.
const AMOUNT: usize = 0;
const UNTIL: usize = 1;
const CELL: usize = 2;

/// Sums over meters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeterSums {
    /// How many there are.
    pub meters: usize,
    /// Units charged and not refunded.
    pub charged: u64,
    /// Units granted to each node, by its name.
    pub holders: BTreeMap<String, u64>,
}

impl MeterSums {
    /// Sums the meters of a rule over these servers.
    pub fn of<'s>(servers: impl IntoIterator<Item = &'s Redis>, rule: &str) -> Self {
        let mut held = Self::default();
        for server in servers {
            for key in keys(server, &format!("tg2:{{*}}:m:*:{rule}*")) {
                held.add(&ask::<BTreeMap<Vec<u8>, Vec<u8>>>(server, &["HGETALL", &key]));
            }
        }
        held
    }

    fn add(&mut self, fields: &BTreeMap<Vec<u8>, Vec<u8>>) {
        // It may have ended since it was found.
        let Some(meter) = fields.get(&b"m"[..]) else { return };
        self.meters += 1;
        self.charged += number(meter, CHARGED) - number(meter, REFUNDED);
        for (node, holding) in fields.iter().filter(|(name, _)| !matches!(&name[..], b"m" | b"t")) {
            let node = String::from_utf8(node.clone()).expect("hexadecimal digits");
            // A node that wants units has an entry, even if its grant is 0.
            let amount = number(holding, AMOUNT);
            if amount > 0 {
                *self.holders.entry(node).or_default() += amount;
            }
        }
    }
}

/// How long each grant of a rule's meters is believed in from now on at most, µs, with the cell it
/// is of.
pub fn lives_left_us(server: &Redis, rule: &str) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for key in keys(server, &format!("tg2:{{*}}:m:*:{rule}*")) {
        let fields = ask::<BTreeMap<Vec<u8>, Vec<u8>>>(server, &["HGETALL", &key]);
        // The clock is read after the grants, so a grant made meanwhile does not look longer than
        // it is.
        let (seconds, micros) = ask::<(u64, u64)>(server, &["TIME"]);
        let now_us = seconds * 1_000_000 + micros;
        let holdings = fields.iter().filter(|(name, _)| !matches!(&name[..], b"m" | b"t"));
        found.extend(
            holdings.map(|(_, kept)| (number(kept, CELL), number(kept, UNTIL).saturating_sub(now_us))),
        );
    }
    found
}

/// A number that the script keeps, by its place.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the script keeps whole numbers from 0 up to 2^53"
)]
fn number(kept: &[u8], place: usize) -> u64 {
    let (numbers, _) = kept.as_chunks();
    f64::from_le_bytes(numbers[place]) as u64
}

/// The keys of all meters of a server.
pub fn meter_keys(server: &Redis) -> Vec<String> {
    keys(server, "tg2:{*}:m:*")
}

/// How often a server was given a command.
pub fn commands(server: &Redis, name: &str) -> u64 {
    let stats: String = ask(server, &["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

/// Whether the stored identity is that of the server's current run.
pub fn is_recognised(server: &Redis) -> bool {
    let about: String = ask(server, &["INFO", "replication"]);
    let life = about.lines().find_map(|line| line.strip_prefix("master_replid:")).expect("a life");
    let stores = keys(server, "tg2:{*}:s");
    let knows = |key: &String| ask::<Vec<u8>>(server, &["GET", key]).ends_with(life.as_bytes());
    !stores.is_empty() && stores.iter().all(knows)
}

/// Asserts that every key of a server has an expiry.
pub fn assert_all_end(server: &Redis) {
    let keys = server.keys();
    for (key, left) in &keys {
        assert!(*left > 0, "{} stays for ever", key.escape_ascii());
    }
    assert!(!keys.is_empty());
}

/// Returns the keys that match a pattern. The braces of cluster tags are literal in a pattern.
fn keys(server: &Redis, pattern: &str) -> Vec<String> {
    ask(server, &["KEYS", pattern])
}
