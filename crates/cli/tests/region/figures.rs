//! Figures of a region whose store fails. They say something on a machine that does nothing else, of programs that were
//! built for it:
//!
//! ```sh
//! cargo test --release -p tidegate-cli --test region figures -- --ignored --nocapture --test-threads=1
//! ```

#![expect(clippy::disallowed_methods, reason = "what is measured is time")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tidegate::region::redis::{RedisConfig, RedisOrigin, Servers};
use tidegate::region::{Class, Region, Settings};
use tidegate::{Limit, Limiter};
use tidegate_testkit::{Proxy, Redis, Signal, Traffic};

use crate::field::{Client, Field, is_long, lasts};

/// Clients that ask while the store stands still, and between two requests of each.
const CLIENTS: usize = 64;
const PAUSE: Duration = Duration::from_millis(20);

/// Keys that they ask for.
const KEYS: usize = 1_000;

/// What is aimed at.
const P99_US_MAX: u64 = 5_000;
const P999_US_MAX: u64 = 25_000;
const WHOLE_AGAIN_MAX: Duration = Duration::from_secs(1);

/// One answer.
struct Sample {
    at: Instant,
    took_us: u64,
    security: bool,
    allowed: bool,
    status: u16,
    regional: bool,
}

fn ask_until(stop: &AtomicBool, number: usize, address: SocketAddr) -> Vec<Sample> {
    let mut client = Client::new(address);
    let mut samples = Vec::new();
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            return samples;
        }
        let security = turn % 8 == 0;
        let key = format!("key {}", (number * 31 + turn * 7) % KEYS);
        let at = Instant::now();
        let answer = client.check(&[(if security { "security" } else { "comfort" }, &key)], 1);
        let took_us = u64::try_from(at.elapsed().as_micros()).expect("no test takes that long");
        let (allowed, status, regional) = (answer.allowed, answer.status, answer.is_regional());
        samples.push(Sample { at, took_us, security, allowed, status, regional });
        std::thread::sleep(PAUSE);
    }
    samples
}

fn verdict(holds: bool) -> &'static str {
    if holds { "holds" } else { "MISSED" }
}

fn print_tail(what: &str, times: &Histogram<u64>, bars: [Option<u64>; 2]) {
    for ((name, share), bar) in [("p99", 0.99), ("p99.9", 0.999)].into_iter().zip(bars) {
        let us = times.value_at_quantile(share);
        let bar = bar.map(|bar| format!("; {} the bar of {bar} us", verdict(us <= bar)));
        println!("{what}: {name} {us} us of {}{}", times.len(), bar.unwrap_or_default());
    }
}

