//! Limits that all regions count together.

use std::time::Duration;

use tidegate_testkit::{REGIONS, wait_until};

use crate::attack::{Attack, AttackResult, rate};
use crate::client::{FOR_EVER, TIME_MAX, is_long, lasts};
use crate::world::World;

/// Units per second, and burst.
const RATE: u32 = 50;
const BURST: u32 = 100;

/// Rate of the requests, in multiples of the limit.
const TIMES: u32 = 10;

/// By how much the rate in the long run may be passed.
const RATE_SLACK: f64 = 1.01;

/// The lag that bounds are printed for unless more is measured.
const LAG_MS: u64 = 500;

/// From when on the run is long, s.
const LONG_RUN: f64 = 10.0;

/// Maximum time from the repair of a network until every region is connected, s, without delay
/// between regions: two replication rounds.
const WHOLE_SECONDS: f64 = 2.0 * 0.2;

/// Additional time with 80 ms one way. A round ends with its acknowledgement, so the second round
/// ends one round trip late. The whole takes five one-way trips: greeting, reply, changes, the
/// notice that every peer is heard, and the usage of regional shares.
const ROUND_TRIP_SECONDS: f64 = 2.0 * 0.08;

/// Additional time for each connection lost meanwhile, s; one reply in fifty is lost. It covers one
/// round until the retry, and the trips of greeting, reply and lost message.
const LOST_SECONDS: f64 = 0.2 + 3.0 * 0.08;

/// A limit of which nothing drains. The regional share is a third, and the usage of it is above the
/// publish threshold.
const QUIET: u64 = 300;
const QUIETLY_USED: u64 = 50;

fn rules() -> String {
    let rule = |name: &str, class: &str| {
        format!(
            "[[rules]]\nname='{name}'\nclass='{class}'\nregime='best_effort'\n\
             key=['{name}']\nlimit={}\nperiod='1m'\nburst={BURST}\n",
            RATE * 60
        )
    };
    let quiet = format!(
        "[[rules]]\nname='quiet'\nclass='cost'\nregime='best_effort'\n\
         key=['quiet']\nlimit={QUIET}\nperiod='{FOR_EVER}'\n"
    );
    [rule("security", "security"), rule("comfort", "comfort"), quiet].concat()
}

/// How long an attack or a cut lasts.
fn span() -> Duration {
    if is_long() { Duration::from_mins(1) } else { Duration::from_secs(8) }
}

/// Returns the maximum of admitted units after this time, with this over-admission.
fn most(seconds: f64, surplus: u64) -> f64 {
    f64::from(BURST) + f64::from(RATE) * seconds + f64::from(u32::try_from(surplus).expect("small"))
}

fn count(admitted: &[f64]) -> f64 {
    f64::from(u32::try_from(admitted.len()).expect("few"))
}

#[test]
fn attack_on_all_regions_stays_within_the_printed_bound() {
    let world = World::start(&rules(), 2, &[]);
    world.wait_for_connected(true);
    let attack = Attack::start(&world, "security", "mallory", RATE * TIMES);
    wait_until("all regions to count together", TIME_MAX, || {
        attack.sources().iter().all(|source| source == "global")
    });
    let lag = world.watch_lags(span());
    let AttackResult { admitted, seconds, sources } = attack.end();
    // The bound is for the actual run: the measured lag, and whether a region was isolated for a
    // while.
    let parted = sources.contains("regional");
    let lag = lag.max(LAG_MS).to_string();
    let told = ["--nodes", "2", "--lag", &lag, "--lapses", "0", "--failovers", "0", "--outages", "0"];
    let bound = world.bound("security", &told);
    let surplus = bound[if parted { "total" } else { "steady" }].as_u64().expect("a number");
    let first = admitted.partition_point(|when| *when <= 5.0);
    let first = f64::from(u32::try_from(first).expect("few"));
    println!(
        "attack: {} passed in {seconds:.1} s at {TIMES} times {RATE}/s with a burst of {BURST}; \
         at most {:.0} by the bound of {surplus} \
         with a lag of {lag} ms, answers by {sources:?}; {first} in the first 5 s, at most {:.0}",
        admitted.len(),
        most(seconds, surplus),
        most(5.0, surplus),
    );
    assert!(count(&admitted) <= most(seconds, surplus), "{} passed in {seconds} s", admitted.len());
    assert!(first <= most(5.0, surplus), "{first} passed in 5 s");
    // A run without admissions would prove nothing about the limit.
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
fn lockout_after_a_cut_lasts_no_longer_than_the_debt() {
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
    // Each side has received the other's usage, and has the excess as a debt.
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
        "debt: {} passed through a cut; alice passes everywhere {seconds:.1} s after that; \
         {owed} owed at most, which drain in {longest:.1} s",
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
    // Regions that still hear each other isolate too: the third may be spending the same units.
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
    // In the region that used it, the key has no further requests.
    wait_until("others to know what was used of a part", TIME_MAX, || {
        (1..REGIONS.len()).all(|at| world.remaining((at, 0), "quiet", "bob").0 == QUIET - QUIETLY_USED)
    });
    // Again without delay between regions: only the time of the replicators remains.
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
    /// Until every region was connected.
    whole: f64,
    /// Until every client of the attack had a reply that shows it.
    heard: f64,
    /// Connections lost until all regions were connected.
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
            "after the network was there again, replicators were connected in {linked:.2} s, \
             all regions counted on the whole in {whole:.2} s, \
             and every client had heard so in {heard:.2} s; {lost} connections were lost meanwhile"
        )
    }
}
