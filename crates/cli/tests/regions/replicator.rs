//! Replicators that die, and parts that are handed out.

use tidegate_testkit::{REGIONS, wait_until};

use crate::client::{FOR_EVER, TIME_MAX};
use crate::world::World;

/// A sixteenth of this, the publish threshold, is less than the usage in each region.
const LIMIT: u64 = 2_000;

/// Limits of which each region has a part.
const SHARED: [u64; 3] = [1, 2, 100];

fn rules() -> String {
    let rule = |name: &str, regime: &str, limit: u64| {
        format!(
            "[[rules]]\nname='{name}'\nclass='cost'\nregime='{regime}'\n\
             key=['{name}']\nlimit={limit}\nperiod='{FOR_EVER}'\n"
        )
    };
    let shared: String = SHARED.iter().map(|limit| rule(&format!("share{limit}"), "share", *limit)).collect();
    format!("{}{shared}", rule("global", "best_effort", LIMIT))
}

#[test]
fn nothing_is_lost_or_counted_twice_when_replicators_are_killed_and_parts_are_the_whole() {
    let mut world = World::start(&rules(), 2, &["--region-weights", "eu=3,us=2"]);
    world.wait_for_connected(true);
    let mut granted = 0;
    for round in 0..3 {
        let region = round % REGIONS.len();
        let replicator = world.replicator(region);
        let mut client = world.client((region, 1 - replicator));
        for number in 0..500 {
            // Without a replicator, the region may be isolated and deny.
            granted += u64::from(client.check(&[("global", "alice")], 1).allowed);
            // The replicator is killed while it sends this usage.
            if number == 250 {
                world.ground.regions[region].servers[replicator].process.kill();
            }
        }
        world.ground.regions[region].servers.remove(replicator);
        world.wait_for_connected(true);
    }
    let mut said = Vec::new();
    wait_until("all regions to know of all that was used, once", TIME_MAX, || {
        let now: Vec<_> = (0..REGIONS.len()).map(|at| world.remaining((at, 0), "global", "alice")).collect();
        if now != said {
            println!("replicator: {now:?} are left of {LIMIT} where {granted} passed");
            said = now;
        }
        said.iter().all(|(left, source)| *left == LIMIT - granted && source == "global")
    });
    for limit in SHARED {
        let name = format!("share{limit}");
        let mut clients: Vec<_> = (0..REGIONS.len()).map(|at| world.client((at, 0))).collect();
        let mut parts = vec![0; REGIONS.len()];
        let mut take_one_each = || {
            for (part, client) in parts.iter_mut().zip(&mut clients) {
                *part += u64::from(client.check(&[(&name, "bob")], 1).allowed);
            }
            parts.iter().sum::<u64>()
        };
        // The remaining units may be delayed for a moment, but pass in the end.
        wait_until("all parts to be spent", TIME_MAX, || take_one_each() >= limit);
        let all = take_one_each();
        println!("share: {limit} in parts of 1, 3 and 2 is {parts:?}");
        assert_eq!(all, limit, "{parts:?}");
    }
}
