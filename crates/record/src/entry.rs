//! One decision of the log: borrowed while it is written, bytes in storage, owned when it is read.

use arrayvec::ArrayString;
use serde::{Serialize, Serializer};

/// Maximum length of a logged key, in bytes; longer keys are cut. A higher value distinguishes more
/// long keys and takes more space per record.
pub const KEY_BYTES_MAX: usize = 256;
/// Maximum length of a logged name, in bytes: of a tenant, a rule, a version and so on.
pub const NAME_BYTES_MAX: usize = 128;
/// Maximum bytes of a request's logged dimensions, names and values. A dimension that does not fit
/// is left out as a whole.
pub const DIMENSIONS_BYTES_MAX: usize = 1_024;

/// The logged verdict of a request.
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

/// The reason why a decision is in the log; a label of the metrics.
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

    /// Returns the stored code of the verdict.
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

/// Amount, burst and period of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LimitTerms {
    /// How much in each period.
    pub amount: u32,
    /// How much at once.
    pub burst: u32,
    /// The period.
    pub period_ms: u64,
}

/// A key as people write it: `user:42`, or several parts with commas between them. It is made in
/// place, and cut at [`KEY_BYTES_MAX`].
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
    /// Tenant of the request.
    pub tenant: &'a str,
    /// The surface of the request.
    pub surface: &'a str,
    /// Key counted under the limit that decided.
    pub key: &'a str,
    /// Cost of the request, in units.
    pub cost: u64,
    /// Verdict of the request.
    pub verdict: RecordVerdict,
    /// The rule that decided: the one that denied, or of those that let it pass the one with the
    /// least left.
    pub rule: &'a str,
    /// Version of the rule.
    pub rule_version: u64,
    /// The version of the set that the rule is from.
    pub set_version: &'a str,
    /// Override or emergency that replaced the rule's limit; empty if none.
    pub replaced_by: &'a str,
    /// The limit that held.
    pub limit: LimitTerms,
    /// Units left after the decision.
    pub remaining: u32,
    /// Time until the same request would pass, in milliseconds; `None` if it passed or never will.
    pub retry_ms: Option<u64>,
    /// Decision source.
    pub source: &'a str,
    /// The reason: a limit, a block, an outage or overload.
    pub reason: &'a str,
    /// When the emergency in force ends, in milliseconds since the Unix epoch; `None` without one.
    pub until_ms: Option<u64>,
}

/// The decision source of a request that was shed: no limit decided it.
pub const SHED_SOURCE: &str = "shed";

/// A decision record as queries return it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecisionRecord {
    /// When, in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Tenant of the request.
    pub tenant: String,
    /// The surface of the request.
    pub surface: String,
    /// Key counted under the limit that decided.
    pub key: String,
    /// Cost of the request, in units.
    pub cost: u64,
    /// Verdict of the request.
    pub verdict: RecordVerdict,
    /// The rule that decided.
    pub rule: String,
    /// Version of the rule.
    pub rule_version: u64,
    /// The version of the set that the rule is from.
    pub set_version: String,
    /// The override or emergency that replaced the rule's limit.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub replaced_by: String,
    /// The limit that held.
    pub limit: LimitTerms,
    /// Units left after the decision.
    pub remaining: u32,
    /// Units of the limit's burst used after the decision.
    pub level: u32,
    /// How long until the same request would have passed.
    pub retry_ms: Option<u64>,
    /// Decision source.
    pub source: String,
    /// The reason: `limit`, `block`, `origin_unreachable`, `owner_unreachable`, `no_room` or
    /// `shed`; empty, and null in JSON, if the limits let the request pass.
    #[serde(serialize_with = "null_if_empty")]
    pub reason: String,
    /// When the emergency in force ends, in milliseconds since the Unix epoch; `None` without one.
    pub until_ms: Option<u64>,
    /// The region of the node.
    pub region: String,
    /// The node that decided.
    pub node: String,
    /// Share of the decisions of this kind that is logged: 1 for denials.
    pub sample_rate: f64,
    /// Dimensions of the request, as far as rules use them.
    #[serde(serialize_with = "as_object")]
    pub dimensions: Vec<(String, String)>,
    /// Whether some of them were left out, because they are too long.
    pub dimensions_cut: bool,
}

fn null_if_empty<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    if text.is_empty() { serializer.serialize_none() } else { serializer.serialize_some(text) }
}

impl DecisionEntry<'_> {
    /// Returns the units of the burst used after the decision.
    pub(crate) fn level(&self) -> u32 {
        self.limit.burst.saturating_sub(self.remaining)
    }
}

/// Fields that many consecutive decisions share. Key, dimensions, time, verdict and units are
/// stored per decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordContext<'a> {
    /// Tenant, surface, rule, rule set version, replacing override or emergency, decision source,
    /// and reason.
    pub(crate) names: [&'a str; NAMES],
    pub(crate) rule_version: u64,
    pub(crate) limit: LimitTerms,
    pub(crate) until_ms: Option<u64>,
}

/// Texts of a [`RecordContext`].
pub(crate) const NAMES: usize = 7;

impl<'a> RecordContext<'a> {
    pub(crate) fn of(entry: &DecisionEntry<'a>) -> Self {
        let DecisionEntry { tenant, surface, rule, set_version, replaced_by, source, reason, .. } = *entry;
        let names = [tenant, surface, rule, set_version, replaced_by, source, reason];
        let names = names.map(|name| cut(name, NAME_BYTES_MAX));
        let DecisionEntry { rule_version, limit, until_ms, .. } = *entry;
        Self { names, rule_version, limit, until_ms }
    }
}

fn as_object<S: Serializer>(dimensions: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(dimensions.iter().map(|(name, value)| (name, value)))
}

/// Returns the longest prefix of `text` within `most` bytes, in whole characters.
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
            reason: "limit",
            until_ms: None,
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
