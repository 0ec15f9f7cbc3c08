//! Not built yet.

use super::{Answer, Asked, not_found};

pub(super) fn answer(asked: &Asked<'_>) -> Answer {
    not_found(asked)
}
