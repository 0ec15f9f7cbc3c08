//! The one way in which the oracle finds a time: it tests the exact predicate, and never solves for
//! it.

use crate::exact::later;

/// The smallest `w` for which `holds`, given that it holds for every later one too and for some `w`
/// below 2^63.
pub(crate) fn smallest(holds: impl Fn(u64) -> bool) -> u64 {
    if holds(0) {
        return 0;
    }
    let (mut fails, mut passes) = (0, 1);
    while !holds(passes) {
        (fails, passes) = (passes, later(passes, passes));
    }
    while passes - fails > 1 {
        let middle = fails + (passes - fails) / 2;
        if holds(middle) { passes = middle } else { fails = middle }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_edge_is_found() {
        for edge in (0..70).chain([127, 128, 129, 1_000_003, (1 << 50) - 1, 1 << 50, (1 << 50) + 1]) {
            assert_eq!(smallest(|w| w >= edge), edge);
        }
    }
}
