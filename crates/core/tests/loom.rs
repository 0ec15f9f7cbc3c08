//! Every schedule of a few threads on the table, explored by loom.
//!
//! Run with `cargo xtask loom`. The clock stands still, so that admitted units can be counted
//! exactly.
#![cfg(loom)]

use std::time::Duration;

use loom::sync::Arc;
use loom::thread;
use tidegate_core::{
    Check, CheckOutcome, DecidingMeter, GrantUpdate, KeySpace, Limit, Now, RequestVerdict, Secret, Shares,
    Table, Verdict,
};

const NOW: Now = Now::from_micros(1_000_000, 1_000_000);

/// One table, one limit, and the keys that the threads fight over.
struct World {
    table: Table,
    limit: Limit,
    space: KeySpace,
}

impl World {
    fn new(limit: u64, lines: usize) -> Arc<Self> {
        let table = Table::new(lines * 64, &Shares::single()).expect("a few lines");
        let limit = Limit::gcra(limit, Duration::from_secs(1)).expect("in range");
        let space = KeySpace::new(&Secret::from_bytes([1; 16]), Shares::FIRST, "loom");
        Arc::new(Self { table, limit, space })
    }

    /// A limit that an origin keeps, and a grant of it on the key `a`.
    fn granted(grant: u64) -> Arc<Self> {
        let table = Table::new(4 * 64, &Shares::single()).expect("a few lines");
        let limit = Limit::gcra(10, Duration::from_secs(1)).expect("in range").at_origin();
        let space = KeySpace::new(&Secret::from_bytes([1; 16]), Shares::FIRST, "loom");
        let world = Arc::new(Self { table, limit, space });
        world.hear("a", grant);
        world
    }

    fn hear(&self, key: &str, grant: u64) {
        let word =
            GrantUpdate { sent_us: NOW.mono_us(), grant, life_us: 1_000_000, ..GrantUpdate::default() };
        assert!(self.table.apply_grant(NOW, &self.ask(key, 0), &word), "there is room");
    }

    /// Reports the usage, and keeps `keep` units to spend.
    fn report(&self, key: &str, keep: u64) -> u64 {
        self.table.take_report(NOW, &self.ask(key, 0), keep).used
    }

    fn ask(&self, key: &str, cost: u64) -> Check<'_> {
        Check { limit: &self.limit, space: &self.space, digest: self.space.digest(&[key.as_bytes()]), cost }
    }

    fn check(&self, key: &str, cost: u64) -> bool {
        self.table.check(NOW, &self.ask(key, cost)).verdict.is_allowed()
    }

    fn reserve(&self, key: &str, cost: u64) -> CheckOutcome {
        self.table.reserve(NOW, &self.ask(key, cost))
    }

    fn rollback(&self, key: &str, cost: u64, answer: CheckOutcome) {
        self.table.rollback(NOW, &self.ask(key, cost), answer.source);
    }

    fn commit(&self, key: &str, cost: u64, answer: CheckOutcome) {
        self.table.commit(NOW, &self.ask(key, cost), answer.source, cost);
    }

    fn merge(&self, key: &str, used: u64) {
        self.table.merge(NOW, &self.ask(key, used));
    }

    fn used(&self, key: &str) -> u64 {
        self.table.used(NOW, &self.ask(key, 0))
    }

    fn look(&self, key: &str) -> Verdict {
        self.table.check(NOW, &self.ask(key, 0)).verdict
    }

    fn remaining(&self, key: &str) -> u32 {
        self.look(key).remaining()
    }

    fn check_both(&self, keys: [&str; 2]) -> bool {
        let asks = keys.map(|key| self.ask(key, 1));
        let unasked = CheckOutcome {
            verdict: Verdict::Allow { remaining: 0, reset_after_us: 0 },
            source: DecidingMeter::Own,
        };
        self.table.check_all(NOW, &asks, &mut [unasked; 2]) == Ok(RequestVerdict::Allowed)
    }
}

/// Runs `model` under every schedule and prints how many there are.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    explore_with(loom::model::Builder::new(), model);
}

/// Runs `model` under every schedule with at most `preemptions` switches away from a thread that
/// could go on. For models of so many steps that all their schedules would take days; three
/// switches find nearly every race.
fn explore_within(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    explore_with(builder, model);
}

fn explore_with(builder: loom::model::Builder, model: impl Fn() + Sync + Send + 'static) {
    use std::sync::atomic::{AtomicU64, Ordering};
    let schedules = std::sync::Arc::new(AtomicU64::new(0));
    let counter = std::sync::Arc::clone(&schedules);
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let explored = schedules.load(Ordering::Relaxed);
    println!("{explored} schedules");
    assert!(explored > 100, "the threads never met");
}