#[test]
#[ignore = "prints figures: run it alone"]
fn a_store_that_stands_still() {
    let redis = Redis::start(&[]);
    let rule = |name: &str| {
        format!("[[rules]]\nname='{name}'\nclass='{name}'\nkey=['{name}']\nlimit=100000\nperiod='1m'\n")
    };
    let mut field = Field::start(&redis.url(), &(rule("comfort") + &rule("security")), 1);
    let stop = Arc::new(AtomicBool::new(false));
    let address = field.addresses()[0];
    let asking: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || ask_until(&stop, number, address))
        })
        .collect();
    lasts(Duration::from_secs(3));
    let stopped = Instant::now();
    redis.signal(Signal::STOP);
    lasts(Duration::from_secs(if is_long() { 30 } else { 10 }));
    let continued = Instant::now();
    redis.signal(Signal::CONT);
    lasts(Duration::from_secs(8));
    stop.store(true, Ordering::Relaxed);
    let samples: Vec<Sample> =
        asking.into_iter().flat_map(|asking| asking.join().expect("no panic")).collect();
    field.stop();
    assert!(samples.iter().all(|sample| sample.status == 200));
    let meanwhile = |sample: &&Sample| sample.at >= stopped && sample.at < continued;
    let times = |which: &dyn Fn(&&Sample) -> bool| {
        let mut times = Histogram::<u64>::new(3).expect("a histogram");
        let comfort = samples.iter().filter(|sample| !sample.security).filter(which);
        comfort.for_each(|sample| times.record(sample.took_us).expect("in range"));
        times
    };
    print_tail("comfort before", &times(&|sample| sample.at < stopped), [None, None]);
    print_tail(
        "comfort while the store stands still",
        &times(&meanwhile),
        [Some(P99_US_MAX), Some(P999_US_MAX)],
    );
    let closed = samples.iter().filter(|sample| sample.security && !sample.regional).filter(meanwhile);
    let passed = closed.clone().filter(|sample| sample.allowed).count();
    println!("security without the store: {passed} of {} passed", closed.count());
    assert_eq!(passed, 0);
    // What a machine is late for by itself.
    let warm = |sample: &&Sample| sample.at < stopped && stopped - sample.at < Duration::from_secs(1);
    let noise = samples.iter().filter(warm).filter(|sample| !sample.regional).count();
    println!("in the second before: {noise} of {} not regional", samples.iter().filter(warm).count());
    for second in 0..8 {
        let from = continued + Duration::from_secs(second);
        let within = |sample: &&Sample| sample.at >= from && sample.at < from + Duration::from_secs(1);
        let late = samples.iter().filter(within).filter(|sample| !sample.regional).count();
        println!("second {second} after: {late} of {} not regional", samples.iter().filter(within).count());
    }
    let late = samples.iter().filter(|sample| sample.at > continued && !sample.regional);
    let last =
        late.map(|sample| sample.at + Duration::from_micros(sample.took_us)).max().unwrap_or(continued);
    let whole = last - continued;
    let holds = verdict(whole <= WHOLE_AGAIN_MAX);
    println!("every answer regional again after {whole:?}; {holds} the bar of {WHOLE_AGAIN_MAX:?}");
}

/// How many cold requests, and by how many at once.
const COLD: usize = 20_000;
const AT_ONCE: usize = 8;

#[test]
#[ignore = "prints figures: run it alone"]
fn a_second_question_for_the_tail() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let patient = Settings { deadline_us: 1_000_000, ..Settings::default() };
    let never = Settings { hedge_us: u64::MAX / 4, ..patient };
    for (what, settings) in [("asked once", never), ("asked again after 3 ms", patient)] {
        let redis = Redis::start(&[]);
        let proxy = Proxy::start(redis.address());
        let times = runtime.block_on(cold_requests(&proxy, settings));
        print_tail(&format!("cold, one answer in 100 is 20 ms late, {what}"), &times, [None, None]);
    }
}

async fn cold_requests(proxy: &Proxy, settings: Settings) -> Histogram<u64> {
    let limit = Limit::gcra(100, Duration::from_mins(1)).expect("in range");
    let limiter = Arc::new(Limiter::builder().limit("per_user", limit).build().expect("a limiter"));
    let origin = RedisOrigin::open(RedisConfig::new(Servers::Single(proxy.url()), 7)).expect("an address");
    let region = Region::join_as("", limiter, Arc::new(origin), settings).expect("joined");
    let gate = region.gate("", "per_user", Class::Security).expect("a limit");
    // Connections are made, and the script is there.
    while !region.check(&[gate.question("warm")]).await.expect("one limit").is_allowed() {}
    proxy.set(Traffic::DelayOneIn(100, Duration::from_millis(20)));
    let times = Mutex::new(Histogram::<u64>::new(3).expect("a histogram"));
    let asks = async |number: usize| {
        for turn in 0..COLD / AT_ONCE {
            let key = format!("{number} {turn}");
            let began = Instant::now();
            let ruling = region.check(&[gate.question(&key)]).await.expect("one limit");
            assert!(ruling.is_allowed(), "{ruling:?}");
            let took_us = u64::try_from(began.elapsed().as_micros()).expect("no test takes that long");
            times.lock().expect("no panic").record(took_us).expect("in range");
        }
    };
    tokio::join!(asks(0), asks(1), asks(2), asks(3), asks(4), asks(5), asks(6), asks(7));
    region.leave().await;
    times.into_inner().expect("no panic")
}
