//! One decision, as it is written down: borrowed while it is written, bytes while it is kept, owned when it is told.

use arrayvec::ArrayString;
use serde::{Serialize, Serializer};

/// The longest key that is kept. Longer ones are cut: higher tells them apart, and takes more room for each record.
pub const KEY_BYTES_MAX: usize = 256;
/// The longest name that is kept: of a tenant, a rule, a version and so on.
pub const NAME_BYTES_MAX: usize = 128;
/// The most bytes of a request's dimensions that are kept, names and values. Those that do not fit are left out, whole.
pub const DIMENSIONS_BYTES_MAX: usize = 1_024;

/// The most bytes of one record: its numbers at their longest, its texts, and its dimensions with a length for each of
/// their parts.
pub(crate) const RECORD_BYTES_MAX: usize =
    128 + KEY_BYTES_MAX + 6 * (NAME_BYTES_MAX + 2) + 2 * DIMENSIONS_BYTES_MAX;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was turned away.
    Denied,
    /// It passed, though a rule in shadow mode would have turned it away.
    ShadowDenied,
    /// It passed.
    Allowed,
}

/// Why a decision is in the log. Metrics tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All of these are, up to the stated rate.
    Denial,
    /// All of these are, while there is room that denials do not need.
    Shadow,
    /// One of many that passed.
    Sample,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Denial, Self::Shadow, Self::Sample];

    /// The kind as metrics have it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Denial => "denial",
            Self::Shadow => "shadow",
            Self::Sample => "sample",
        }
    }
}

impl Verdict {
    /// Why a decision with this verdict is in the log.
    pub const fn kind(self) -> Kind {
        match self {
            Self::Denied => Kind::Denial,
            Self::ShadowDenied => Kind::Shadow,
            Self::Allowed => Kind::Sample,
        }
    }

    const fn from_code(code: u64) -> Option<Self> {
        match code {
            0 => Some(Self::Denied),
            1 => Some(Self::ShadowDenied),
            2 => Some(Self::Allowed),
            _ => None,
        }
    }
}

/// What a limit lets pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Terms {
    /// How much in each period.
    pub amount: u32,
    /// How much at once.
    pub burst: u32,
    /// The period.
    pub period_ms: u64,
}

/// A key as people write it: `user:42`, or several parts with commas between them. It is made in place, and cut at
/// [`KEY_BYTES_MAX`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Key(ArrayString<KEY_BYTES_MAX>);

impl Key {
    /// A key that is one text.
    pub fn of(text: &str) -> Self {
        let mut key = Self::default();
        key.push(text);
        key
    }

    /// A key of any bytes; those that are no text are replaced.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut key = Self::default();
        for chunk in bytes.utf8_chunks() {
            key.push(chunk.valid());
            if !chunk.invalid().is_empty() {
                key.push("\u{fffd}");
            }
        }
        key
    }

    /// Adds a part of a name and a value.
    pub fn add(&mut self, name: &str, value: &str) {
        if !self.0.is_empty() {
            self.push(",");
        }
        for text in [name, ":", value] {
            self.push(text);
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn push(&mut self, text: &str) {
        let _ = self.0.try_push_str(cut(text, self.0.remaining_capacity()));
    }
}

/// A decision, as it is handed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// When, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Whose.
    pub tenant: &'a str,
    /// Where the question came in.
    pub surface: &'a str,
    /// What was counted, under the limit that decided.
    pub key: &'a str,
    /// What the request costs.
    pub cost: u64,
    /// What became of it.
    pub verdict: Verdict,
    /// The rule that decided: the one that denied, or of those that let it pass the one with the least left.
    pub rule: &'a str,
    /// That rule's version.
    pub rule_version: u64,
    /// The version of the set that the rule is from.
    pub set_version: &'a str,
    /// The override or emergency that replaced the rule's limit; empty if none did.
    pub replaced_by: &'a str,
    /// The limit that held.
    pub limit: Terms,
    /// What could still be spent after the decision.
    pub remaining: u32,
    /// How long until the same request would pass; nothing if it passed, or never will.
    pub retry_ms: Option<u64>,
    /// What the decision rests on.
    pub rung: &'a str,
}

