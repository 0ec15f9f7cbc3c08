//! The origin charges exactly the units that clients were admitted, under every fault.

use std::time::Duration;

use tidegate_testkit::{
    APPEND_ONLY, Cluster, Proxy, Redis, Server, ServerFleet, Signal, Traffic, ask, wait_until,
};

use crate::client::{FOR_EVER, TIME_MAX, is_long, lasts, metric, start_region};
use crate::load::{COST_MAX, Load, LoadTally};
use crate::meters::{MeterSums, assert_all_end, commands, meter_keys};

/// One rule for each class that is never reached, and one that is.
const KINDS: &[&str] = &["comfort", "cost", "security", "reached", "guarded"];

/// Kinds for which a late report is charged whenever it arrives.
const FORGIVING: [&str; 3] = ["comfort", "cost", "reached"];

/// Limit of the rules that are reached, for each key.
const REACHED: u64 = 600;

/// Values of each dimension.
const KEYS: usize = 3;

/// Decisions for each kind of request before and after a fault.
const ENOUGH: u64 = 100;

/// Time for which the store is stopped in the long form.
const LONG_STALL: Duration = Duration::from_secs(30);

fn rules() -> String {
    let rule = |name: &str, class: &str, limit: u64| {
        format!(
            "[[rules]]\nname='{name}'\nclass='{class}'\nkey=['{name}']\nlimit={limit}\nperiod='{FOR_EVER}'\n"
        )
    };
    let far = 4_000_000;
    [
        rule("comfort", "comfort", far),
        rule("cost", "cost", far),
        rule("security", "security", far),
        rule("reached", "comfort", REACHED),
        rule("guarded", "security", REACHED),
    ]
    .concat()
}

/// The same rules, with each meter placed by its own key.
fn scattered() -> String {
    format!("placement = 'nobody'\n{}", rules())
}

/// Maximum of granted `security` units when servers stop. Half a minute later there would be none.
const HELD_AT_LAST: u64 = 64;

/// Returns the unspent units of `security` limits that the origin may count as used: lapsed grants
/// that the servers reported late.
fn lapsed<'n>(nodes: impl IntoIterator<Item = &'n Server>) -> u64 {
    nodes.into_iter().map(|node| metric(node, "tidegate_origin_lapsed_total")).sum()
}

/// Returns the units that nodes have as grants under `security` limits.
fn held_of_guarded<'s>(servers: &(impl IntoIterator<Item = &'s Redis> + Clone)) -> u64 {
    let held = |kind: &&str| MeterSums::of(servers.clone(), kind).holders.values().sum::<u64>();
    KINDS.iter().filter(|kind| !FORGIVING.contains(kind)).map(held).sum()
}

/// Returns the units charged under `security` limits beyond the admitted ones. Panics if fewer were
/// charged than admitted.
fn charged_for_nothing<'s>(
    tally: &LoadTally,
    servers: &(impl IntoIterator<Item = &'s Redis> + Clone),
) -> u64 {
    let more = |kind: &&str| {
        let (held, granted) = (MeterSums::of(servers.clone(), kind), tally.granted(kind));
        held.charged.checked_sub(granted).unwrap_or_else(|| panic!("{kind}: {granted} granted, {held:?}"))
    };
    KINDS.iter().filter(|kind| !FORGIVING.contains(kind)).map(more).sum()
}

/// Waits until the servers have reported all usage, stops them, and compares the admitted units
/// with the origin. `security` limits are also charged lapsed grants and `known`, and nothing else.
fn settle<'s>(
    mut fleet: ServerFleet,
    tally: &LoadTally,
    servers: impl IntoIterator<Item = &'s Redis> + Clone,
    known: impl Fn(&ServerFleet) -> u64,
) {
    // When so few units are granted, servers have reported each key again and know all lapses.
    let mut held = 0;
    wait_until("hardly anything to be held", TIME_MAX, || {
        held = held_of_guarded(&servers);
        held <= HELD_AT_LAST
    });
    // These grants may lapse while the servers stop.
    let most = held + lapsed(&fleet.servers) + known(&fleet);
    fleet.stop();
    for kind in KINDS {
        let (held, granted) = (MeterSums::of(servers.clone(), kind), tally.granted(kind));
        assert!(held.meters == KEYS && granted > 0, "{kind}: {held:?}");
        assert_eq!(held.holders.values().sum::<u64>(), 0, "{kind}: all was given back");
        if FORGIVING.contains(kind) {
            assert_eq!(held.charged, granted, "{kind}: {tally:?}");
        }
    }
    let more = charged_for_nothing(tally, &servers);
    println!("{more} more charged than granted, at most {most} lapsed");
    assert!(more <= most, "{more} more charged than granted, and {most} lapsed: {tally:?}");
    assert!(tally.granted("guarded") <= REACHED * KEYS as u64, "{tally:?}");
    servers.into_iter().for_each(assert_all_end);
}

