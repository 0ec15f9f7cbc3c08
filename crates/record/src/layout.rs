//! Layout of decisions in buffers and blocks: a sequence of frames. A frame of its own, the
//! setting, contains the fields that many decisions share, and these refer to it by its number.
//! This halves the length of a denial, wherever it is copied, read or compressed.
//!
//! | frame | bytes |
//! |---|---|
//! | every | its length (2), then the number of a setting (4), or [`SETS`] if it is one |
//! | setting | amount, burst, period, version of the rule, end of an emergency; seven texts |
//! | decision | time (8), flags (1); cost, remaining, retry; key; dimensions |
//!
//! Settings are numbered in the order of their frames. The flags of a decision are its verdict, and
//! whether dimensions were left out. Other numbers have seven bits per byte. A text follows its
//! length. A dimension is `name:value`, the form of its search term, after the length of its name.

use crate::entry::{
    DIMENSIONS_BYTES_MAX, DecisionEntry, DecisionRecord, KEY_BYTES_MAX, LimitTerms, NAME_BYTES_MAX, NAMES,
    RecordContext, RecordKind, RecordVerdict, cut,
};

/// In the place of the number of a setting: the frame is one.
const SETS: u32 = u32::MAX;

const LENGTH_BYTES: usize = 2;
const NUMBER_BYTES: usize = 4;
/// The most bytes of a number that is not of fixed length.
const VARYING_BYTES_MAX: usize = 10;
/// Maximum bytes of the length of a stored text, or of a dimension's name.
const TEXT_LENGTH_BYTES_MAX: usize = 2;

/// The most bytes of a setting and a decision together.
pub(crate) const RECORD_BYTES_MAX: usize = SETTING_BYTES_MAX + DECISION_BYTES_MAX;
const SETTING_BYTES_MAX: usize =
    LENGTH_BYTES + NUMBER_BYTES + 5 * VARYING_BYTES_MAX + NAMES * (NAME_BYTES_MAX + TEXT_LENGTH_BYTES_MAX);
const DECISION_BYTES_MAX: usize = LENGTH_BYTES
    + NUMBER_BYTES
    + 8
    + 1
    + 3 * VARYING_BYTES_MAX
    + KEY_BYTES_MAX
    + TEXT_LENGTH_BYTES_MAX
    + DIMENSIONS_BYTES_MAX;
const _: () = assert!(RECORD_BYTES_MAX < u16::MAX as usize, "the length of a frame has two bytes");

/// Beside the verdict: whether dimensions were left out.
const CUT: u8 = 0x80;

/// Appends a setting to `out`.
pub(crate) fn put_setting(out: &mut Vec<u8>, setting: &RecordContext<'_>) {
    let start = begin(out, SETS);
    let LimitTerms { amount, burst, period_ms } = setting.limit;
    // 0 is nothing.
    let until_ms = setting.until_ms.map_or(0, |ms| ms.saturating_add(1));
    for number in [u64::from(amount), u64::from(burst), period_ms, setting.rule_version, until_ms] {
        put_number(out, number);
    }
    for name in setting.names {
        put_text(out, name);
    }
    end(out, start);
}

/// Appends to `out` the fields that a decision does not share, with the number of its setting.
pub(crate) fn put_decision<'d>(
    out: &mut Vec<u8>,
    setting: u32,
    entry: &DecisionEntry<'_>,
    dimensions: impl Iterator<Item = (&'d str, &'d str)>,
) {
    let start = begin(out, setting);
    out.extend_from_slice(&entry.at_ms.to_le_bytes());
    let verdict = out.len();
    out.push(entry.verdict.code());
    put_number(out, entry.cost);
    put_number(out, u64::from(entry.remaining));
    // 0 stands for `None`.
    put_number(out, entry.retry_ms.map_or(0, |ms| ms.saturating_add(1)));
    put_text(out, cut(entry.key, KEY_BYTES_MAX));
    if !put_dimensions(out, dimensions) {
        out[verdict] |= CUT;
    }
    end(out, start);
}

/// Dimensions up to their bound; whether these are all.
fn put_dimensions<'d>(out: &mut Vec<u8>, dimensions: impl Iterator<Item = (&'d str, &'d str)>) -> bool {
    let mut room = DIMENSIONS_BYTES_MAX;
    let mut are_all = true;
    for (name, value) in dimensions {
        let bytes = name.len() + 1 + value.len();
        let Some(left) = room.checked_sub(bytes + 2 * TEXT_LENGTH_BYTES_MAX) else {
            are_all = false;
            continue;
        };
        room = left;
        put_number(out, name.len() as u64);
        put_number(out, bytes as u64);
        out.extend_from_slice(name.as_bytes());
        out.push(b':');
        out.extend_from_slice(value.as_bytes());
    }
    are_all
}

