//! Limits that change while they are in use, requests too large for any grant, stores that forget,
//! and windows that end.

use std::time::{SystemTime, UNIX_EPOCH};

use tidegate_testkit::{Proxy, Redis, ServerFleet, Traffic, ask, wait_until};

use crate::client::{Client, FOR_EVER, TIME_MAX, metric, start_region};
use crate::load::Load;
use crate::meters::{MeterSums, lives_left_us};

/// How often each kind of request is decided after a change.
const ENOUGH: u64 = 200;

fn rule(name: &str, class: &str, limit: u64, version: u32) -> String {
    format!(
        "[[rules]]\nname='{name}'\nversion={version}\nclass='{class}'\nkey=['{name}']\nlimit={limit}\n\
         period='{FOR_EVER}'\n"
    )
}

/// Waits until every server decides by a version of the only rule.
fn wait_for_version(fleet: &ServerFleet, version: u64) {
    for node in 0..fleet.servers.len() {
        let key = || ("security".to_owned(), "somebody else".to_owned());
        let is_it =
            |answer: &crate::client::Answer| answer.body["rules"][0]["version"].as_u64() == Some(version);
        Client::of(&fleet.servers[node]).check_until("the new rules", key, is_it);
    }
}

/// Nothing drains here, so a key never passes more units than its highest limit so far. Once it has
/// passed more than a lowered limit, only the grants that servers already have may still pass.
#[test]
fn a_limit_that_is_raised_and_lowered_is_never_passed() {
    let redis = Redis::start(&[]);
    let mut fleet = start_region(&redis.url(), &rule("security", "security", 400, 1), 2);
    let load = Load::start(fleet.addresses("http"), &["security"], 1);
    let granted = || load.so_far().granted("security");
    let nearly = |limit: u64| {
        wait_until("nearly everything to be granted", TIME_MAX, || granted() >= limit * 95 / 100);
        assert!(granted() <= limit, "{} of {limit}", granted());
    };
    nearly(400);
    fleet.replace_rules(&rule("security", "security", 2_000, 2));
    wait_until("some of what is new", TIME_MAX, || granted() >= 800);
    fleet.replace_rules(&rule("security", "security", 600, 3));
    wait_for_version(&fleet, 3);
    let (before, held) = (granted(), MeterSums::of([&redis], "security").holders.values().sum::<u64>());
    load.wait_for("regional", ENOUGH);
    assert!(granted() <= before + held, "{} after {before}, of which {held} were held", granted());
    assert!(granted() <= 2_000);
    fleet.replace_rules(&rule("security", "security", 3_000, 4));
    nearly(3_000);
    load.wait_for("regional", ENOUGH);
    let tally = load.stop();
    fleet.stop();
    assert!(tally.granted("security") <= 3_000, "{tally:?}");
}

/// A limit with a new algorithm or period keeps its usage: no grant exceeds it, and its remaining
/// units are granted. Each version allows a little more, so that some units remain.
#[test]
fn limit_with_a_new_algorithm_or_period_keeps_its_usage() {
    const STEP: u64 = 400;
    const HOW: [&str; 6] = [
        "period='366d'\nalgorithm='gcra'",
        "period='366d'\nalgorithm='sliding_window'",
        "period='300d'\nalgorithm='sliding_window'",
        "period='366d'\nalgorithm='sliding_window'",
        "period='366d'\nalgorithm='gcra'",
        "period='300d'\nalgorithm='gcra'",
    ];
    let rules = |version: usize| {
        let (how, limit) = (HOW[version - 1], STEP * version as u64);
        let rule = |class: &str| {
            format!(
                "[[rules]]\nname='{class}'\nversion={version}\nclass='{class}'\nkey=['{class}']\nlimit={limit}\n{how}\n"
            )
        };
        rule("security") + &rule("comfort")
    };
    let redis = Redis::start(&[]);
    let mut fleet = start_region(&redis.url(), &rules(1), 2);
    let load = Load::start(fleet.addresses("http"), &["security", "comfort"], 1);
    for version in 1..=HOW.len() {
        fleet.replace_rules(&rules(version));
        let limit = STEP * version as u64;
        for kind in ["security", "comfort"] {
            let what = format!("what is new of {kind} in version {version}");
            wait_until(&what, TIME_MAX, || load.so_far().granted(kind) >= limit * 95 / 100);
            let granted = load.so_far().granted(kind);
            assert!(granted <= limit, "{granted} of {limit} of {kind} in version {version}");
        }
    }
    load.wait_for("regional", ENOUGH);
    for node in &fleet.servers {
        assert_eq!(metric(node, "tidegate_origin_up"), 1);
        assert_eq!(metric(node, "tidegate_origin_refused_total"), 0);
    }
    let tally = load.stop();
    fleet.stop();
    let limit = STEP * HOW.len() as u64;
    assert!(tally.granted("security") <= limit, "{tally:?}");
    assert!(MeterSums::of([&redis], "security").charged >= tally.granted("security"), "{tally:?}");
    assert_eq!(MeterSums::of([&redis], "comfort").charged, tally.granted("comfort"), "{tally:?}");
}

