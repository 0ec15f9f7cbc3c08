//! Load over gRPC: a client of our own in a process of its own, the same for every server.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use hdrhistogram::Histogram;
use prost::Message;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::task::{JoinSet, LocalSet};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use super::case::{Contestant, Loads};
use super::{CONNECTIONS, KEYS, LIMIT, Load, PERIOD};
use crate::machine;

const WARM_UP: Duration = Duration::from_secs(2);

pub(crate) const ENVOY_METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const THROTTLECRAB_METHOD: &str = "/throttlecrab.RateLimiter/Throttle";

/// `envoy.service.ratelimit.v3.RateLimitRequest`, as far as it is sent.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct EnvoyRequest {
    #[prost(string, tag = "1")]
    pub(crate) domain: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) descriptors: Vec<Descriptor>,
    #[prost(uint32, tag = "3")]
    pub(crate) hits_addend: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<Entry>,
    #[prost(message, optional, tag = "2")]
    pub(crate) limit: Option<LimitOverride>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Entry {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}

/// A limit that comes with the request.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct LimitOverride {
    #[prost(uint32, tag = "1")]
    pub(crate) requests_per_unit: u32,
    /// `envoy.type.v3.RateLimitUnit`.
    #[prost(int32, tag = "2")]
    pub(crate) unit: i32,
}

/// `envoy.service.ratelimit.v3.RateLimitResponse`, as far as it is read.
#[derive(Clone, PartialEq, Message)]
pub(super) struct EnvoyResponse {
    /// 1 is OK, 2 is over the limit; never 0.
    #[prost(int32, tag = "1")]
    pub(super) overall_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ThrottlecrabRequest {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ThrottlecrabResponse {
    #[prost(bool, tag = "1")]
    allowed: bool,
    #[prost(int32, tag = "2")]
    limit: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Dialect {
    Envoy,
    Throttlecrab,
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[arg(long)]
    port: u16,
    #[arg(long)]
    dialect: Dialect,
    #[arg(long)]
    seconds: u64,
}

pub(super) struct GrpcLoad {
    port: u16,
    dialect: &'static str,
}

impl GrpcLoad {
    pub(super) fn new(port: u16, contender: Contestant) -> Self {
        Self {
            port,
            dialect: if contender == Contestant::ThrottlecrabGrpc { "throttlecrab" } else { "envoy" },
        }
    }

    fn start(&self, time: Duration) -> Result<Load> {
        let mut load = Command::new(std::env::current_exe().context("the path of this program")?);
        load.args(["servers", "grpc-load", "--port", &self.port.to_string(), "--dialect", self.dialect]);
        let output = load.args(["--seconds", &time.as_secs().to_string()]).output().context("the load")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the load ended with {}: {}", output.status, stderr.trim_end());
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

impl Loads for GrpcLoad {
    fn warm_up(&self) -> Result<Load> {
        self.start(WARM_UP)
    }

    fn run(&self, _warm: &Load, time: Duration) -> Result<Load> {
        self.start(time)
    }
}

/// Runs the load, and prints its figures as JSON.
pub(super) fn run(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let load = LocalSet::new().block_on(&runtime, put_load(args))?;
    println!("{}", serde_json::to_string(&load)?);
    Ok(())
}

async fn put_load(args: &Args) -> Result<Load> {
    let clients = connect(args.port).await?;
    let (dialect, time) = (args.dialect, Duration::from_secs(args.seconds));
    let mut callers = JoinSet::new();
    let started = machine::now();
    for (seed, client) in clients.into_iter().enumerate() {
        let caller = Caller { client, draw: SmallRng::seed_from_u64(seed as u64), dialect };
        callers.spawn_local(caller.call_until(started + time));
    }
    let mut latency = histogram()?;
    while let Some(found) = callers.join_next().await {
        latency.add(found??)?;
    }
    let seconds = (machine::now() - started).as_secs_f64();
    ensure!(!latency.is_empty(), "no call was answered");
    Ok(Load {
        operations: latency.len() as f64,
        per_second: latency.len() as f64 / seconds,
        p50_us: latency.value_at_quantile(0.5) as f64 / 1e3,
        p99_us: latency.value_at_quantile(0.99) as f64 / 1e3,
    })
}

/// A connection for each caller, as separate clients would have.
async fn connect(port: u16) -> Result<Vec<Grpc<Channel>>> {
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(open(port).await?);
    }
    Ok(clients)
}

/// A client with a connection of its own.
pub(crate) async fn open(port: u16) -> Result<Grpc<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?.tcp_nodelay(true);
    Ok(Grpc::new(endpoint.connect().await?))
}

/// Makes one call, and waits for its reply.
pub(crate) async fn unary<Q, A>(
    client: &mut Grpc<Channel>,
    method: &'static str,
    question: Q,
) -> Result<A, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec: ProstCodec<Q, A> = ProstCodec::default();
    let answer = client.unary(Request::new(question), PathAndQuery::from_static(method), codec).await?;
    Ok(answer.into_inner())
}

/// Nanoseconds, up to a minute, to three digits.
fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 60_000_000_000, 3)?)
}

struct Caller {
    client: Grpc<Channel>,
    draw: SmallRng,
    dialect: Dialect,
}

impl Caller {
    async fn call_until(mut self, ends: std::time::Instant) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        let mut sent = machine::now();
        while sent < ends {
            self.call().await?;
            let answered = machine::now();
            latency.saturating_record((answered - sent).as_nanos() as u64);
            sent = answered;
        }
        Ok(latency)
    }

    async fn call(&mut self) -> Result<()> {
        let key = self.draw.random_range(0..KEYS);
        match self.dialect {
            Dialect::Envoy => {
                let answer: EnvoyResponse = unary(&mut self.client, ENVOY_METHOD, envoy_request(key)).await?;
                ensure!(answer.overall_code != 0, "an answer without a decision");
            }
            Dialect::Throttlecrab => {
                let answer: ThrottlecrabResponse =
                    unary(&mut self.client, THROTTLECRAB_METHOD, throttlecrab_request(key)).await?;
                ensure!(answer.limit != 0, "an answer without a decision");
            }
        }
        Ok(())
    }
}

fn envoy_request(key: u64) -> EnvoyRequest {
    let entry = Entry { key: "user".to_owned(), value: format!("k{key}") };
    EnvoyRequest {
        domain: "bench".to_owned(),
        descriptors: vec![Descriptor { entries: vec![entry], limit: None }],
        hits_addend: 1,
    }
}

fn throttlecrab_request(key: u64) -> ThrottlecrabRequest {
    ThrottlecrabRequest {
        key: format!("k{key}"),
        max_burst: LIMIT as i32 - 1,
        count_per_period: LIMIT as i32,
        period: PERIOD.as_secs() as i32,
        quantity: 1,
    }
}
