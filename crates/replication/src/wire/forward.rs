//! Forwarded questions as bytes.

use std::time::Duration;

use tidegate_core::{Algorithm, Limit};

use super::bytes::{Reader, put_number, put_optional, put_text};
use super::{FRAME_BYTES_MAX, Frame, WireError};
use crate::forward::{
    FORWARD_CHECKS_MAX, ForwardAction, ForwardDecision, ForwardReply, ForwardRequest, ForwardedCheck,
};

/// Maximum bytes of a text in a forwarded check. Every surface accepts only shorter requests, and
/// so only shorter keys. Several texts must fit into a frame.
const TEXT_BYTES_MAX: usize = 64 << 10;

const ACT_DECIDE: u8 = 0;
const ACT_CHARGE: u8 = 1;
const ACT_REFUND: u8 = 2;
const ACT_ROLL_BACK: u8 = 3;

/// Whether the other side would take it: a key that is too long must not cost others their
/// connection.
#[cfg_attr(not(feature = "net"), expect(dead_code, reason = "only network connections forward checks"))]
pub(crate) fn fits(forward: &ForwardRequest) -> bool {
    let texts = |check: &ForwardedCheck| {
        let placement = check.placement.as_ref().map_or(0, |placement| placement.len());
        [check.tenant.len(), check.name.len(), check.key.len(), placement]
    };
    let mut lengths = forward.checks.iter().flat_map(texts);
    forward.checks.len() <= FORWARD_CHECKS_MAX
        && lengths.all(|length| length <= TEXT_BYTES_MAX)
        && Frame::Forward(forward.clone(), u64::MAX).encode().len() <= FRAME_BYTES_MAX
}

pub(super) fn put(bytes: &mut Vec<u8>, forward: &ForwardRequest) {
    put_number(bytes, forward.id);
    put_act(bytes, forward.act);
    put_number(bytes, forward.checks.len() as u64);
    forward.checks.iter().for_each(|check| put_check(bytes, check));
}

pub(super) fn get(reader: &mut Reader<'_>) -> Result<ForwardRequest, WireError> {
    let id = reader.number()?;
    let act = act(reader)?;
    let checks = reader.many("questions", FORWARD_CHECKS_MAX, check)?;
    Ok(ForwardRequest { id, act, checks })
}

fn put_act(bytes: &mut Vec<u8>, act: ForwardAction) {
    match act {
        ForwardAction::Decide => bytes.push(ACT_DECIDE),
        ForwardAction::Charge => bytes.push(ACT_CHARGE),
        ForwardAction::Refund => bytes.push(ACT_REFUND),
        ForwardAction::RollBack { since_us } => {
            bytes.push(ACT_ROLL_BACK);
            put_number(bytes, since_us);
        }
    }
}

fn act(reader: &mut Reader<'_>) -> Result<ForwardAction, WireError> {
    Ok(match reader.byte()? {
        ACT_DECIDE => ForwardAction::Decide,
        ACT_CHARGE => ForwardAction::Charge,
        ACT_REFUND => ForwardAction::Refund,
        ACT_ROLL_BACK => ForwardAction::RollBack { since_us: reader.number()? },
        byte => return Err(WireError::Kind(byte)),
    })
}

fn put_check(bytes: &mut Vec<u8>, check: &ForwardedCheck) {
    put_text(bytes, check.tenant.as_bytes());
    put_text(bytes, check.name.as_bytes());
    let limit = &check.limit;
    bytes.push(u8::from(limit.algorithm() == Algorithm::SlidingWindow));
    put_number(bytes, limit.amount().into());
    put_number(bytes, limit.period_us());
    put_number(bytes, limit.burst().into());
    put_number(bytes, check.tolerance_ppm.into());
    put_number(bytes, check.version.into());
    put_text(bytes, &check.key);
    bytes.push(u8::from(check.placement.is_some()));
    check.placement.iter().for_each(|placement| put_text(bytes, placement));
    put_number(bytes, check.cost);
}

fn check(reader: &mut Reader<'_>) -> Result<ForwardedCheck, WireError> {
    Ok(ForwardedCheck {
        tenant: text(reader, "tenant")?,
        name: text(reader, "name")?,
        limit: limit(reader)?,
        tolerance_ppm: short(reader, "tolerance_ppm")?,
        version: short(reader, "version")?,
        key: reader.text("key", TEXT_BYTES_MAX)?.into(),
        placement: match reader.byte()? {
            0 => None,
            1 => Some(reader.text("placement", TEXT_BYTES_MAX)?.into()),
            byte => return Err(WireError::Kind(byte)),
        },
        cost: reader.number()?,
    })
}

fn text(reader: &mut Reader<'_>, field: &'static str) -> Result<String, WireError> {
    let text = reader.text(field, TEXT_BYTES_MAX)?;
    std::str::from_utf8(text).map(str::to_owned).map_err(|_| WireError::Terms)
}