/// A request may cost more than any server's grant, or more than the origin has left beside other
/// grants. It gets the units that other servers return.
#[test]
fn request_larger_than_any_grant_uses_recalled_grants() {
    const LIMIT: u64 = 1_000;
    const LARGE: u64 = 600;
    let redis = Redis::start(&[]);
    let mut fleet = start_region(&redis.url(), &rule("security", "security", LIMIT, 1), 2);
    let load = Load::start(fleet.addresses("http"), &["security"], 1);
    load.wait_for("regional", 20);
    let small = load.stop().granted("security");
    assert!(small <= LIMIT - LARGE, "{small} are gone already");
    let mut client = Client::of(&fleet.servers[0]);
    let key = [("security", "key 0")];
    let never = client.check(&key, LIMIT + 1);
    wait_until("an answer of the origin", TIME_MAX, || client.check(&key, LIMIT + 1).is_regional());
    let again = client.check(&key, LIMIT + 1);
    assert!(!never.allowed && !again.allowed);
    let mut large = 0;
    wait_until("the large one to pass", TIME_MAX, || {
        let allowed = client.check(&key, LARGE).allowed;
        large += if allowed { LARGE } else { 0 };
        allowed
    });
    assert!(!client.check(&key, LARGE).allowed, "once");
    fleet.stop();
    assert!(small + large <= LIMIT);
    assert_eq!(MeterSums::of([&redis], "security").charged, small + large);
}

/// Returns the bound that `tidegate bound` prints for the only rule of a file, in units. The region
/// has this many servers, one outage of the origin, and one failover that loses writes.
fn printed_bound(rules: &str, nodes: usize) -> u64 {
    let dir = tempfile::tempdir().expect("a folder");
    let (file, nodes) = (crate::support::write(dir.path(), "rules.toml", rules), nodes.to_string());
    let of = [
        "bound",
        "--rules",
        &file,
        "--nodes",
        &nodes,
        "--failovers",
        "1",
        "--outages",
        "1",
        "--lapses",
        "0",
        "--json",
    ];
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_tidegate")).args(of).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let bounds: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    bounds["bounds"][0]["total"].as_u64().expect("a number of units")
}