fn spawn<T: 'static>(world: &Arc<World>, act: impl FnOnce(&World) -> T + 'static) -> thread::JoinHandle<T> {
    let world = Arc::clone(world);
    thread::spawn(move || act(&world))
}

/// Creates the meter, so that the threads race on it and not on its creation.
fn with_meter(world: &World, key: &str) {
    world.table.charge(NOW, &world.ask(key, 1));
}

#[test]
fn a_rollback_never_takes_a_merge_away() {
    explore(|| {
        let world = World::new(10, 4);
        with_meter(&world, "key");
        let reserving = spawn(&world, |world| {
            let answer = world.reserve("key", 3);
            if answer.verdict.is_allowed() {
                world.rollback("key", 3, answer);
            }
        });
        world.merge("key", 6);
        reserving.join().expect("no panic");
        assert_eq!(world.used("key"), 6, "a merge was lost");
        assert_eq!(world.remaining("key"), 4, "a reservation was left behind");
    });
}

#[test]
fn a_commit_adds_to_a_merge_or_is_covered_by_it() {
    explore(|| {
        let world = World::new(10, 4);
        with_meter(&world, "key");
        let reserving = spawn(&world, |world| {
            let answer = world.reserve("key", 3);
            if answer.verdict.is_allowed() {
                world.commit("key", 3, answer);
            }
        });
        world.merge("key", 6);
        reserving.join().expect("no panic");
        let used = world.used("key");
        // Merged before the commit: 6 + 3. After it: the merged 6 covers the 4 that were there.
        assert!(used == 9 || used == 6, "used {used}");
        assert_eq!(u64::from(world.remaining("key")), 10 - used);
    });
}

#[test]
fn a_reservation_is_never_visible_as_use() {
    explore(|| {
        let world = World::new(10, 4);
        with_meter(&world, "key");
        let looking = spawn(&world, |world| world.used("key"));
        assert!(world.reserve("key", 3).verdict.is_allowed());
        assert_eq!(looking.join().expect("no panic"), 1);
        assert_eq!((world.used("key"), world.remaining("key")), (1, 6));
    });
}

#[test]
fn a_look_during_a_rollback_sees_it_whole_or_not_at_all() {
    explore(|| {
        let world = World::new(10, 4);
        with_meter(&world, "key");
        let answer = world.reserve("key", 3);
        let looking = spawn(&world, |world| world.remaining("key"));
        world.rollback("key", 3, answer);
        let remaining = looking.join().expect("no panic");
        assert!(remaining == 6 || remaining == 9, "{remaining}");
        assert_eq!((world.used("key"), world.remaining("key")), (1, 9));
    });
}

#[test]
fn a_look_during_a_charge_sees_it_whole_or_not_at_all() {
    explore(|| {
        // Sevenths of a second change both the whole and the fraction of the arrival time.
        let world = World::new(7, 4);
        with_meter(&world, "key");
        let looking = spawn(&world, |world| world.look("key"));
        let before = world.look("key");
        assert!(world.check("key", 1));
        let seen = looking.join().expect("no panic");
        assert!(seen == before || seen == world.look("key"), "{seen:?}");
    });
}

#[test]
fn two_reservations_never_hold_more_than_there_is() {
    explore(|| {
        let world = World::new(5, 4);
        with_meter(&world, "key");
        let other = spawn(&world, |world| world.reserve("key", 3));
        let mine = world.reserve("key", 3);
        let other = other.join().expect("no panic");
        assert!(mine.verdict.is_allowed() != other.verdict.is_allowed(), "4 are free: one of the two fits");
        if mine.verdict.is_allowed() {
            world.commit("key", 3, mine);
        } else {
            world.commit("key", 3, other);
        }
        assert_eq!((world.used("key"), world.remaining("key")), (4, 1));
    });
}

#[test]
fn the_last_unit_goes_to_one_of_two() {
    explore(|| {
        let world = World::new(2, 4);
        with_meter(&world, "key");
        let other = spawn(&world, |world| world.check("key", 1));
        let mine = world.check("key", 1);
        assert!(mine != other.join().expect("no panic"));
        assert_eq!(world.used("key"), 2);
    });
}

#[test]
fn a_key_that_two_threads_make_at_once_has_one_meter() {
    explore(|| {
        let world = World::new(1, 4);
        let other = spawn(&world, |world| world.check("key", 1));
        let mine = world.check("key", 1);
        assert!(mine != other.join().expect("no panic"));
        assert_eq!(world.table.stats(Shares::FIRST).live, 1);
    });
}