/// Only admitted units and lapses are charged.
fn nothing_else(_: &ServerFleet) -> u64 {
    0
}

/// Returns the units that passed for requests after their timeout. A store that may have lost
/// writes does not refund them.
fn units_passed_after_timeout(fleet: &ServerFleet) -> u64 {
    fleet.servers.iter().map(|node| metric(node, "tidegate_origin_returned_total")).sum()
}

/// Runs two servers through a fault, and checks the region afterwards.
fn survives(
    redis: &mut Redis,
    origin: &str,
    known: impl Fn(&ServerFleet) -> u64,
    goes_wrong: impl FnOnce(&mut Redis, &Load),
) {
    let fleet = start_region(origin, &rules(), 2);
    let load = Load::start(fleet.addresses("http"), KINDS, KEYS);
    load.wait_for("regional", ENOUGH);
    goes_wrong(redis, &load);
    load.wait_for("regional", ENOUGH);
    settle(fleet, &load.stop(), [&*redis], known);
}

/// Waits until clients get decisions without the origin, with source `local`.
fn wait_for_local(load: &Load) {
    load.wait_for_kind("comfort", "local", 1);
}

#[test]
fn killed_redis_with_durable_writes_loses_nothing() {
    let mut redis = Redis::start(APPEND_ONLY);
    let origin = redis.url();
    survives(&mut redis, &origin, units_passed_after_timeout, |redis, load| {
        redis.kill();
        wait_for_local(load);
        redis.restart();
    });
}

#[test]
fn nothing_is_lost_while_redis_stands_still() {
    let mut redis = Redis::start(&[]);
    let origin = redis.url();
    survives(&mut redis, &origin, nothing_else, |redis, load| {
        redis.signal(Signal::STOP);
        // By then no node has a grant, and each class uses its own fallback.
        load.wait_for_kind("comfort", "local", ENOUGH);
        load.wait_for_kind("security", "closed", ENOUGH);
        if is_long() {
            lasts(LONG_STALL);
        }
        redis.signal(Signal::CONT);
    });
}

#[test]
fn nothing_is_lost_or_added_while_scripts_are_flushed_again_and_again() {
    let mut redis = Redis::start(&[]);
    let origin = redis.url();
    survives(&mut redis, &origin, nothing_else, |redis, load| {
        let before = commands(redis, "eval");
        wait_until("the script to be brought again and again", TIME_MAX, || {
            ask::<String>(redis, &["SCRIPT", "FLUSH"]);
            commands(redis, "eval") >= before + 20
        });
        load.wait_for("regional", ENOUGH);
    });
}

#[test]
fn nothing_is_charged_twice_when_answers_are_lost_after_they_were_given() {
    let mut redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    survives(&mut redis, &proxy.url(), nothing_else, |redis, load| {
        for traffic in [Traffic::CutAnswers, Traffic::DropAnswers].repeat(if is_long() { 50 } else { 5 }) {
            // After a successful call, there is a connection to lose.
            let before = commands(redis, "evalsha");
            wait_until("a call", TIME_MAX, || commands(redis, "evalsha") > before);
            let before = proxy.lost();
            proxy.set(traffic);
            wait_until("something to be done that nobody hears of", TIME_MAX, || proxy.lost() > before);
            wait_for_local(load);
            proxy.set(Traffic::Pass);
            load.wait_for("regional", 10);
        }
    });
}