/// A replica that lacks writes is promoted. A `security` limit is not exceeded. A `comfort` limit
/// is exceeded by the printed bound at most, however long the load lasts.
#[test]
fn a_fail_over_that_loses_writes_stays_inside_the_bound() {
    const LIMIT: u64 = 3_000;
    const NODES: usize = 2;
    let bound = printed_bound(&rule("comfort", "comfort", LIMIT, 1), NODES);
    let mut master = Redis::start(&[]);
    let replication = Proxy::start(master.address());
    let follows = format!("127.0.0.1 {}", replication.address().port());
    let replica = Redis::start(&["--replicaof", &follows]);
    wait_until("the replica to follow", TIME_MAX, || {
        ask::<String>(&replica, &["INFO", "replication"]).contains("master_link_status:up")
    });
    let front = Proxy::start(master.address());
    let rules = rule("security", "security", LIMIT, 1) + &rule("comfort", "comfort", LIMIT, 1);
    let mut fleet = start_region(&front.url(), &rules, NODES);
    let load = Load::start(fleet.addresses("http"), &["security", "comfort"], 1);
    let granted = || load.so_far().granted("security");
    wait_until("a part to be granted", TIME_MAX, || granted() >= LIMIT / 4);
    replication.set(Traffic::HalfOpen);
    let charged = MeterSums::of([&master], "security").charged;
    wait_until("more to be charged that the replica never hears of", TIME_MAX, || {
        MeterSums::of([&master], "security").charged >= charged + LIMIT / 8
    });
    let forgotten = MeterSums::of([&master], "security").charged;
    master.kill();
    ask::<String>(&replica, &["REPLICAOF", "NO", "ONE"]);
    assert!(MeterSums::of([&replica], "security").charged < forgotten, "it knows less");
    front.lead_to(replica.address());
    load.wait_for("regional", ENOUGH);
    wait_until("nearly everything to be granted where that may be", TIME_MAX, || {
        load.so_far().granted("comfort") >= LIMIT * 95 / 100
    });
    // As much as would pass it, if all of it passed from now on.
    let enough = ["security", "comfort"].map(|kind| (kind, load.so_far().asked(kind) + LIMIT + bound));
    for (kind, enough) in enough {
        wait_until("much more to be asked for", TIME_MAX, || load.so_far().asked(kind) > enough);
    }
    load.wait_for("regional", ENOUGH);
    let tally = load.stop();
    fleet.stop();
    let (security, comfort) = (tally.granted("security"), tally.granted("comfort"));
    println!(
        "{security} of {LIMIT} passed of security, {comfort} of comfort, of which {} may",
        LIMIT + bound
    );
    assert!(security <= LIMIT, "{tally:?}");
    assert!(comfort <= LIMIT + bound, "{tally:?}");
}

/// Period and limit of a window that ends a few times during a test.
const PERIOD_US: u64 = 2_000_000;
const WINDOW_LIMIT: u64 = 40;

/// A client stops once it was admitted in more than this many cells.
const CELLS: usize = 4;

/// The longest time after which the grant of a recently denied key lapses, µs: its life, a
/// sixteenth more, and the margin of the origin.
const STRICT_US_MAX: u64 = 300_000 + 300_000 / 16 + 300_000;

/// A request that was granted, and between which moments, by the clock that the store has as well.
#[derive(Clone, Copy, Debug)]
struct Grant {
    began_us: u64,
    ended_us: u64,
}

impl Grant {
    /// The cell in which it was decided, if it is sure.
    fn cell(&self) -> Option<u64> {
        let cell = self.began_us / PERIOD_US;
        (self.ended_us / PERIOD_US == cell).then_some(cell)
    }
}

/// Returns the maximum that the window counted at any admission, in units times the period. It
/// counts requests surely admitted earlier in the cell, and the part of the previous cell still in
/// the window at the reply.
fn weighted_most(grants: &[Grant]) -> u64 {
    let weighted = |grant: &Grant| {
        let cell = grant.cell()?;
        let earlier = |other: &&Grant| other.cell() == Some(cell) && other.ended_us <= grant.began_us;
        let current = grants.iter().filter(earlier).count() as u64 + 1;
        let previous = grants.iter().filter(|other| other.cell() == Some(cell - 1)).count() as u64;
        Some(current * PERIOD_US + previous * (PERIOD_US - grant.ended_us % PERIOD_US))
    };
    grants.iter().filter_map(weighted).max().unwrap_or(0)
}