#[test]
fn two_requests_in_opposite_order_are_all_or_nothing() {
    explore_within(3, || {
        let world = World::new(2, 4);
        with_meter(&world, "a");
        with_meter(&world, "b");
        let other = spawn(&world, |world| world.check_both(["b", "a"]));
        let mine = world.check_both(["a", "b"]);
        assert!(mine != other.join().expect("no panic"), "one unit of each is left: one request fits");
        assert_eq!((world.used("a"), world.used("b")), (2, 2));
    });
}

#[test]
fn denied_request_leaves_no_trace_under_concurrency() {
    explore_within(3, || {
        let world = World::new(2, 4);
        with_meter(&world, "a");
        world.table.charge(NOW, &world.ask("full", 2));
        let denied = spawn(&world, |world| world.check_both(["a", "full"]));
        assert!(world.check("a", 1), "denied by a request that was denied itself");
        assert!(!denied.join().expect("no panic"));
        assert_eq!((world.used("a"), world.used("full")), (2, 2));
    });
}

/// A limit of ten, and four keys in the four slots that there are: all used up but `loose`, which
/// has used one. Which slot `loose` lies in depends on the order in which the keys came.
fn full_house(order: [&str; 4]) -> Arc<World> {
    let world = World::new(10, 4);
    for key in order {
        assert!(world.check(key, if key == "loose" { 1 } else { 10 }));
    }
    world
}

#[test]
fn a_key_that_lies_away_from_home_has_one_meter() {
    explore(|| {
        let world = World::new(1, 4);
        assert!(world.check("a", 1) && world.check("b", 1), "the home line is full");
        let other = spawn(&world, |world| world.check("further", 1));
        let mine = world.check("further", 1);
        assert!(mine != other.join().expect("no panic"));
        assert_eq!(world.table.stats(Shares::FIRST).live, 3);
    });
}

#[test]
fn a_key_at_its_limit_survives_newcomers() {
    explore_within(3, || {
        let world = full_house(["a", "b", "c", "loose"]);
        let offender = spawn(&world, |world| world.check("a", 1));
        // The first takes the place of the loose key, the second finds all others at their limit.
        assert!(world.check("new", 10) && world.check("newer", 1));
        assert!(!offender.join().expect("no panic"), "the newcomers set an offender free");
        assert!(["a", "b", "c", "new"].iter().all(|key| !world.check(key, 1)));
        assert_eq!(world.table.stats(Shares::FIRST).spilled, 1);
    });
}

#[test]
fn a_newcomer_does_not_take_the_place_of_a_meter_that_changed_meanwhile() {
    explore_within(3, || {
        let world = full_house(["a", "b", "loose", "c"]);
        let newcomer = spawn(&world, |world| world.check("new", 1));
        let filled = world.table.check(NOW, &world.ask("loose", 9)).verdict;
        assert!(newcomer.join().expect("no panic"));
        // If nothing remains, the check filled the old meter, and that is kept. Otherwise the
        // newcomer came first, and the check filled a new meter.
        if filled.is_allowed() && filled.remaining() == 0 {
            assert_eq!(world.used("loose"), 10, "forgotten at its limit");
        }
    });
}

#[test]
fn a_grant_is_spent_once() {
    explore(|| {
        let world = World::granted(1);
        let other = spawn(&world, |world| world.check("a", 1));
        let mine = world.check("a", 1);
        assert!(mine != other.join().expect("no panic"));
        assert_eq!(world.report("a", 0), 1);
    });
}

#[test]
fn usage_during_a_report_is_reported_once_from_the_new_grant() {
    explore_within(3, || {
        let world = World::granted(2);
        let spender = spawn(&world, |world| u64::from(world.check("a", 1)) + u64::from(world.check("a", 1)));
        let reported = world.report("a", 1);
        world.hear("a", 1);
        let spent = spender.join().expect("no panic");
        let rest = world.report("a", 0);
        assert_eq!(reported + rest, spent, "lost, or reported twice");
        assert!(rest <= 1, "spent beyond the new grant");
        assert!(!world.check("a", 1), "a returned grant is not spent");
    });
}

#[test]
fn concurrent_reports_split_the_usage() {
    explore_within(3, || {
        let world = World::granted(2);
        assert!(world.check("a", 1));
        let other = spawn(&world, |world| world.report("a", 1));
        let spent = 1 + u64::from(world.check("a", 1));
        let mine = world.report("a", 1);
        assert_eq!(mine + other.join().expect("no panic"), spent);
    });
}