/// Begins a frame; where it starts.
fn begin(out: &mut Vec<u8>, setting: u32) -> usize {
    let start = out.len();
    // The length, once it is known.
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    out.extend_from_slice(&setting.to_le_bytes());
    start
}

fn end(out: &mut [u8], start: usize) {
    // A frame is far shorter than two bytes count.
    let length = u16::try_from(out.len() - start - LENGTH_BYTES).unwrap_or(u16::MAX);
    out[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
}

/// Appends a copy of a decision's frame to `out`, with another setting number.
pub(crate) fn put_again(out: &mut Vec<u8>, frame: &[u8], setting: u32) {
    let start = out.len() + LENGTH_BYTES;
    out.extend_from_slice(frame);
    if let Some(number) = out.get_mut(start..start + NUMBER_BYTES) {
        number.copy_from_slice(&setting.to_le_bytes());
    }
}

/// A frame.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Frame<'b> {
    Setting(RecordContext<'b>),
    /// With the number of its setting, and the bytes of all of it.
    Decision(u32, DecisionFrame<'b>, &'b [u8]),
}

/// The fields of a decision that are not in its setting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionFrame<'b> {
    pub(crate) at_ms: u64,
    pub(crate) verdict: RecordVerdict,
    pub(crate) cost: u64,
    pub(crate) remaining: u32,
    pub(crate) retry_ms: Option<u64>,
    /// UTF-8 text, validated only when the entry is built.
    pub(crate) key: &'b [u8],
    pub(crate) dimensions: DimensionTexts<'b>,
    pub(crate) dimensions_cut: bool,
}

/// Dimensions in stored form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DimensionTexts<'b>(&'b [u8]);

impl<'b> DimensionTexts<'b> {
    /// Of each the length of its name, and `name:value`, which should be text.
    #[inline]
    pub(crate) fn iter(self) -> impl Iterator<Item = (usize, &'b [u8])> + use<'b> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            Some((usize::try_from(take_number(&mut rest)?).ok()?, take_bytes(&mut rest)?))
        })
    }
}

impl<'b> DecisionFrame<'b> {
    /// Returns the whole decision; `None` if its key is not UTF-8.
    pub(crate) fn entry(&self, setting: &RecordContext<'b>) -> Option<DecisionEntry<'b>> {
        let [tenant, surface, rule, set_version, replaced_by, source, reason] = setting.names;
        Some(DecisionEntry {
            at_ms: self.at_ms,
            tenant,
            surface,
            key: str::from_utf8(self.key).ok()?,
            cost: self.cost,
            verdict: self.verdict,
            rule,
            rule_version: setting.rule_version,
            set_version,
            replaced_by,
            limit: setting.limit,
            remaining: self.remaining,
            retry_ms: self.retry_ms,
            source,
            reason,
            until_ms: setting.until_ms,
        })
    }

    fn is_text(&self) -> bool {
        let dimensions = self.dimensions.iter().map(|(_, text)| text);
        dimensions.chain([self.key]).all(|text| str::from_utf8(text).is_ok())
    }
}

/// A decision with all that is known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredDecision<'b> {
    pub(crate) entry: DecisionEntry<'b>,
    pub(crate) dimensions: DimensionTexts<'b>,
    pub(crate) dimensions_cut: bool,
}

impl<'b> StoredDecision<'b> {
    /// The names and values of its dimensions.
    pub(crate) fn dimensions(&self) -> impl Iterator<Item = (&'b str, &'b str)> + use<'b> {
        self.dimensions.iter().filter_map(|(name, text)| {
            let text = str::from_utf8(text).ok()?;
            Some((text.get(..name)?, text.get(name..)?.strip_prefix(':')?))
        })
    }

    /// Returns the owned record, with the region and node that decided.
    pub(crate) fn to_record(self, region: &str, node: &str, sample_rate: f64) -> DecisionRecord {
        let DecisionEntry { limit, remaining, verdict, .. } = self.entry;
        let entry = self.entry;
        let owned = str::to_owned;
        DecisionRecord {
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
            source: owned(entry.source),
            reason: owned(entry.reason),
            until_ms: entry.until_ms,
            region: owned(region),
            node: owned(node),
            sample_rate: if verdict.kind() == RecordKind::Sample { sample_rate } else { 1.0 },
            dimensions: self.dimensions().map(|(name, value)| (owned(name), owned(value))).collect(),
            dimensions_cut: self.dimensions_cut,
        }
    }
}

