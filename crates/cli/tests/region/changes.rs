//! Limits that change while they are in use, requests too large for any grant, stores that forget, and windows that end.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_testkit::{Proxy, Redis, Traffic, ask, wait_until};

use crate::field::{Client, FOR_EVER, Field, TIME_MAX};
use crate::load::Load;
use crate::meters::Held;

/// How often each kind of request is decided after a change.
const ENOUGH: u64 = 200;

fn rule(name: &str, class: &str, limit: u64, version: u32) -> String {
    format!(
        "[[rules]]\nname='{name}'\nversion={version}\nclass='{class}'\nkey=['{name}']\nlimit={limit}\n\
         period='{FOR_EVER}'\n"
    )
}

/// Waits until every server decides by a version of the only rule.
fn wait_for_version(field: &Field, version: u64) {
    for node in 0..field.nodes.len() {
        let key = || ("security".to_owned(), "somebody else".to_owned());
        let is_it =
            |answer: &crate::field::Answer| answer.body["rules"][0]["version"].as_u64() == Some(version);
        field.client(node).check_until("the new rules", key, is_it);
    }
}

/// Nothing drains here, so a key is never granted more than the highest limit it was ever under; and once it has had more
/// than a lower one, nothing but what servers held of it when they learned of that.
#[test]
fn a_limit_that_is_raised_and_lowered_is_never_passed() {
    let redis = Redis::start(&[]);
    let mut field = Field::start(&redis.url(), &rule("security", "security", 400, 1), 2);
    let load = Load::start(field.addresses(), &["security"], 1);
    let granted = || load.so_far().granted("security");
    let nearly = |limit: u64| {
        wait_until("nearly everything to be granted", TIME_MAX, || granted() >= limit * 95 / 100);
        assert!(granted() <= limit, "{} of {limit}", granted());
    };
    nearly(400);
    field.rewrite(&rule("security", "security", 2_000, 2));
    wait_until("some of what is new", TIME_MAX, || granted() >= 800);
    field.rewrite(&rule("security", "security", 600, 3));
    wait_for_version(&field, 3);
    let (before, held) = (granted(), Held::of([&redis], "security").holders.values().sum::<u64>());
    load.wait_for("regional", ENOUGH);
    assert!(granted() <= before + held, "{} after {before}, of which {held} were held", granted());
    assert!(granted() <= 2_000);
    field.rewrite(&rule("security", "security", 3_000, 4));
    nearly(3_000);
    load.wait_for("regional", ENOUGH);
    let tally = load.stop();
    field.stop();
    assert!(tally.granted("security") <= 3_000, "{tally:?}");
}

/// A request that costs more than any server holds, or than is left at the origin while others hold the rest, gets what
/// they give back.
#[test]
fn a_request_too_large_for_any_grant_is_granted_from_what_others_give_back() {
    const LIMIT: u64 = 1_000;
    const LARGE: u64 = 600;
    let redis = Redis::start(&[]);
    let mut field = Field::start(&redis.url(), &rule("security", "security", LIMIT, 1), 2);
    let load = Load::start(field.addresses(), &["security"], 1);
    load.wait_for("regional", 20);
    let small = load.stop().granted("security");
    assert!(small <= LIMIT - LARGE, "{small} are gone already");
    let mut client = field.client(0);
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
    field.stop();
    assert!(small + large <= LIMIT);
    assert_eq!(Held::of([&redis], "security").charged, small + large);
}

