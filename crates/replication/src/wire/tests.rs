//! Encoded frames decode to the same frames, and arbitrary bytes do no harm.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tidegate_core::Limit;
use tidegate_core::origin::{Component, ComponentTotals, CrossRegionTerms, Lapse, Terms};

use super::*;

fn terms() -> impl Strategy<Value = Terms> {
    let numbers = (any::<bool>(), 0u64..1 << 32, 1u64..=u64::from(u32::MAX), 0u32..=1_000_000, any::<u32>());
    let cross_region = proptest::option::of((any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()));
    (numbers, cross_region).prop_map(|((window, amount, period, ppm, version), cross_region)| {
        let period = Duration::from_micros(period);
        let limit = if window { Limit::sliding_window(amount, period) } else { Limit::gcra(amount, period) };
        let lapse = if version % 2 == 0 { Lapse::Counted } else { Lapse::Forgiven };
        let terms = Terms::new(&limit.expect("in range"), ppm, lapse, version);
        cross_region.map_or(terms, |(publish_threshold, share_amount, share_capacity, debt_max)| {
            terms.with_cross_region(CrossRegionTerms {
                publish_threshold,
                share_amount,
                share_capacity,
                debt_max,
            })
        })
    })
}

fn component() -> impl Strategy<Value = Component> {
    (vec(any::<u8>(), 0..40), terms(), any::<u64>(), any::<[u64; 3]>()).prop_map(
        |(key, terms, incarnation, numbers)| {
            let totals = ComponentTotals::of_numbers(terms.algorithm(), numbers);
            Component { key: key.into(), terms, incarnation, totals }
        },
    )
}

fn batch() -> impl Strategy<Value = Batch> {
    let group = (any::<u16>(), vec(component(), 0..5))
        .prop_map(|(partition, components)| Arc::new(ComponentGroup { partition, components }));
    let age = || proptest::option::of(0..u64::MAX - 1);
    let freshness = (any::<u64>(), any::<u64>(), age(), age(), age()).prop_map(
        |(after, echo_us, age_us, settled_age_us, last_heard_age_us)| BatchFreshness {
            after,
            echo_us,
            age_us,
            settled_age_us,
            last_heard_age_us,
        },
    );
    (id(), freshness, vec(group, 0..5)).prop_map(|(id, freshness, groups)| Batch { id, freshness, groups })
}

fn id() -> impl Strategy<Value = BatchId> {
    any::<(u64, u64)>().prop_map(|(incarnation, sequence)| BatchId { incarnation, sequence })
}

fn frame() -> impl Strategy<Value = Frame> {
    let name = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?";
    prop_oneof![
        (name, name, any::<u64>(), any::<u64>()).prop_map(|(from, to, incarnation, agreement)| {
            Frame::Hello(Hello { from, to, incarnation, agreement })
        }),
        (name, any::<u64>(), any::<bool>(), any::<u64>()).prop_map(
            |(region, clock_us, is_replicator, agreement)| {
                Frame::Welcome(Welcome { region, clock_us, is_replicator, agreement })
            }
        ),
        batch().prop_map(Frame::Batch),
        (id(), any::<u64>()).prop_map(|(id, clock_us)| Frame::Ack(Ack { id, clock_us })),
        proptest::sample::select(REFUSALS.map(|(refusal, _)| refusal).to_vec()).prop_map(Frame::Refused),
    ]
}

proptest! {
    #[test]
    fn frames_round_trip(frame in frame()) {
        let bytes = frame.encode();
        let (prefix, body) = bytes.split_at(PREFIX_BYTES);
        prop_assert_eq!(prefix, u32::try_from(body.len()).expect("short").to_be_bytes());
        prop_assert_eq!(Frame::decode(body), Ok(frame));
    }

    #[test]
    fn the_room_that_a_component_takes_is_known_before(component in component()) {
        let mut bytes = Vec::new();
        component::put(&mut bytes, &component);
        prop_assert_eq!(bytes.len(), component_len(&component));
    }

    #[test]
    fn a_frame_that_was_cut_or_goes_on_is_none(frame in frame(), cut: proptest::sample::Index, more: u8) {
        let mut bytes = frame.encode().split_off(PREFIX_BYTES);
        let cut = cut.index(bytes.len());
        prop_assert!(Frame::decode(&bytes[..cut]).is_err());
        bytes.push(more);
        prop_assert!(Frame::decode(&bytes).is_err());
    }

    #[test]
    fn no_bytes_do_harm(bytes in vec(any::<u8>(), 0..300)) {
        if let Ok(frame) = Frame::decode(&bytes) {
            prop_assert_eq!(Frame::decode(&frame.encode()[PREFIX_BYTES..]), Ok(frame));
        }
    }

    #[test]
    fn nor_does_a_frame_in_which_a_byte_was_changed(frame in frame(), at: proptest::sample::Index, to: u8) {
        let mut bytes = frame.encode().split_off(PREFIX_BYTES);
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(frame) = Frame::decode(&bytes) {
            prop_assert_eq!(Frame::decode(&frame.encode()[PREFIX_BYTES..]), Ok(frame));
        }
    }
}

#[test]
fn a_frame_may_not_announce_more_than_it_has() {
    let mut bytes = vec![KIND_BATCH, 1, 1, 0, 0, 0, 0, 0];
    put_number(&mut bytes, BATCH_COMPONENTS_MAX as u64);
    assert_eq!(Frame::decode(&bytes), Err(WireError::Short));
    let mut bytes = vec![KIND_BATCH, 1, 1, 0, 0, 0, 0, 0];
    put_number(&mut bytes, BATCH_COMPONENTS_MAX as u64 + 1);
    let most = BATCH_COMPONENTS_MAX as u64;
    assert_eq!(Frame::decode(&bytes), Err(WireError::Range { field: "groups", given: most + 1, most }));
}

#[test]
fn other_version_is_detected_before_the_rest_is_read() {
    let other = u8::try_from(VERSION + 1).expect("a version below 256");
    assert_eq!(Frame::decode(&[KIND_HELLO, other, 255, 255]), Err(WireError::Version(other.into())));
}

#[test]
fn names_of_regions_are_labels_of_hosts() {
    assert!(["eu", "us-east-1", "7", &"a".repeat(NAME_BYTES_MAX)].into_iter().all(is_region_name));
    let wrong = ["", "-eu", "eu-", "EU", "e.u", "eü", "*", &"a".repeat(NAME_BYTES_MAX + 1)];
    assert_eq!(wrong.into_iter().filter(|name| is_region_name(name)).count(), 0);
}

#[test]
fn every_refusal_round_trips() {
    // A refusal missing from the table would be encoded without its byte.
    for refusal in [
        Refusal::Version,
        Refusal::WrongRegion,
        Refusal::UnknownRegion,
        Refusal::Certificate,
        Refusal::NotReplicator,
        Refusal::NotMerged,
        Refusal::Nonsense,
        Refusal::Full,
    ] {
        assert_eq!(
            Frame::decode(&Frame::Refused(refusal).encode()[PREFIX_BYTES..]),
            Ok(Frame::Refused(refusal))
        );
    }
}
