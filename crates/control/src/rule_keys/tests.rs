//! Samples of keys: exact while small, bounded when large.

use super::*;

fn memory() -> KeyMemory {
    KeyMemory::new(["acme", "globex"])
}

fn note(keys: &RuleKeys, memory: &KeyMemory, tenant: &str, range: std::ops::Range<u32>) {
    for key in range {
        keys.note(memory, (tenant, [&*key.to_string()]), KeyOutcome::Allowed);
    }
}

fn slots(keys: &RuleKeys) -> usize {
    keys.tenants().iter().map(|known| known.sample.slots().slots.len()).sum()
}

#[test]
fn a_key_leaves_one_mark_in_a_look_and_small_numbers_are_exact() {
    let (memory, keys) = (memory(), RuleKeys::default());
    for _ in 0..1_000 {
        keys.note(&memory, ("acme", ["bob"]), KeyOutcome::Denied);
    }
    assert_eq!(keys.of_present_look(), (0, 1));
    note(&keys, &memory, "acme", 0..500);
    note(&keys, &memory, "globex", 0..3);
    assert_eq!(keys.of_present_look(), (503, 1));
    keys.end_look();
    assert_eq!(keys.of_present_look(), (0, 0));
}

/// A million keys of a tenant use a sample of 1,024 slots, about 32 KB.
#[test]
fn a_million_keys_use_bounded_memory_and_leave_a_fair_sample() {
    let (memory, keys) = (memory(), RuleKeys::default());
    note(&keys, &memory, "acme", 0..1_000_000);
    assert_eq!(slots(&keys), SAMPLE_SLOTS_MAX);
    assert_eq!(memory.free("acme"), SLOTS_MAX / 2 - SAMPLE_SLOTS_MAX);
    let (sampled, _) = keys.of_present_look();
    assert!((300..=768).contains(&sampled), "{sampled}");
    note(&keys, &memory, "globex", 0..10);
    assert_eq!(keys.of_present_look().0, sampled + 10, "of another tenant it is exact");
    for _ in 0..LOOKS_KEPT {
        keys.end_look();
    }
    assert!(keys.is_empty());
    assert_eq!(memory.free("acme"), SLOTS_MAX / 2, "all memory is returned");
}

#[test]
fn rules_of_a_tenant_share_its_slots_and_leave_others_theirs() {
    let memory = memory();
    let rules: Vec<RuleKeys> = std::iter::repeat_with(RuleKeys::default).take(40_000).collect();
    for keys in &rules {
        note(keys, &memory, "acme", 0..1);
    }
    assert_eq!(memory.free("acme"), 0);
    assert_eq!(rules.iter().map(slots).sum::<usize>(), SLOTS_MAX / 2);
    assert!(rules.last().is_some_and(RuleKeys::is_empty), "there is no room for a sample");
    let full = rules.first().expect("a rule");
    note(full, &memory, "acme", 0..1_000);
    assert_eq!(slots(full), SAMPLE_SLOTS_MIN, "without room a sample is thinned");
    let other = RuleKeys::default();
    note(&other, &memory, "globex", 0..500);
    assert_eq!(other.of_present_look().0, 500);
}

#[test]
fn large_samples_leave_a_part_of_the_share_for_small_ones() {
    let memory = memory();
    let rules: Vec<RuleKeys> = std::iter::repeat_with(RuleKeys::default).take(600).collect();
    for keys in &rules {
        note(keys, &memory, "acme", 0..2_000);
    }
    let reserved = SLOTS_MAX / 2 / RESERVED_PART;
    assert!((reserved - 600 * SAMPLE_SLOTS_MIN..=reserved).contains(&memory.free("acme")));
    assert!(rules.iter().all(|keys| !keys.is_empty() && !keys.is_without_memory()));
    let (without, full) = (RuleKeys::default(), KeyMemory::new(["acme"]));
    assert!(full.share("acme").expect("a share").take(SLOTS_MAX));
    note(&without, &full, "acme", 0..1);
    assert!(without.is_empty() && without.is_without_memory());
}

#[test]
fn a_key_is_denied_by_the_last_emergency_only() {
    let (memory, keys) = (memory(), RuleKeys::default());
    let [large, small] = ["large", "small"].map(EmergencyTag::of);
    note(&keys, &memory, "acme", 0..20);
    keys.end_look();
    let block = |tag: EmergencyTag, range: std::ops::Range<u32>| {
        for key in range {
            keys.note(&memory, ("acme", [&*key.to_string()]), KeyOutcome::DeniedByEmergency(tag));
        }
    };
    let denied = || {
        let sample = &keys.tenants()[0].sample;
        let mut counts = HashMap::new();
        sample.count_blocked(&mut counts);
        let of = |tag: EmergencyTag| counts.get(&tag).copied().unwrap_or_default();
        ([large, small].map(|tag| sample.blocked(tag, 1).denied), [large, small].map(of))
    };
    block(large, 0..20);
    block(small, 0..1);
    assert_eq!(denied(), ([19, 1], [19, 1]));
    (0..LOOKS_PER_MINUTE).for_each(|_| keys.end_look());
    assert_eq!(denied().0, [0, 0]);
}

#[test]
fn a_held_sample_keeps_its_keys_under_a_flood() {
    let (memory, keys) = (memory(), RuleKeys::default());
    note(&keys, &memory, "acme", 0..100);
    let sample = Arc::clone(&keys.tenants()[0].sample);
    let held = sample.hold();
    keys.end_look();
    note(&keys, &memory, "acme", 0..100_000);
    assert_eq!(keys.of_present_look().0, 100);
    (0..LOOKS_KEPT).for_each(|_| keys.end_look());
    assert!(Arc::ptr_eq(&held, &sample.slots()), "the slots stay where they are");
    sample.release();
    keys.end_look();
    assert!(keys.is_empty());
}

#[test]
fn marks_of_replaced_rules_belong_to_the_look_before() {
    let (memory, keys) = (memory(), RuleKeys::default());
    note(&keys, &memory, "acme", 0..1);
    keys.fold_look();
    let slots = keys.tenants()[0].sample.slots();
    assert_eq!(slots.used().map(KeySlot::allowed).collect::<Vec<_>>(), [2]);
    let next = RuleKeys::default();
    next.adopt(&keys);
    note(&next, &memory, "acme", 0..1);
    assert_eq!(slots.used().map(KeySlot::allowed).collect::<Vec<_>>(), [3]);
}

#[test]
fn joined_parts_do_not_collide() {
    let memory = memory();
    assert_ne!(memory.hash(["a-b", "c"]), memory.hash(["a", "b-c"]));
    assert_ne!(memory.hash(["a"]), KeyMemory::new(["acme"]).hash(["a"]));
}