/// A replica that had not heard everything takes over. A limit that must hold is not passed; another is passed by what it
/// allows once for the loss, once for the parts that servers went on with meanwhile, and its tolerance.
#[test]
fn a_fail_over_that_loses_writes_stays_inside_the_bound() {
    const LIMIT: u64 = 3_000;
    const TOLERANCE: u64 = LIMIT / 20;
    let mut master = Redis::start(&[]);
    let replication = Proxy::start(master.address());
    let follows = format!("127.0.0.1 {}", replication.address().port());
    let replica = Redis::start(&["--replicaof", &follows]);
    wait_until("the replica to follow", TIME_MAX, || {
        ask::<String>(&replica, &["INFO", "replication"]).contains("master_link_status:up")
    });
    let front = Proxy::start(master.address());
    let rules = rule("security", "security", LIMIT, 1) + &rule("comfort", "comfort", LIMIT, 1);
    let mut field = Field::start(&front.url(), &rules, 2);
    let load = Load::start(field.addresses(), &["security", "comfort"], 1);
    let granted = || load.so_far().granted("security");
    wait_until("a part to be granted", TIME_MAX, || granted() >= LIMIT / 4);
    replication.set(Traffic::HalfOpen);
    let charged = Held::of([&master], "security").charged;
    wait_until("more to be charged that the replica never hears of", TIME_MAX, || {
        Held::of([&master], "security").charged >= charged + LIMIT / 8
    });
    let forgotten = Held::of([&master], "security").charged;
    master.kill();
    ask::<String>(&replica, &["REPLICAOF", "NO", "ONE"]);
    assert!(Held::of([&replica], "security").charged < forgotten, "it knows less");
    front.lead_to(replica.address());
    load.wait_for("regional", ENOUGH);
    wait_until("nearly everything to be granted where that may be", TIME_MAX, || {
        load.so_far().granted("comfort") >= LIMIT * 95 / 100
    });
    load.wait_for("regional", ENOUGH);
    let tally = load.stop();
    field.stop();
    let (security, comfort) = (tally.granted("security"), tally.granted("comfort"));
    println!("{security} of {LIMIT} passed of security, {comfort} of comfort");
    assert!(security <= LIMIT, "{tally:?}");
    assert!(comfort <= LIMIT + TOLERANCE + LIMIT + LIMIT, "{tally:?}");
}

/// Windows of a few seconds, at their limit all the time: none takes in more than it may, and each takes in something.
/// What a request was granted is counted where it began and ended within the same window, by the clock that the store
/// has as well.
#[test]
fn a_window_at_its_limit_ends_and_the_next_begins_with_what_is_left() {
    const PERIOD: Duration = Duration::from_secs(2);
    const LIMIT: u64 = 40;
    const WINDOWS: usize = 3;
    let redis = Redis::start(&[]);
    let rule = format!(
        "[[rules]]\nname='security'\nclass='security'\nkey=['security']\nlimit={LIMIT}\nperiod='{}s'\n\
         algorithm='sliding_window'\n",
        PERIOD.as_secs()
    );
    let mut field = Field::start(&redis.url(), &rule, 2);
    let asking: Vec<_> = field
        .addresses()
        .into_iter()
        .map(|address| std::thread::spawn(move || granted_by_window(Client::new(address), PERIOD, WINDOWS)))
        .collect();
    let mut windows = std::collections::BTreeMap::<u64, u64>::new();
    for asking in asking {
        for (window, granted) in asking.join().expect("no panic") {
            *windows.entry(window).or_default() += granted;
        }
    }
    field.stop();
    println!("{windows:?}");
    assert!(windows.values().all(|granted| *granted <= LIMIT), "{windows:?}");
}

/// What a client was granted in each window, until so many had something for it.
fn granted_by_window(mut client: Client, period: Duration, windows: usize) -> Vec<(u64, u64)> {
    let mut granted = std::collections::BTreeMap::<u64, u64>::new();
    wait_until("some windows", TIME_MAX, || {
        let began = window_now(period);
        let answer = client.check(&[("security", "somebody")], 1);
        assert_eq!(answer.status, 200, "{answer:?}");
        if answer.allowed && began == window_now(period) {
            *granted.entry(began).or_default() += 1;
        }
        granted.len() > windows
    });
    granted.into_iter().collect()
}

#[expect(clippy::disallowed_methods, reason = "the store has the clock of the machine, and so have windows")]
fn window_now(period: Duration) -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() / period.as_secs()
}
