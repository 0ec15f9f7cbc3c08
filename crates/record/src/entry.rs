//! One decision, as it is written down: borrowed while it is written, bytes while it is kept, owned when it is told.

use arrayvec::ArrayString;
use serde::{Serialize, Serializer};

/// The longest key that is kept. Longer ones are cut: higher tells them apart, and takes more room for each record.
pub const KEY_BYTES_MAX: usize = 256;
/// The longest name that is kept: of a tenant, a rule, a version and so on.
pub const NAME_BYTES_MAX: usize = 128;
/// The most bytes of a request's dimensions that are kept, names and values. Those that do not fit are left out, whole.
pub const DIMENSIONS_BYTES_MAX: usize = 1_024;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordVerdict {
    /// It was turned away.
    Denied,
    /// It passed, though a rule in shadow mode would have turned it away.
    ShadowDenied,
    /// It passed.
    Allowed,
}

/// Why a decision is in the log. Metrics tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// All of these are, up to the stated rate.
    Denial,
    /// All of these are, while there is room that denials do not need.
    Shadow,
    /// One of many that passed.
    Sample,
}

impl RecordKind {
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

impl RecordVerdict {
    /// Why a decision with this verdict is in the log.
    pub const fn kind(self) -> RecordKind {
        match self {
            Self::Denied => RecordKind::Denial,
            Self::ShadowDenied => RecordKind::Shadow,
            Self::Allowed => RecordKind::Sample,
        }
    }

    /// As it is written in other formats, which is also how it is in JSON.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::ShadowDenied => "shadow_denied",
            Self::Allowed => "allowed",
        }
    }

    /// The verdict as it is kept.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Denied => 0,
            Self::ShadowDenied => 1,
            Self::Allowed => 2,
        }
    }

    pub(crate) const fn from_code(code: u8) -> Option<Self> {
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
pub struct LimitTerms {
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
pub struct RecordKey(ArrayString<KEY_BYTES_MAX>);

impl RecordKey {
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
pub struct DecisionEntry<'a> {
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
    pub verdict: RecordVerdict,
    /// The rule that decided: the one that denied, or of those that let it pass the one with the least left.
    pub rule: &'a str,
    /// That rule's version.
    pub rule_version: u64,
    /// The version of the set that the rule is from.
    pub set_version: &'a str,
    /// The override or emergency that replaced the rule's limit; empty if none did.
    pub replaced_by: &'a str,
    /// The limit that held.
    pub limit: LimitTerms,
    /// What could still be spent after the decision.
    pub remaining: u32,
    /// How long until the same request would pass; nothing if it passed, or never will.
    pub retry_ms: Option<u64>,
    /// What the decision rests on.
    pub source: &'a str,
}

/// A decision as it is told.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecisionRecord {
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
    pub verdict: RecordVerdict,
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
    pub limit: LimitTerms,
    /// What could still be spent after the decision.
    pub remaining: u32,
    /// What was spent of the limit's burst after the decision.
    pub level: u32,
    /// How long until the same request would have passed.
    pub retry_ms: Option<u64>,
    /// What the decision rests on.
    pub source: String,
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

impl DecisionEntry<'_> {
    /// What was spent of the burst after the decision.
    pub(crate) fn level(&self) -> u32 {
        self.limit.burst.saturating_sub(self.remaining)
    }
}

/// What many decisions in a row have in common: all but who, when and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordContext<'a> {
    /// Tenant, surface, rule, version of the set, what replaced the rule, and decision source.
    pub(crate) names: [&'a str; NAMES],
    pub(crate) rule_version: u64,
    pub(crate) limit: LimitTerms,
}

/// Texts of a [`RecordContext`].
pub(crate) const NAMES: usize = 6;

impl<'a> RecordContext<'a> {
    pub(crate) fn of(entry: &DecisionEntry<'a>) -> Self {
        let DecisionEntry { tenant, surface, rule, set_version, replaced_by, source, .. } = *entry;
        let names = [tenant, surface, rule, set_version, replaced_by, source];
        let names = names.map(|name| cut(name, NAME_BYTES_MAX));
        Self { names, rule_version: entry.rule_version, limit: entry.limit }
    }
}

fn as_object<S: Serializer>(dimensions: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(dimensions.iter().map(|(name, value)| (name, value)))
}

/// As much of `text` as fits into `most` bytes, in whole characters.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A denial of a key at a moment.
    pub(crate) fn denied(key: &str, at_ms: u64) -> DecisionEntry<'_> {
        DecisionEntry {
            at_ms,
            tenant: "t",
            surface: "check",
            key,
            cost: 1,
            verdict: RecordVerdict::Denied,
            rule: "per_user",
            rule_version: 3,
            set_version: "5f2a",
            replaced_by: "",
            limit: LimitTerms { amount: 100, burst: 100, period_ms: 60_000 },
            remaining: 0,
            retry_ms: Some(600),
            source: "local",
        }
    }

    #[test]
    fn keys_are_written_as_people_do() {
        let mut key = RecordKey::default();
        key.add("user", "42");
        key.add("path", "/x");
        assert_eq!(key.as_str(), "user:42,path:/x");
        assert_eq!(RecordKey::of_bytes(b"a\xffb").as_str(), "a\u{fffd}b");
        assert_eq!(RecordKey::of(&"é".repeat(200)).as_str().len(), KEY_BYTES_MAX);
    }
}