/// Returns all frames in `bytes`, up to the first invalid one.
pub(crate) fn frames(bytes: &[u8]) -> Frames<'_> {
    Frames { rest: bytes }
}

/// See [`frames`].
#[derive(Debug)]
pub(crate) struct Frames<'b> {
    rest: &'b [u8],
}

impl<'b> Iterator for Frames<'b> {
    type Item = Frame<'b>;

    #[inline]
    fn next(&mut self) -> Option<Frame<'b>> {
        let (length, _) = self.rest.split_first_chunk::<LENGTH_BYTES>()?;
        let whole = LENGTH_BYTES + usize::from(u16::from_le_bytes(*length));
        let (frame, rest) = self.rest.split_at_checked(whole)?;
        let (number, body) = frame.get(LENGTH_BYTES..)?.split_first_chunk::<NUMBER_BYTES>()?;
        let read = match u32::from_le_bytes(*number) {
            SETS => Frame::Setting(read_setting(body)?),
            number => Frame::Decision(number, read_decision(body)?, frame),
        };
        self.rest = rest;
        Some(read)
    }
}

fn read_setting(mut bytes: &[u8]) -> Option<RecordContext<'_>> {
    let mut numbers = [0; 5];
    for number in &mut numbers {
        *number = take_number(&mut bytes)?;
    }
    let [amount, burst, period_ms, rule_version, until_ms] = numbers;
    let mut names = [""; NAMES];
    for name in &mut names {
        *name = take_text(&mut bytes)?;
    }
    let limit =
        LimitTerms { amount: u32::try_from(amount).ok()?, burst: u32::try_from(burst).ok()?, period_ms };
    bytes.is_empty().then_some(RecordContext {
        names,
        rule_version,
        limit,
        until_ms: until_ms.checked_sub(1),
    })
}

#[inline]
fn read_decision(bytes: &[u8]) -> Option<DecisionFrame<'_>> {
    let (at_ms, bytes) = bytes.split_first_chunk::<8>()?;
    let (verdict, mut bytes) = bytes.split_first()?;
    Some(DecisionFrame {
        at_ms: u64::from_le_bytes(*at_ms),
        verdict: RecordVerdict::from_code(verdict & !CUT)?,
        dimensions_cut: verdict & CUT != 0,
        cost: take_number(&mut bytes)?,
        remaining: u32::try_from(take_number(&mut bytes)?).ok()?,
        retry_ms: take_number(&mut bytes)?.checked_sub(1),
        key: take_bytes(&mut bytes)?,
        dimensions: DimensionTexts(bytes),
    })
}

/// All decisions in `bytes`, up to the first that cannot be read.
pub(crate) fn records(bytes: &[u8]) -> impl Iterator<Item = StoredDecision<'_>> {
    let mut frames = frames(bytes);
    let mut settings: Vec<RecordContext<'_>> = Vec::new();
    std::iter::from_fn(move || {
        loop {
            match frames.next()? {
                Frame::Setting(setting) => settings.push(setting),
                Frame::Decision(number, decision, _) => {
                    let entry = decision.entry(settings.get(number as usize)?)?;
                    let DecisionFrame { dimensions, dimensions_cut, .. } = decision;
                    return Some(StoredDecision { entry, dimensions, dimensions_cut });
                }
            }
        }
    })
}

/// Whether `bytes` are frames to their end, and every decision has a setting and is text where it
/// should be.
pub(crate) fn are_whole(bytes: &[u8]) -> bool {
    let mut frames = frames(bytes);
    let mut settings = 0;
    let have_settings = frames.by_ref().all(|frame| match frame {
        Frame::Setting(..) => {
            settings += 1;
            true
        }
        Frame::Decision(number, decision, _) => number < settings && decision.is_text(),
    });
    have_settings && frames.rest.is_empty()
}

/// Appends a number, seven bits per byte. Only the last byte has a clear high bit.
#[inline]
fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

#[inline]
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

