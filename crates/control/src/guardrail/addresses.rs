//! Blocks of address ranges, judged by the number of addresses: a range names clients that its
//! author does not know.

use tidegate_rules::change::ChangeNeeds;
use tidegate_rules::{ADDRESS, AddressCover, Condition, Mode, Rule, RuleSet};

use super::Consent;
use super::rate::grouped;

/// Prefix lengths of the largest blocks that need no confirmation. Longer: more confirmations.
const CONFIRM_V4_PREFIX: u32 = 16;
const CONFIRM_V6_PREFIX: u32 = 32;

/// Prefix lengths of the largest blocks that need no approver. Longer: more approvals.
const APPROVE_V4_PREFIX: u32 = 8;
const APPROVE_V6_PREFIX: u32 = 16;

/// Bits of an IPv4 address, and of an IPv6 network that identifies a client.
const V4_BITS: u32 = 32;
const V6_BITS: u32 = 64;

/// IPv4 addresses up to which a block is not added to the other blocks of its author. All
/// emergencies of a store together then stay below the prefix that needs an approver.
const ALONE_V4_MAX: u64 = 1 << 8;
const ALONE_V6_MAX: u128 = 1 << 16;

/// Returns the consent that the blocks of an author need; `None` if they need none.
pub(crate) fn consent_of_blocks(blocked: &AddressCover) -> Option<Consent> {
    let (v4, v6) = (u128::from(blocked.v4_addresses()), blocked.v6_clients());
    let of = |needs: ChangeNeeds, v4_prefix: u32, v6_prefix: u32| {
        let (v4_max, v6_max) = (1_u128 << (V4_BITS - v4_prefix), 1_u128 << (V6_BITS - v6_prefix));
        let because = if v4 > v4_max {
            let (count, most) = (grouped(v4), grouped(v4_max));
            format!(
                "the blocks of its author cover {count} IPv4 addresses, more than the {most} of a \
                 /{v4_prefix}"
            )
        } else if v6 > v6_max {
            let (count, most) = (grouped(v6), grouped(v6_max));
            format!(
                "the blocks of its author cover {count} IPv6 /64 networks, more than the {most} of a \
                 /{v6_prefix}"
            )
        } else {
            return None;
        };
        Some(Consent { needs, because })
    };
    of(ChangeNeeds::Approver, APPROVE_V4_PREFIX, APPROVE_V6_PREFIX)
        .or_else(|| of(ChangeNeeds::Confirmation, CONFIRM_V4_PREFIX, CONFIRM_V6_PREFIX))
}

/// Whether a block is so small that the other blocks of its author do not matter.
pub(crate) fn is_small(blocked: &AddressCover) -> bool {
    blocked.v4_addresses() <= ALONE_V4_MAX && blocked.v6_clients() <= ALONE_V6_MAX
}

/// Returns the addresses that a rule blocks; `None` if it blocks no addresses, or only requests
/// with certain values of another dimension.
pub(crate) fn blocked_by(rule: &Rule) -> Option<AddressCover> {
    let is_block = rule.mode == Mode::Enforce && rule.limit.amount() == 0;
    if is_block { covered(&rule.when) } else { None }
}

/// Returns the addresses that conditions select.
fn covered(when: &[Condition]) -> Option<AddressCover> {
    let names_values = |condition: &Condition| {
        let is_literal =
            !condition.any_of.is_empty() && condition.any_of.iter().all(|pattern| !pattern.is_wild());
        *condition.dimension != *ADDRESS && is_literal
    };
    let mut addresses = when.iter().filter(|condition| *condition.dimension == *ADDRESS).peekable();
    if addresses.peek().is_none() || when.iter().any(names_values) {
        return None;
    }
    let mut cover = AddressCover::default();
    addresses.for_each(|condition| cover.add_condition(condition));
    Some(cover)
}

/// Returns the addresses that the rules of these names block.
pub(crate) fn blocked_by_rules(set: &RuleSet, is_meant: impl Fn(&str) -> bool) -> AddressCover {
    let mut blocked = AddressCover::default();
    let rules = set.rules().iter().filter(|rule| is_meant(&rule.name));
    rules.filter_map(blocked_by).for_each(|cover| blocked.extend(&cover));
    blocked
}