/// A window that is always at its limit never counts more than the limit, usage of the previous
/// cell included. After a denial grants are short, in this cell and in later ones.
#[test]
fn window_at_its_limit_keeps_its_usage_and_short_grants() {
    let redis = Redis::start(&[]);
    let window = |name: &str, limit: u64| {
        format!(
            "[[rules]]\nname='{name}'\nclass='security'\nkey=['{name}']\nlimit={limit}\nperiod='{}s'\n\
             algorithm='sliding_window'\n",
            PERIOD_US / 1_000_000
        )
    };
    let rules = window("security", WINDOW_LIMIT) + &window("plenty", 1_000_000);
    let mut fleet = start_region(&redis.url(), &rules, 2);
    let mut client = Client::of(&fleet.servers[0]);
    let first = now_us() / PERIOD_US;
    let asking: Vec<_> = fleet
        .addresses("http")
        .into_iter()
        .map(|address| std::thread::spawn(move || granted_in_cells(Client::new(address))))
        .collect();
    let (mut strict_cells, mut longest_us) = (std::collections::BTreeSet::new(), 0);
    wait_until("all cells to be over", TIME_MAX, || {
        client.check(&[("plenty", "somebody")], 1);
        longest_us = lives_left_us(&redis, "plenty").into_iter().map(|(_, us)| us).fold(longest_us, u64::max);
        // In these cells, the origin has denied every server before.
        let lives = lives_left_us(&redis, "security").into_iter().filter(|(cell, _)| *cell > first + 1);
        for (cell, left_us) in lives {
            assert!(left_us <= STRICT_US_MAX, "a grant that is believed in for {left_us} us after a denial");
            strict_cells.insert(cell);
        }
        asking.iter().all(std::thread::JoinHandle::is_finished)
    });
    let grants: Vec<Grant> = asking.into_iter().flat_map(|asking| asking.join().expect("no panic")).collect();
    fleet.stop();
    assert!(
        longest_us > STRICT_US_MAX,
        "who was not denied is granted something for longer: {longest_us} us"
    );
    assert!(strict_cells.len() >= CELLS - 2, "{strict_cells:?}");
    let most = weighted_most(&grants);
    println!("{} grants, at most {most} in a window of {}", grants.len(), WINDOW_LIMIT * PERIOD_US);
    assert!(most <= WINDOW_LIMIT * PERIOD_US, "{grants:?}");
    assert!(most >= WINDOW_LIMIT * PERIOD_US * 3 / 4, "it was hardly asked for: {grants:?}");
}

/// An origin that forgets the previous cell would grant the whole limit at the start of each cell.
#[test]
fn a_window_that_forgets_the_cell_before_takes_in_too_much() {
    let granted = |from_us: u64| {
        (0..WINDOW_LIMIT).map(move |at| Grant { began_us: from_us + 2 * at, ended_us: from_us + 2 * at + 1 })
    };
    let first = 1_000 * PERIOD_US;
    let forgotten: Vec<Grant> = granted(first).chain(granted(first + PERIOD_US)).collect();
    assert!(weighted_most(&forgotten) > (2 * WINDOW_LIMIT - 1) * PERIOD_US);
    let faded: Vec<Grant> = granted(first).chain(granted(first + 2 * PERIOD_US)).collect();
    assert_eq!(weighted_most(&faded), WINDOW_LIMIT * PERIOD_US);
}

/// Returns the requests of a client that passed, until more than `CELLS` cells have one.
fn granted_in_cells(mut client: Client) -> Vec<Grant> {
    let (mut grants, mut cells) = (Vec::new(), std::collections::BTreeSet::new());
    wait_until("some cells", TIME_MAX, || {
        let began_us = now_us();
        let answer = client.check(&[("security", "somebody")], 1);
        assert_eq!(answer.status, 200, "{answer:?}");
        if answer.allowed {
            let grant = Grant { began_us, ended_us: now_us() };
            grants.push(grant);
            cells.extend(grant.cell());
        }
        cells.len() > CELLS
    });
    grants
}

#[expect(clippy::disallowed_methods, reason = "the store has the clock of the machine, and so have windows")]
fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}