/// A decision as it is told.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// When, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Whose.
    pub tenant: String,
    /// Where the question came in.
    pub surface: String,
    /// What was counted.
    pub key: String,
    /// What the request cost.
    pub cost: u64,
    /// What became of it.
    pub verdict: Verdict,
    /// The rule that decided.
    pub rule: String,
    /// That rule's version.
    pub rule_version: u64,
    /// The version of the set that the rule is from.
    pub set_version: String,
    /// The override or emergency that replaced the rule's limit.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub replaced_by: String,
    /// The limit that held.
    pub limit: Terms,
    /// What could still be spent after the decision.
    pub remaining: u32,
    /// What was spent of the limit's burst after the decision.
    pub level: u32,
    /// How long until the same request would have passed.
    pub retry_ms: Option<u64>,
    /// What the decision rests on.
    pub rung: String,
    /// The region of the node.
    pub region: String,
    /// The node that decided.
    pub node: String,
    /// How many decisions of its kind the record stands for, as a share: 1 for denials.
    pub sample_rate: f64,
    /// What the request was known by, as far as rules look at it.
    #[serde(serialize_with = "as_object")]
    pub dimensions: Vec<(String, String)>,
    /// Whether some of them were left out, because they are too long.
    pub dimensions_cut: bool,
}

/// A record as it lies in a buffer or in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written<'b> {
    pub(crate) entry: Entry<'b>,
    dimensions: &'b [u8],
    pub(crate) dimensions_cut: bool,
    /// How many it takes.
    pub(crate) bytes: usize,
}

impl Entry<'_> {
    /// What was spent of the burst after the decision.
    pub(crate) fn level(&self) -> u32 {
        self.limit.burst.saturating_sub(self.remaining)
    }

    /// Writes the entry behind what is in `out`.
    pub(crate) fn encode<'d>(&self, dimensions: impl Iterator<Item = (&'d str, &'d str)>, out: &mut Vec<u8>) {
        let start = out.len();
        // The length, once it is known.
        out.extend_from_slice(&[0; 2]);
        let Terms { amount, burst, period_ms } = self.limit;
        out.extend_from_slice(&self.at_ms.to_le_bytes());
        for number in [
            self.verdict as u64,
            self.cost,
            u64::from(amount),
            u64::from(burst),
            period_ms,
            u64::from(self.remaining),
            self.rule_version,
            // 0 is nothing.
            self.retry_ms.map_or(0, |ms| ms.saturating_add(1)),
        ] {
            put_number(out, number);
        }
        put_text(out, cut(self.key, KEY_BYTES_MAX));
        for text in self.names() {
            put_text(out, cut(text, NAME_BYTES_MAX));
        }
        put_dimensions(out, dimensions);
        // A record is far shorter than two bytes count.
        let length = u16::try_from(out.len() - start - 2).unwrap_or(u16::MAX);
        out[start..start + 2].copy_from_slice(&length.to_le_bytes());
    }

    fn names(&self) -> [&str; 6] {
        [self.tenant, self.surface, self.rule, self.set_version, self.replaced_by, self.rung]
    }
}

const _: () = assert!(RECORD_BYTES_MAX < u16::MAX as usize, "two bytes hold the length of a record");

/// Dimensions up to their bound, after a flag that tells whether all of them are there.
fn put_dimensions<'d>(out: &mut Vec<u8>, dimensions: impl Iterator<Item = (&'d str, &'d str)>) {
    let flag = out.len();
    out.push(0);
    let mut room = DIMENSIONS_BYTES_MAX;
    for (name, value) in dimensions {
        // Each takes a byte at least, so that their lengths are bounded too.
        let Some(left) = room.checked_sub(name.len() + value.len() + 2) else {
            out[flag] = 1;
            continue;
        };
        room = left;
        put_text(out, name);
        put_text(out, value);
    }
}

