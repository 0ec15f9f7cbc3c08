//! Limits that all regions count together.

use std::time::Duration;

use tidegate_testkit::{REGIONS, wait_until};

use crate::attack::{Attack, AttackResult, rate};
use crate::field::{FOR_EVER, TIME_MAX, is_long, lasts};
use crate::world::World;

/// What may pass in a second, and at once.
const RATE: u32 = 50;
const BURST: u32 = 100;

/// How much more than that is asked for.
const TIMES: u32 = 10;

/// By how much the rate in the long run may be passed.
const RATE_SLACK: f64 = 1.01;

/// The lag that bounds are printed for unless more is measured.
const LAG_MS: u64 = 500;

/// From when on the run is long, s.
const LONG_RUN: f64 = 10.0;

/// How long it may take from when a network is there again until every region counts on the whole, s, where a way takes no time: two rounds of
/// its replicators.
const WHOLE_SECONDS: f64 = 2.0 * 0.2;

/// How much longer where a way takes 80 ms: a round is over when it is acknowledged, so the second of them ends a round trip after it was due. What
/// takes time are five ways: who is there, the answer, what changed, that everybody is heard of, and what was used of standing parts.
const ROUND_TRIP_SECONDS: f64 = 2.0 * 0.08;

/// How much longer that takes for each connection that is lost meanwhile, as one answer in fifty is, s: a round until it is tried again, the
/// way of a greeting, its answer and what was lost.
const LOST_SECONDS: f64 = 0.2 + 3.0 * 0.08;

/// Of this nothing drains. A part of it is a third, and what is used of that is more than regions keep to themselves.
const QUIET: u64 = 300;
const QUIETLY_USED: u64 = 50;

fn rules() -> String {
    let rule = |name: &str, class: &str| {
        format!(
            "[[rules]]\nname='{name}'\nclass='{class}'\nregime='best_effort'\nkey=['{name}']\nlimit={}\nperiod='1m'\nburst={BURST}\n",
            RATE * 60
        )
    };
    let quiet = format!(
        "[[rules]]\nname='quiet'\nclass='cost'\nregime='best_effort'\nkey=['quiet']\nlimit={QUIET}\nperiod='{FOR_EVER}'\n"
    );
    [rule("security", "security"), rule("comfort", "comfort"), quiet].concat()
}

/// How long an attack or a cut lasts.
fn span() -> Duration {
    if is_long() { Duration::from_mins(1) } else { Duration::from_secs(8) }
}

/// What may have passed after so many seconds, if the limit may be passed by so much.
fn most(seconds: f64, surplus: u64) -> f64 {
    f64::from(BURST) + f64::from(RATE) * seconds + f64::from(u32::try_from(surplus).expect("small"))
}

fn count(admitted: &[f64]) -> f64 {
    f64::from(u32::try_from(admitted.len()).expect("few"))
}

#[test]
fn an_attack_on_all_regions_passes_what_is_printed_and_no_more() {
    let world = World::start(&rules(), 2, &[]);
    world.wait_for_connected(true);
    let attack = Attack::start(&world, "security", "mallory", RATE * TIMES);
    wait_until("all regions to count together", TIME_MAX, || {
        attack.sources().iter().all(|source| source == "global")
    });
    let lag = world.watch_lags(span());
    let AttackResult { admitted, seconds, sources } = attack.end();
    // Of what really happened: how late regions heard of each other, and whether one was on its part for a while.
    let parted = sources.contains("regional");
    let lag = lag.max(LAG_MS).to_string();
    let told = ["--nodes", "2", "--lag", &lag, "--lapses", "0", "--failovers", "0", "--outages", "0"];
    let bound = world.bound("security", &told);
    let surplus = bound[if parted { "total" } else { "steady" }].as_u64().expect("a number");
    let first = admitted.partition_point(|when| *when <= 5.0);
    let first = f64::from(u32::try_from(first).expect("few"));
    println!(
        "attack: {} passed in {seconds:.1} s at {TIMES} times {RATE}/s with a burst of {BURST}; at most {:.0} by the bound of {surplus} \
         with a lag of {lag} ms, answers by {sources:?}; {first} in the first 5 s, at most {:.0}",
        admitted.len(),
        most(seconds, surplus),
        most(5.0, surplus),
    );
    assert!(count(&admitted) <= most(seconds, surplus), "{} passed in {seconds} s", admitted.len());
    assert!(first <= most(5.0, surplus), "{first} passed in 5 s");
    // Where nothing passes nothing is passed, which says nothing of the limit.
    assert!(count(&admitted) >= f64::from(BURST), "{} passed in {seconds} s", admitted.len());
    if is_long() {
        let rate = rate(&admitted, LONG_RUN, seconds);
        println!("attack: {rate:.2}/s in the long run");
        assert!(rate <= f64::from(RATE) * RATE_SLACK, "{rate}");
    }
    for place in world.ground.places() {
        // On a busy machine the replicator is missed for a moment, and another one takes over.
        let abroad = world.abroad(place);
        let was_replicator = abroad["replicator"] == true || abroad["rounds"].as_u64() > Some(0);
        assert_eq!(
            was_replicator,
            world.ground.connections_of(place) > 0,
            "only replicators speak to others: {place:?}, {abroad}"
        );
    }
}