#[inline]
fn put_text(out: &mut Vec<u8>, text: &str) {
    put_number(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

#[inline]
fn take_bytes<'b>(bytes: &mut &'b [u8]) -> Option<&'b [u8]> {
    let length = usize::try_from(take_number(bytes)?).ok()?;
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

fn take_text<'b>(bytes: &mut &'b [u8]) -> Option<&'b str> {
    str::from_utf8(take_bytes(bytes)?).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::entry::tests::denied;
    use proptest::prelude::*;

    /// A setting and a decision of it.
    pub(crate) fn encoded<'d>(
        entry: &DecisionEntry<'_>,
        dimensions: impl IntoIterator<Item = (&'d str, &'d str)>,
    ) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_setting(&mut bytes, &RecordContext::of(entry));
        put_decision(&mut bytes, 0, entry, dimensions.into_iter());
        bytes
    }

    proptest! {
        #[test]
        fn encoded_record_decodes_to_the_same_record(
            numbers in prop::array::uniform4(any::<u64>()),
            limits in prop::array::uniform3(any::<u32>()),
            retry_ms in prop::option::of(0..u64::MAX),
            verdict in prop::sample::select(
                vec![RecordVerdict::Denied, RecordVerdict::ShadowDenied, RecordVerdict::Allowed]),
            texts in prop::array::uniform8(".{0,40}"),
            until_ms in prop::option::of(0..u64::MAX),
            dimensions in prop::collection::vec((".{0,10}", ".{0,30}"), 0..6),
        ) {
            let [at_ms, cost, rule_version, period_ms] = numbers;
            let [amount, burst, remaining] = limits;
            let [key, tenant, surface, rule, set_version, replaced_by, source, reason] =
                texts.each_ref().map(|text| cut(text, NAME_BYTES_MAX));
            let limit = LimitTerms { amount, burst, period_ms };
            let entry = DecisionEntry { at_ms, tenant, surface, key, cost, verdict, rule, rule_version,
                set_version, replaced_by, limit, remaining, retry_ms, source, reason, until_ms };
            let bytes = encoded(&entry, dimensions.iter().map(|(name, value)| (name.as_str(), value.as_str())));
            prop_assert!(bytes.len() <= RECORD_BYTES_MAX);
            prop_assert!(are_whole(&bytes));
            let [written] = records(&bytes).collect::<Vec<_>>()[..] else { panic!("one record") };
            prop_assert_eq!(written.entry, entry);
            if !written.dimensions_cut {
                let read: Vec<_> =
                    written.dimensions().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
                prop_assert_eq!(read, dimensions);
            }
            for short in 0..bytes.len() {
                prop_assert_eq!(records(&bytes[..short]).count(), 0);
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut framed = encoded(&denied("a", 1), []);
            framed.extend_from_slice(&bytes);
            for written in records(&bytes).chain(records(&framed)) {
                prop_assert!(written.dimensions().count() <= bytes.len());
            }
        }
    }

    #[test]
    fn decision_without_its_setting_is_incomplete() {
        let mut bytes = encoded(&denied("a", 1), []);
        let before = bytes.len();
        put_decision(&mut bytes, 1, &denied("b", 2), std::iter::empty());
        assert!(!are_whole(&bytes) && are_whole(&bytes[..before]) && !are_whole(&bytes[..before - 1]));
        assert_eq!(records(&bytes).count(), 1);
        let (_, frame) = bytes.split_at(before);
        let mut again = encoded(&denied("a", 1), []);
        put_again(&mut again, frame, 0);
        assert!(are_whole(&again));
        assert_eq!(
            records(&again).map(|written| written.entry.key.to_owned()).collect::<Vec<_>>(),
            ["a", "b"]
        );
    }

    #[test]
    fn nothing_is_longer_than_its_bound() {
        let (long, name) = ("ä".repeat(500), "n".repeat(500));
        let entry = DecisionEntry {
            tenant: &name,
            surface: &name,
            rule: &name,
            set_version: &name,
            replaced_by: &name,
            source: &name,
            reason: &name,
            until_ms: Some(u64::MAX),
            cost: u64::MAX,
            rule_version: u64::MAX,
            limit: LimitTerms { amount: u32::MAX, burst: u32::MAX, period_ms: u64::MAX },
            remaining: u32::MAX,
            retry_ms: Some(u64::MAX),
            ..denied(&long, u64::MAX)
        };
        // One that fits, one that does not, and many of the shortest.
        let dimensions = [("a", "1"), ("b", long.as_str())].into_iter().chain((0..2_000).map(|_| ("", "")));
        let bytes = encoded(&entry, dimensions);
        assert!(bytes.len() <= RECORD_BYTES_MAX, "{}", bytes.len());
        let written = records(&bytes).next().expect("a record");
        assert_eq!(written.entry.key, "ä".repeat(KEY_BYTES_MAX / 2));
        assert!(written.dimensions_cut);
        assert_eq!(written.dimensions().next(), Some(("a", "1")));
    }
}