impl<'b> Written<'b> {
    /// The record at the beginning of `bytes`, and what comes behind it; nothing where there is none, or bytes that no
    /// record has.
    pub(crate) fn decode(bytes: &'b [u8]) -> Option<(Self, &'b [u8])> {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (record, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        Some((Self::decode_one(record)?, rest))
    }

    fn decode_one(bytes: &'b [u8]) -> Option<Self> {
        let whole = bytes.len();
        let (at_ms, bytes) = bytes.split_first_chunk::<8>()?;
        let mut bytes = bytes;
        let mut numbers = [0; 8];
        for number in &mut numbers {
            *number = take_number(&mut bytes)?;
        }
        let [verdict, cost, amount, burst, period_ms, remaining, rule_version, retry] = numbers;
        let mut texts = [""; 7];
        for text in &mut texts {
            *text = take_text(&mut bytes)?;
        }
        let [key, tenant, surface, rule, set_version, replaced_by, rung] = texts;
        let (flag, dimensions) = bytes.split_first()?;
        let limit =
            Terms { amount: u32::try_from(amount).ok()?, burst: u32::try_from(burst).ok()?, period_ms };
        let entry = Entry {
            at_ms: u64::from_le_bytes(*at_ms),
            tenant,
            surface,
            key,
            cost,
            verdict: Verdict::from_code(verdict)?,
            rule,
            rule_version,
            set_version,
            replaced_by,
            limit,
            remaining: u32::try_from(remaining).ok()?,
            retry_ms: retry.checked_sub(1),
            rung,
        };
        Some(Self { entry, dimensions, dimensions_cut: *flag != 0, bytes: 2 + whole })
    }

    /// The dimensions that were kept.
    pub(crate) fn dimensions(&self) -> impl Iterator<Item = (&'b str, &'b str)> + use<'b> {
        let mut rest = self.dimensions;
        std::iter::from_fn(move || Some((take_text(&mut rest)?, take_text(&mut rest)?)))
    }

    /// The record as it is told, from a node of a region.
    pub(crate) fn to_record(self, region: &str, node: &str, sample_rate: f64) -> Record {
        let Entry { limit, remaining, verdict, .. } = self.entry;
        let entry = self.entry;
        let owned = str::to_owned;
        Record {
            at_ms: entry.at_ms,
            tenant: owned(entry.tenant),
            surface: owned(entry.surface),
            key: owned(entry.key),
            cost: entry.cost,
            verdict,
            rule: owned(entry.rule),
            rule_version: entry.rule_version,
            set_version: owned(entry.set_version),
            replaced_by: owned(entry.replaced_by),
            limit,
            remaining,
            level: entry.level(),
            retry_ms: entry.retry_ms,
            rung: owned(entry.rung),
            region: owned(region),
            node: owned(node),
            sample_rate: if verdict.kind() == Kind::Sample { sample_rate } else { 1.0 },
            dimensions: self.dimensions().map(|(name, value)| (owned(name), owned(value))).collect(),
            dimensions_cut: self.dimensions_cut,
        }
    }
}

fn as_object<S: Serializer>(dimensions: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(dimensions.iter().map(|(name, value)| (name, value)))
}

/// All records in `bytes`.
pub(crate) fn records(mut bytes: &[u8]) -> impl Iterator<Item = Written<'_>> {
    std::iter::from_fn(move || {
        let (record, rest) = Written::decode(bytes)?;
        bytes = rest;
        Some(record)
    })
}