fn short(reader: &mut Reader<'_>, field: &'static str) -> Result<u32, WireError> {
    let number = reader.bounded(field, u64::from(u32::MAX))?;
    u32::try_from(number).map_err(|_| WireError::Number)
}

fn limit(reader: &mut Reader<'_>) -> Result<Limit, WireError> {
    let kind = reader.byte()?;
    let (amount, period_us, burst) = (reader.number()?, reader.number()?, reader.number()?);
    let period = Duration::from_micros(period_us);
    let limit = match kind {
        0 => Limit::gcra(amount, period).and_then(|limit| limit.with_burst(burst)),
        1 => Limit::sliding_window(amount, period),
        byte => return Err(WireError::Kind(byte)),
    };
    limit.map_err(|_| WireError::Terms)
}

pub(super) fn put_answer(bytes: &mut Vec<u8>, forwarded: &ForwardReply) {
    put_number(bytes, forwarded.id);
    let Some(ForwardDecision { remaining, denied }) = &forwarded.decision else { return bytes.push(0) };
    bytes.push(1);
    put_number(bytes, remaining.len() as u64);
    for left in remaining {
        put_number(bytes, u64::from(*left));
    }
    put_optional(bytes, denied.map(|(by, _)| u64::from(by)));
    put_number(bytes, denied.map_or(0, |(_, retry_us)| retry_us));
}

pub(super) fn get_answer(reader: &mut Reader<'_>) -> Result<ForwardReply, WireError> {
    let id = reader.number()?;
    let decision = match reader.byte()? {
        0 => None,
        1 => Some(decision(reader)?),
        byte => return Err(WireError::Kind(byte)),
    };
    Ok(ForwardReply { id, decision })
}

fn decision(reader: &mut Reader<'_>) -> Result<ForwardDecision, WireError> {
    let remaining = reader.many("remaining", FORWARD_CHECKS_MAX, |reader| short(reader, "remaining"))?;
    let by = reader.optional()?;
    let retry_us = reader.number()?;
    let by = by.map(|by| u16::try_from(by).ok().filter(|by| usize::from(*by) < remaining.len()));
    let denied = match by {
        None => None,
        Some(None) => return Err(WireError::Number),
        Some(Some(by)) => Some((by, retry_us)),
    };
    Ok(ForwardDecision { remaining, denied })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check() -> impl Strategy<Value = ForwardedCheck> {
        let limit = (any::<bool>(), 0_u64..1 << 32, 1_u64..1 << 30, 1_u64..1_000);
        let texts = (".{0,9}", ".{0,9}", any::<Vec<u8>>(), any::<Option<Vec<u8>>>());
        (limit, texts, any::<(u32, u32, u64)>()).prop_map(|(limit, texts, (tolerance_ppm, version, cost))| {
            let (is_window, amount, period_us, burst) = limit;
            let (tenant, name, key, placement) = texts;
            let period = Duration::from_micros(period_us);
            let limit = if is_window {
                Limit::sliding_window(amount, period)
            } else {
                Limit::gcra(amount, period).and_then(|limit| limit.with_burst(burst))
            };
            ForwardedCheck {
                tenant,
                name,
                limit: limit.expect("in range"),
                tolerance_ppm,
                version,
                key: key.into(),
                placement: placement.map(Into::into),
                cost,
            }
        })
    }

    fn act() -> impl Strategy<Value = ForwardAction> {
        let roll_back = any::<u64>().prop_map(|since_us| ForwardAction::RollBack { since_us });
        prop_oneof![
            Just(ForwardAction::Decide),
            Just(ForwardAction::Charge),
            Just(ForwardAction::Refund),
            roll_back
        ]
    }

    proptest! {
        #[test]
        fn forward_frames_round_trip_and_damaged_bytes_are_harmless(
            id: u64,
            act in act(),
            checks in prop::collection::vec(check(), 0..4),
            remaining in prop::collection::vec(any::<u32>(), 1..5),
            retry_us: u64,
            denies: bool,
            flip in any::<(usize, u8)>(),
        ) {
            let denied = denies.then(|| (u16::try_from(remaining.len() - 1).unwrap_or_default(), retry_us));
            let forward = ForwardRequest { id, act, checks };
            for frame in [
                Frame::Forward(forward, id),
                Frame::Forwarded(ForwardReply { id, decision: Some(ForwardDecision { remaining, denied }) }, u64::MAX),
                Frame::Forwarded(ForwardReply { id, decision: None }, id),
            ] {
                let mut bytes = frame.encode().split_off(super::super::PREFIX_BYTES);
                prop_assert_eq!(Frame::decode(&bytes), Ok(frame));
                let at = flip.0 % bytes.len();
                bytes[at] ^= flip.1;
                let _ = Frame::decode(&bytes);
            }
        }
    }
}