#[test]
fn nobody_is_locked_out_for_longer_than_is_owed_after_a_cut() {
    let world = World::start(&rules(), 1, &[]);
    world.wait_for_connected(true);
    let attack = Attack::start(&world, "comfort", "alice", RATE * TIMES);
    let rest_on = |what: &str, source: &str| {
        wait_until(what, TIME_MAX, || attack.sources().iter().all(|last| last == source));
    };
    rest_on("all regions to count together", "global");
    world.cut_off(0, true);
    rest_on("everybody to be on its part", "regional");
    lasts(span());
    world.cut_off(0, false);
    rest_on("all regions to count together again", "global");
    // Each side has heard of what the other used, and owes what that was too much.
    let AttackResult { admitted, .. } = attack.end();
    assert!(!admitted.is_empty());
    let bound = world.bound("comfort", &["--lapses", "0", "--failovers", "0", "--outages", "0"]);
    let owed = bound["total"].as_u64().expect("a number");
    let after = Attack::start(&world, "comfort", "alice", 3);
    wait_until("alice to pass everywhere", TIME_MAX, || {
        REGIONS.iter().enumerate().all(|(at, _)| world.remaining((at, 0), "comfort", "alice").0 > 0)
    });
    let seconds = after.seconds();
    let longest = most(0.0, owed) / f64::from(RATE);
    println!(
        "debt: {} passed through a cut; alice passes everywhere {seconds:.1} s after that; {owed} owed at most, which drain in {longest:.1} s",
        admitted.len()
    );
    assert!(seconds <= longest, "{seconds} s, and {longest} s would do");
}

#[test]
fn a_cut_leaves_each_side_its_part_and_is_made_up_for_when_it_heals() {
    let world = World::start(&rules(), 1, &[]);
    world.wait_for_connected(true);
    let bound = world.bound("security", &[]);
    let total = bound["total"].as_u64().expect("a number");
    let attack = Attack::start(&world, "security", "mallory", RATE * TIMES);
    wait_until("all regions to count together", TIME_MAX, || {
        attack.sources().iter().all(|source| source == "global")
    });
    world.cut_off(0, true);
    let cut = attack.seconds();
    // Also those that still hear each other: the third may be spending what they would.
    wait_until("everybody to be on its part", TIME_MAX, || {
        attack.sources().iter().all(|source| source == "regional")
    });
    let apart = attack.seconds();
    let mut client = world.client((0, 0));
    let used = (0..QUIETLY_USED).filter(|_| client.check(&[("quiet", "bob")], 1).allowed).count() as u64;
    assert_eq!(used, QUIETLY_USED);
    lasts(span());
    let healing = attack.seconds();
    let far = HealingTimes::wait_for(&world, &attack, || world.cut_off(0, false));
    // Nobody asks for it where it was used.
    wait_until("others to know what was used of a part", TIME_MAX, || {
        (1..REGIONS.len()).all(|at| world.remaining((at, 0), "quiet", "bob").0 == QUIET - QUIETLY_USED)
    });
    // Once more where a way takes no time: what is left is what replicators take themselves.
    world.cut_off(0, true);
    wait_until("everybody to be on its part again", TIME_MAX, || {
        attack.sources().iter().all(|source| source == "regional")
    });
    let near = HealingTimes::wait_for(&world, &attack, || world.ground.restore());
    let AttackResult { admitted, seconds, .. } = attack.end();
    let between = |from: f64, to: f64| {
        admitted.partition_point(|when| *when <= to) - admitted.partition_point(|when| *when <= from)
    };
    println!(
        "cut: {} passed in {seconds:.1} s, at most {:.0}; apart {:.1} s after the cut, where {} passed in {:.1} s\n\
         cut: regions 80 ms from each other: {far}\ncut: regions beside each other: {near}",
        admitted.len(),
        most(seconds, total),
        apart - cut,
        between(apart, healing),
        healing - apart,
    );
    assert!(count(&admitted) <= most(seconds, total));
    let passed = f64::from(u32::try_from(between(apart, healing)).expect("few"));
    let burst = f64::from(BURST);
    assert!(passed <= burst + f64::from(RATE) * (healing - apart), "parts are together the whole: {passed}");
    assert!(passed > 0.0, "who is cut off goes on with its part");
    // A machine that is busy with other tests takes longer.
    if is_long() {
        let lost = LOST_SECONDS * f64::from(far.lost);
        assert!(far.whole <= WHOLE_SECONDS + ROUND_TRIP_SECONDS + lost, "80 ms from each other: {far}");
        assert!(near.whole <= WHOLE_SECONDS, "beside each other: {near}");
    }
}

/// How regions became one again, in seconds from when the network between them was there again.
struct HealingTimes {
    /// Until all replicators were connected.
    linked: f64,
    /// Until every region counted on the whole.
    whole: f64,
    /// Until every client of an attack had heard so.
    heard: f64,
    /// Connections that were lost until all counted on the whole.
    lost: u32,
}

impl HealingTimes {
    fn wait_for(world: &World, attack: &Attack, heal: impl FnOnce()) -> Self {
        let (lost, from) = (world.lost(), attack.seconds());
        heal();
        world.wait_for_links();
        let linked = attack.seconds() - from;
        world.wait_for_connected(true);
        let (whole, lost) = (attack.seconds() - from, world.lost() - lost);
        wait_until("all regions to count together again", TIME_MAX, || {
            attack.sources().iter().all(|source| source == "global")
        });
        Self { linked, whole, heard: attack.seconds() - from, lost }
    }
}

impl std::fmt::Display for HealingTimes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { linked, whole, heard, lost } = self;
        write!(
            f,
            "after the network was there again, replicators were connected in {linked:.2} s, all regions counted on the whole in {whole:.2} s, \
             and every client had heard so in {heard:.2} s; {lost} connections were lost meanwhile"
        )
    }
}