/// As much of `text` as fits into `most` bytes, in whole characters.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// Seven bits to a byte, the last of which says that it is.
fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_number(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn take_text<'b>(bytes: &mut &'b [u8]) -> Option<&'b str> {
    let length = usize::try_from(take_number(bytes)?).ok()?;
    let (text, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    std::str::from_utf8(text).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A denial of a key at a moment.
    pub(crate) fn denied(key: &str, at_ms: u64) -> Entry<'_> {
        Entry {
            at_ms,
            tenant: "t",
            surface: "check",
            key,
            cost: 1,
            verdict: Verdict::Denied,
            rule: "per_user",
            rule_version: 3,
            set_version: "5f2a",
            replaced_by: "",
            limit: Terms { amount: 100, burst: 100, period_ms: 60_000 },
            remaining: 0,
            retry_ms: Some(600),
            rung: "local",
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            numbers in prop::array::uniform4(any::<u64>()),
            limits in prop::array::uniform3(any::<u32>()),
            retry_ms in prop::option::of(0..u64::MAX),
            verdict in prop::sample::select(vec![Verdict::Denied, Verdict::ShadowDenied, Verdict::Allowed]),
            texts in prop::array::uniform7(".{0,40}"),
            dimensions in prop::collection::vec((".{0,10}", ".{0,30}"), 0..6),
        ) {
            let [at_ms, cost, rule_version, period_ms] = numbers;
            let [amount, burst, remaining] = limits;
            let [key, tenant, surface, rule, set_version, replaced_by, rung] = texts.each_ref().map(|text| cut(text, NAME_BYTES_MAX));
            let limit = Terms { amount, burst, period_ms };
            let entry = Entry { at_ms, tenant, surface, key, cost, verdict, rule, rule_version, set_version, replaced_by, limit, remaining, retry_ms, rung };
            let mut bytes = Vec::new();
            entry.encode(dimensions.iter().map(|(name, value)| (name.as_str(), value.as_str())), &mut bytes);
            prop_assert!(bytes.len() <= RECORD_BYTES_MAX);
            let (written, rest) = Written::decode(&bytes).expect("a record");
            prop_assert!(rest.is_empty());
            prop_assert_eq!(written.entry, entry);
            if !written.dimensions_cut {
                let read: Vec<_> = written.dimensions().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
                prop_assert_eq!(read, dimensions);
            }
            for short in 0..bytes.len() {
                prop_assert!(Written::decode(&bytes[..short]).is_none());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for written in records(&bytes) {
                prop_assert!(written.dimensions().count() <= bytes.len());
            }
        }
    }

    #[test]
    fn nothing_is_longer_than_its_bound() {
        let (long, name) = ("ä".repeat(500), "n".repeat(500));
        let entry = Entry {
            tenant: &name,
            surface: &name,
            rule: &name,
            set_version: &name,
            replaced_by: &name,
            rung: &name,
            cost: u64::MAX,
            rule_version: u64::MAX,
            limit: Terms { amount: u32::MAX, burst: u32::MAX, period_ms: u64::MAX },
            remaining: u32::MAX,
            retry_ms: Some(u64::MAX),
            ..denied(&long, u64::MAX)
        };
        let mut bytes = Vec::new();
        // One that fits, one that does not, and many of the shortest.
        let dimensions = [("a", "1"), ("b", long.as_str())].into_iter().chain((0..2_000).map(|_| ("", "")));
        entry.encode(dimensions, &mut bytes);
        assert!(bytes.len() <= RECORD_BYTES_MAX, "{}", bytes.len());
        let (written, _) = Written::decode(&bytes).expect("a record");
        assert_eq!(written.entry.key, "ä".repeat(KEY_BYTES_MAX / 2));
        assert!(written.dimensions_cut);
        assert_eq!(written.dimensions().next(), Some(("a", "1")));
    }

    #[test]
    fn keys_are_written_as_people_do() {
        let mut key = Key::default();
        key.add("user", "42");
        key.add("path", "/x");
        assert_eq!(key.as_str(), "user:42,path:/x");
        assert_eq!(Key::of_bytes(b"a\xffb").as_str(), "a\u{fffd}b");
        assert_eq!(Key::of(&"é".repeat(200)).as_str().len(), KEY_BYTES_MAX);
    }
}