#[test]
fn nothing_is_lost_or_added_while_slots_move() {
    let cluster = Cluster::start();
    let fleet = start_region(&cluster.url(), &scattered(), 2);
    let load = Load::start(fleet.addresses("http"), KINDS, KEYS);
    load.wait_for("regional", ENOUGH);
    let masters = cluster.masters();
    for round in 0..if is_long() { 6 } else { 2 } {
        let names = masters.iter().flat_map(|master| meter_keys(&cluster.servers[*master]));
        let mut slots = cluster.slots(&names.collect::<Vec<_>>());
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), KEYS, "a meter is where its key says");
        for (number, slot) in slots.into_iter().enumerate() {
            cluster.move_slot(slot, masters[(number + round) % masters.len()]);
        }
        load.wait_for("regional", ENOUGH);
    }
    let tally = load.stop();
    settle(fleet, &tally, masters.iter().map(|master| &cluster.servers[*master]), nothing_else);
}

#[test]
fn nothing_is_lost_or_added_when_servers_are_replaced_one_by_one() {
    let redis = Redis::start(&[]);
    let mut fleet = start_region(&redis.url(), &rules(), 2);
    let load = Load::start(fleet.addresses("http"), KINDS, KEYS);
    let mut gone = 0;
    for round in 0..if is_long() { 20 } else { 4 } {
        load.wait_for("regional", ENOUGH);
        let next = fleet.start(&[]);
        let mut old = std::mem::replace(&mut fleet.servers[round % 2], next);
        load.go_to(fleet.addresses("http"));
        // Its grants may lapse while it stops, and then it can no longer report that.
        gone += lapsed([&old]) + held_of_guarded(&[&redis]);
        assert_eq!(old.process.terminate(), Some(0));
    }
    load.wait_for("regional", ENOUGH);
    settle(fleet, &load.stop(), [&redis], |_| gone);
}

/// A killed server loses its unreported usage. Of a forgiving limit, that is at most its grant. Of
/// a `security` limit it is nothing, because the grant counts as used. Nothing else is charged.
#[test]
fn killed_server_loses_at_most_its_grants() {
    let redis = Redis::start(&[]);
    let mut fleet = start_region(&redis.url(), &rules(), 1);
    let load = Load::start(fleet.addresses("http"), KINDS, KEYS);
    let (mut lost, mut late) = ([0_u64; KINDS.len()], 0);
    for _ in 0..if is_long() { 10 } else { 2 } {
        load.wait_for("regional", ENOUGH);
        let next = fleet.start(&[]);
        late += lapsed(&fleet.servers);
        fleet.servers[0].process.kill();
        for (kind, lost) in KINDS.iter().zip(&mut lost) {
            // No other server has a grant: the next one has had no requests, and the grants of
            // earlier ones have lapsed.
            *lost += MeterSums::of([&redis], kind).holders.values().sum::<u64>();
        }
        fleet.servers[0] = next;
        load.go_to(fleet.addresses("http"));
    }
    load.wait_for("regional", ENOUGH);
    wait_until("what the dead held to lapse", TIME_MAX, || {
        MeterSums::of([&redis], "security").holders.values().filter(|amount| **amount > 0).count() <= 1
    });
    let tally = load.stop();
    wait_until("nobody to hold anything", TIME_MAX, || held_of_guarded(&[&redis]) == 0);
    late += lapsed(&fleet.servers);
    fleet.stop();
    // Units that may have been decided for clients without a reply.
    let unheard = tally.lost * COST_MAX;
    for (kind, lost) in KINDS.iter().zip(lost) {
        let (held, granted) = (MeterSums::of([&redis], kind), tally.granted(kind));
        assert!(held.charged + lost >= granted, "{kind}: {held:?}, {granted} granted, {lost} held");
        let used = if FORGIVING.contains(kind) { 0 } else { lost + late };
        assert!(
            held.charged <= granted + used + unheard,
            "{kind}: {held:?}, {granted} granted, {lost} held, {late} lapsed, {unheard} unheard"
        );
    }
    assert!(
        MeterSums::of([&redis], "security").charged >= tally.granted("security"),
        "what was lost counts as used"
    );
    assert!(tally.granted("guarded") <= REACHED * KEYS as u64, "{tally:?}");
}
