//! The reason of a decision, for answers and decision records: a limit, a block, an outage or
//! overload.

use tidegate::region::MissingReply;
use tidegate_core::DecisionSource;

/// The reason of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecisionReason {
    /// The limits that apply decided, as usual.
    Limit,
    /// An emergency with the action `block` denied the request.
    Block,
    /// The origin did not reply in time, or had no room for the key: the fallback decided.
    OriginUnreachable,
    /// The owner region of a `strict` limit did not reply in time.
    OwnerUnreachable,
    /// No meter had room, or too many rules apply.
    NoRoom,
    /// The server is overloaded.
    Shed,
}

impl DecisionReason {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Block => "block",
            Self::OriginUnreachable => "origin_unreachable",
            Self::OwnerUnreachable => "owner_unreachable",
            Self::NoRoom => "no_room",
            Self::Shed => "shed",
        }
    }

    /// Returns the reason as answers and records have it. A request that its limits let pass has
    /// none.
    pub(crate) fn unless_passed(self, is_allowed: bool) -> Option<&'static str> {
        (!is_allowed || self != Self::Limit).then(|| self.as_str())
    }

    /// Returns the reason of a decision with this source. Without the reply of the origin or of the
    /// owner region, the fallback decided.
    pub(crate) fn of(source: DecisionSource, missing_reply: Option<MissingReply>) -> Self {
        match (source, missing_reply) {
            (DecisionSource::Shed, _) => Self::Shed,
            (DecisionSource::Refused, _) => Self::NoRoom,
            (_, Some(MissingReply::Origin)) => Self::OriginUnreachable,
            (_, Some(MissingReply::Owner)) => Self::OwnerUnreachable,
            (_, None) => Self::Limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_reply_is_an_outage() {
        let reason = |source, missing_reply| DecisionReason::of(source, missing_reply).as_str();
        assert_eq!(reason(DecisionSource::Local, None), "limit");
        assert_eq!(reason(DecisionSource::Local, Some(MissingReply::Origin)), "origin_unreachable");
        assert_eq!(reason(DecisionSource::Open, Some(MissingReply::Origin)), "origin_unreachable");
        assert_eq!(reason(DecisionSource::Regional, None), "limit");
        assert_eq!(reason(DecisionSource::Refused, None), "no_room");
        assert_eq!(reason(DecisionSource::Shed, None), "shed");
        assert_eq!(DecisionSource::Shed.as_str(), tidegate_record::SHED_SOURCE, "back-tests skip these");
        assert_eq!(reason(DecisionSource::Closed, Some(MissingReply::Owner)), "owner_unreachable");
    }

    #[test]
    fn limits_are_no_reason_to_pass() {
        assert_eq!(DecisionReason::Limit.unless_passed(true), None);
        assert_eq!(DecisionReason::Limit.unless_passed(false), Some("limit"));
        assert_eq!(DecisionReason::OriginUnreachable.unless_passed(true), Some("origin_unreachable"));
    }
}
