//! The effect of a hedge, the second attempt of a late call, on the tail of requests that wait.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use serde::Serialize;
use tidegate::region::redis::{RedisConfig, RedisOrigin, Servers};
use tidegate::region::{Class, EngineSettings, Region};
use tidegate::{Gate, Limit, Limiter};
use tidegate_testkit::{Proxy, Redis, Traffic};
use tokio::task::JoinSet;

use super::tail::Tail;
use crate::machine;

/// Requests under way at any time.
const AT_ONCE: u64 = 8;

/// One reply of Redis in this many is late, by this time.
const LATE_IN: u32 = 100;
const LATE_BY: Duration = Duration::from_millis(20);

/// Deadline of a request: longer than any reply takes, so that every latency is measured.
const DEADLINE_US: u64 = 30_000_000;

/// After how long a call is made again in a region that never does.
const NEVER_US: u64 = u64::MAX / 4;

const LIMIT: &str = "per_key";

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Hedge {
    pub(super) late_in: u32,
    pub(super) late_ms: u64,
    pub(super) again_after_ms: u64,
    pub(super) once: Tail,
    pub(super) again: Tail,
}

/// Runs it; gives the store too, which is looked at in the end.
pub(super) fn run(keys: u64) -> Result<(Hedge, Redis)> {
    eprintln!(
        "hedge: {keys} cold keys, one reply in {LATE_IN} is {LATE_BY:?} late, without and with a hedge"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let redis = Redis::start(&[]);
    let again = EngineSettings { deadline_us: DEADLINE_US, ..EngineSettings::default() };
    let once = EngineSettings { hedge_us: NEVER_US, ..again };
    let tail = |name: &'static str, settings| {
        let proxy = Proxy::start(redis.address());
        runtime.block_on(cold_requests(&proxy, name, settings, keys))
    };
    let hedge = Hedge {
        late_in: LATE_IN,
        late_ms: LATE_BY.as_millis() as u64,
        again_after_ms: again.hedge_us / 1_000,
        once: tail("once", once)?,
        again: tail("again", again)?,
    };
    Ok((hedge, redis))
}

/// Checks each key once, in a region with this name and these settings.
async fn cold_requests(proxy: &Proxy, name: &str, settings: EngineSettings, keys: u64) -> Result<Tail> {
    let limit = Limit::gcra(100, Duration::from_mins(1))?;
    let limiter = Arc::new(Limiter::builder().limit(LIMIT, limit).build()?);
    let origin = RedisOrigin::open(RedisConfig::new(Servers::Single(proxy.url()), 1)).map_err(Error::msg)?;
    let region = Arc::new(Region::join_as(name, limiter, Arc::new(origin), settings)?);
    let gate = region.gate("", LIMIT, Class::Security)?;
    // Connections are made, and the script is there.
    ask(&region, &gate, "first").await?;
    proxy.set(Traffic::DelayOneIn(LATE_IN, LATE_BY));
    let mut clients = JoinSet::new();
    for client in 0..AT_ONCE {
        let (region, gate) = (Arc::clone(&region), gate.clone());
        clients.spawn(async move {
            let mut took_us = Vec::new();
            for key in (client..keys).step_by(AT_ONCE as usize) {
                took_us.push(ask(&region, &gate, &key.to_string()).await?);
            }
            Ok::<_, Error>(took_us)
        });
    }
    let mut took_us = Vec::new();
    while let Some(its) = clients.join_next().await {
        took_us.extend(its.context("a client panicked")??);
    }
    region.leave().await;
    Tail::of(took_us)
}

/// How long a request took, µs, that passes.
async fn ask(region: &Region, gate: &Gate, key: &str) -> Result<u64> {
    let began = machine::now();
    let ruling = region.check(&[gate.region_check(key)]).await?;
    ensure!(ruling.is_allowed(), "a cold key was denied: {ruling:?}");
    Ok((machine::now() - began).as_micros() as u64)
}
