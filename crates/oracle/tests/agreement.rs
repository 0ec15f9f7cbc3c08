//! The product agrees with the oracle, on enough decisions of every kind to be meaningful.

#![expect(clippy::panic, reason = "a helper of tests may panic as a test may")]

use tidegate_core::Meter;
use tidegate_oracle::{Bucket, Cells, Level, Plan, Totals, campaign};

fn plan(seed: u64, decisions: u64) -> Plan {
    Plan { seed, decisions, threads: 1 }
}

fn agree<L: Level>(plan: &Plan) -> Totals {
    campaign::<L, Meter>(plan, |_| ()).unwrap_or_else(|report| panic!("{report}"))
}

fn compare_200_000<L: Level>() {
    let mut all = Totals::default();
    for seed in [1, 7, 1 << 40, u64::MAX] {
        all += agree::<L>(&plan(seed, 50_000));
    }
    assert_eq!(all.decisions, 200_000);
    assert_eq!(all.allowed + all.later + all.never, all.decisions);
    assert!(all.allowed > 60_000 && all.later > 30_000 && all.never > 10_000, "{all:?}");
    assert!(all.probes > 2 * all.decisions, "{all:?}");
    assert!(all.histories > 2_000, "{all:?}");
}

#[test]
fn gcra() {
    compare_200_000::<Bucket>();
}

#[test]
fn window() {
    compare_200_000::<Cells>();
}

#[test]
fn compared_sequence_depends_only_on_the_seed() {
    let one = plan(3, 5_000);
    let two = Plan { threads: 2, ..one };
    assert_eq!(agree::<Bucket>(&one), agree::<Bucket>(&two));
    assert_ne!(agree::<Bucket>(&one), agree::<Bucket>(&plan(4, 5_000)));
}
