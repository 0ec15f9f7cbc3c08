//! Limits that one region decides for each key.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate_testkit::{REGIONS, wait_until};

use crate::client::{Client, FOR_EVER, TIME_MAX, is_long, lasts};
use crate::world::World;

const LIMIT: usize = 10;

const KEYS: usize = 6;

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "how long a refusal takes is printed, and compared with nothing"
)]
fn only_the_owner_region_decides_a_strict_key() {
    let rules = format!(
        "[[rules]]\nname='strict'\nclass='security'\nregime='strict'\nkey=['ip']\nlimit={LIMIT}\nperiod='{FOR_EVER}'\n"
    );
    // Lost connections cause refusals now and then. A longer timeout does not prevent these.
    let mut world = World::start(&rules, 1, &["--forward-timeout", "2s"]);
    let keys: Vec<String> = (0..KEYS).map(|number| format!("192.0.2.{number}")).collect();
    let mut clients: Vec<_> = (0..REGIONS.len()).map(|at| world.client((at, 0))).collect();
    for client in &mut clients {
        for key in &keys {
            wait_until("whoever decides to be there", TIME_MAX, || {
                client.check(&[("ip", key)], 0).source == "regional"
            });
        }
    }
    let passed = std::thread::scope(|scope| {
        let asking = clients.iter_mut().map(|client| scope.spawn(|| spend(client, &keys)));
        let asking: Vec<_> = asking.collect();
        let passed: Vec<Vec<usize>> = asking.into_iter().map(|asks| asks.join().expect("no panic")).collect();
        (0..KEYS).map(|key| passed.iter().map(|of| of[key]).sum()).collect::<Vec<usize>>()
    });
    println!("strict: of {LIMIT} in {} regions, {passed:?} passed", REGIONS.len());
    assert!(passed.iter().all(|passed| *passed <= LIMIT), "{passed:?}");
    assert!(passed.iter().sum::<usize>() > LIMIT * KEYS * 9 / 10, "{passed:?}");

    world.ground.regions[0].servers[0].process.kill();
    let mut ask = |number: usize| {
        let key = format!("198.51.100.{number}");
        let began = Instant::now();
        let answer = clients[1].check(&[("ip", &key)], 1);
        (answer, began.elapsed())
    };
    let answers: Vec<_> = (0..60).map(&mut ask).collect();
    let refused: Vec<_> = answers.iter().filter(|(answer, _)| !answer.allowed).collect();
    let longest = refused.iter().map(|(_, took)| *took).max();
    println!(
        "strict: without its owner, {} of {} keys are refused, within {longest:?}",
        refused.len(),
        answers.len()
    );
    assert!(refused.iter().all(|(answer, _)| answer.source == "closed"), "{refused:?}");
    assert!((5..40).contains(&refused.len()), "about a third: {}", refused.len());
}

/// Units per second of a key, and its burst.
const RATE: u32 = 5;

/// Keys that the region with flapping links owns.
const FLAPPING_KEYS: usize = 6;

/// Times for which the links are up and down. A check with its reply in flight when they go down is
/// charged and refused. At these times, this costs less than the tolerated loss.
const UP: Duration = Duration::from_secs(4);
const DOWN: Duration = Duration::from_millis(500);

/// Minimum share of the units of one bucket that pass, counted while the links are up, percent.
const SHARE: f64 = 95.0;

#[test]
#[expect(clippy::disallowed_methods, reason = "what may pass depends on real time")]
fn strict_checks_pass_over_flapping_links_within_the_limit() {
    let rules = format!(
        "[[rules]]\nname='strict'\nclass='security'\nregime='strict'\n\
         key=['ip']\nlimit={}\nperiod='1m'\nburst={RATE}\n",
        60 * RATE
    );
    // Three round trips: the test measures losses of links, not the latency of a busy machine.
    let world = World::start(&rules, 1, &["--forward-timeout", "500ms"]);
    let keys = keys_decided_by_the_first(&world);
    let began = Instant::now();
    let stop = AtomicBool::new(false);
    let (passed, ups, seconds) = std::thread::scope(|scope| {
        let asking: Vec<_> = (1..REGIONS.len())
            .flat_map(|at| keys.iter().map(move |key| (at, key)))
            .map(|(at, key)| {
                let (mut client, stop) = (world.client((at, 0)), &stop);
                scope.spawn(move || {
                    let mut passed = 0_u32;
                    while !stop.load(Ordering::Relaxed) {
                        passed += u32::from(client.check(&[("ip", key)], 1).allowed);
                    }
                    (key, passed)
                })
            })
            .collect();
        let mut ups = 0_u32;
        while began.elapsed() < span() {
            lasts(UP);
            ups += 1;
            // A lost connection wastes a charge. Here only the flapping links lose connections.
            world.flap(0, true);
            lasts(DOWN);
            world.flap(0, false);
        }
        stop.store(true, Ordering::Relaxed);
        let answers: Vec<_> = asking.into_iter().map(|asks| asks.join().expect("no panic")).collect();
        let of = |key: &String| answers.iter().filter(|(of, _)| *of == key).map(|(_, passed)| passed).sum();
        (keys.iter().map(of).collect::<Vec<u32>>(), ups, began.elapsed().as_secs_f64())
    });
    // While the links are down, drained units are saved for later, up to a burst.
    let rate = f64::from(RATE);
    let one_bucket = rate
        + f64::from(ups) * rate * UP.as_secs_f64()
        + f64::from(ups - 1) * rate * DOWN.as_secs_f64().min(1.0);
    let most = rate + rate * seconds;
    println!(
        "strict: {passed:?} passed in {seconds:.1} s over links that were there for \
         {UP:?} and gone for {DOWN:?}, {ups} times; one bucket \
         lets pass {one_bucket:.0}, and at most {most:.0}"
    );
    assert!(passed.iter().all(|passed| (1.0..=most).contains(&f64::from(*passed))), "{passed:?}");
    let share = 100.0 * f64::from(passed.iter().sum::<u32>())
        / (one_bucket * f64::from(u32::try_from(keys.len()).expect("few")));
    // On a machine that is busy with other tests, more questions are too late than links lose.
    if is_long() {
        assert!(share >= SHARE, "{share:.1} % of what one bucket lets pass");
    }
}

/// How long links flap.
fn span() -> Duration {
    if is_long() { Duration::from_mins(1) } else { Duration::from_secs(8) }
}

/// Returns keys that the first region owns: no region decides them while it is cut off.
fn keys_decided_by_the_first(world: &World) -> Vec<String> {
    let mut client = world.client((1, 0));
    let mut closed = |key: &str| client.check(&[("ip", key)], 0).source == "closed";
    let all: Vec<String> = (0..40).map(|number| format!("203.0.113.{number}")).collect();
    for key in &all {
        wait_until("whoever decides to be there", TIME_MAX, || !closed(key));
    }
    world.flap(0, true);
    let found: Vec<String> = all.into_iter().filter(|key| closed(key)).take(FLAPPING_KEYS).collect();
    world.flap(0, false);
    assert_eq!(found.len(), FLAPPING_KEYS);
    for key in &found {
        wait_until("the first region to be there again", TIME_MAX, || !closed(key));
    }
    found
}

/// Makes as many checks for each key as the limit. Returns how many passed for each.
fn spend(client: &mut Client, keys: &[String]) -> Vec<usize> {
    let pass = |key: &String| (0..LIMIT).filter(|_| client.check(&[("ip", key)], 1).allowed).count();
    keys.iter().map(pass).collect()
}
