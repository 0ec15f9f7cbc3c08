//! A limit that crosses placements, beside those of the users, on a cluster.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;

use tidegate_load::run_clients;
use tidegate_testkit::{Cluster, wait_until};

use crate::client::{Client, FOR_EVER, TIME_MAX, start_region};
use crate::meters::MeterSums;

/// Limit of the endpoint for all users together, and limit of each user.
const ENDPOINT: u64 = 200;
const EACH: u64 = 30;
const USERS: usize = 20;

/// Units that pass at least. One server's grant of the last few is not available to the other.
const NEARLY_ALL: u64 = ENDPOINT * 95 / 100;

fn rules() -> String {
    let rule = |name: &str, key: &str, limit: u64| {
        format!(
            "[[rules]]\nname='{name}'\nclass='security'\nkey=['{key}']\nlimit={limit}\nperiod='{FOR_EVER}'\n"
        )
    };
    format!("placement = 'user'\n{}{}", rule("endpoint", "path", ENDPOINT), rule("each", "user", EACH))
}

#[test]
fn an_endpoint_is_never_asked_for_more_than_it_takes_nor_any_user_than_is_theirs() {
    let cluster = Cluster::start();
    let mut fleet = start_region(&cluster.url(), &rules(), 2);
    let granted: Mutex<BTreeMap<usize, u64>> = Mutex::default();
    let clients = run_clients(4, |number| -> io::Result<()> {
        ask_for_all(number, Client::of(&fleet.servers[number % 2]), &granted);
        Ok(())
    });
    clients.expect("no panic");
    fleet.stop();
    let granted = granted.into_inner().expect("no panic");
    let total: u64 = granted.values().sum();
    assert!((NEARLY_ALL..=ENDPOINT).contains(&total), "{total}: {granted:?}");
    assert!(granted.values().all(|units| *units <= EACH), "{granted:?}");
    let masters: Vec<_> = cluster.masters().into_iter().map(|master| &cluster.servers[master]).collect();
    let held = MeterSums::of(masters.iter().copied(), "endpoint");
    assert!(held.meters == 1 && held.charged >= total, "{held:?}, {total} granted");
    assert!(MeterSums::of(masters.iter().copied(), "each").meters > USERS / 2, "they are kept apart");
}

/// Makes checks for every user in turn, until nearly all units have passed and every user is
/// denied.
fn ask_for_all(number: usize, mut client: Client, granted: &Mutex<BTreeMap<usize, u64>>) {
    let mut denied = 0;
    let mut user = number;
    wait_until("the endpoint to be full", TIME_MAX, || {
        user = (user + 1) % USERS;
        let answer = client.check(&[("user", &format!("user {user}")), ("path", "/export")], 1);
        assert_eq!(answer.status, 200, "{answer:?}");
        let mut granted = granted.lock().expect("no panic");
        if answer.allowed {
            *granted.entry(user).or_default() += 1;
            denied = 0;
        } else if answer.is_regional() {
            denied += 1;
        }
        denied > USERS && granted.values().sum::<u64>() >= NEARLY_ALL
    });
}
