//! The surfaces of a server: one limit per day, checked over each protocol.

use std::time::Duration;

use anyhow::{Error, Result, ensure};
use prost::Message;
use serde::Serialize;
use tidegate_load::{CheckDecision, HttpConnection, RespConnection, throttle};
use tidegate_testkit::Server;
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::transport::Channel;

use super::case::rules_toml;
use super::client::ANSWER_TIME_MAX;
use crate::servers::grpc::{self, Descriptor, ENVOY_METHOD, Entry, EnvoyRequest, LimitOverride};

/// The period of every limit here. A limit of 1,000 drains by one unit in 86 s, longer than a
/// sequence takes.
const PERIOD: Duration = Duration::from_hours(24);

/// `DAY` of `envoy.type.v3.RateLimitUnit`.
const ENVOY_DAY: i32 = 4;

/// `OK` and `OVER_LIMIT` of `envoy.service.ratelimit.v3.RateLimitResponse.Code`.
const ENVOY_OK: i32 = 1;
const ENVOY_OVER_LIMIT: i32 = 2;

/// The namespace, or the domain, of limits that come with requests.
const NAMESPACE: &str = "exact";

/// A protocol by which clients ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Surface {
    /// A limit that comes with the request, over HTTP.
    RatelimitLimit,
    /// A rule, over HTTP.
    Check,
    /// A limit that comes with the command, over RESP.
    Throttle,
    /// A limit that comes with the descriptor, over gRPC.
    Envoy,
}

impl Surface {
    pub(super) const ALL: [Self; 4] = [Self::RatelimitLimit, Self::Check, Self::Throttle, Self::Envoy];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::RatelimitLimit => "/v2/ratelimit.limit",
            Self::Check => "/v1/check",
            Self::Throttle => "CL.THROTTLE",
            Self::Envoy => "ShouldRateLimit",
        }
    }

    /// Connects to a server.
    pub(super) fn connect(self, server: &Server) -> Result<Box<dyn SurfaceClient>> {
        let http = || HttpConnection::open(server.address("http"), ANSWER_TIME_MAX);
        let resp = || RespConnection::open(server.address("resp"), ANSWER_TIME_MAX);
        Ok(match self {
            Self::RatelimitLimit => Box::new(RatelimitClient(http()?)),
            Self::Check => Box::new(CheckClient(http()?)),
            Self::Throttle => Box::new(ThrottleClient(resp()?)),
            Self::Envoy => Box::new(EnvoyClient::open(server.address("grpc").port())?),
        })
    }
}

/// A connection to one server.
pub(super) trait SurfaceClient {
    /// Checks one unit of a key with a limit of `limit` per day.
    fn ask(&mut self, key: &str, limit: u32) -> Result<CheckDecision>;
}

/// The rules by which `/v1/check` decides these limits.
pub(super) fn rules_file(limits: &[u32]) -> String {
    let seconds = PERIOD.as_secs();
    let fields = |limit: &u32| format!("class = 'comfort'\nlimit = {limit}\nperiod = '{seconds}s'");
    rules_toml(limits.iter().map(|limit| (rule(*limit), fields(limit))))
}

fn rule(limit: u32) -> String {
    format!("per_day_{limit}")
}

struct RatelimitClient(HttpConnection);

impl SurfaceClient for RatelimitClient {
    fn ask(&mut self, key: &str, limit: u32) -> Result<CheckDecision> {
        self.0.limit(NAMESPACE, key, limit.into(), PERIOD)?.map_err(Error::msg)
    }
}

struct CheckClient(HttpConnection);

impl SurfaceClient for CheckClient {
    fn ask(&mut self, key: &str, limit: u32) -> Result<CheckDecision> {
        self.0.check(&[("rule", &rule(limit)), ("key", key)], 1)?.map_err(Error::msg)
    }
}

struct ThrottleClient(RespConnection);

impl SurfaceClient for ThrottleClient {
    fn ask(&mut self, key: &str, limit: u32) -> Result<CheckDecision> {
        self.0.send(&throttle(key, limit.into(), PERIOD))?;
        self.0.read()?.map_err(Error::msg)
    }
}

/// A client with a runtime of its own, which runs while a call is under way.
struct EnvoyClient {
    runtime: Runtime,
    client: Grpc<Channel>,
}

/// `envoy.service.ratelimit.v3.RateLimitResponse`, as far as it is read.
#[derive(Clone, PartialEq, Message)]
struct EnvoyReply {
    #[prost(int32, tag = "1")]
    overall_code: i32,
    #[prost(message, repeated, tag = "2")]
    statuses: Vec<EnvoyStatus>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct EnvoyStatus {
    #[prost(uint32, tag = "3")]
    limit_remaining: u32,
}

impl EnvoyClient {
    fn open(port: u16) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(grpc::open(port))?;
        Ok(Self { runtime, client })
    }
}

impl SurfaceClient for EnvoyClient {
    fn ask(&mut self, key: &str, limit: u32) -> Result<CheckDecision> {
        let entry = Entry { key: "key".to_owned(), value: key.to_owned() };
        let limit = LimitOverride { requests_per_unit: limit, unit: ENVOY_DAY };
        let request = EnvoyRequest {
            domain: NAMESPACE.to_owned(),
            descriptors: vec![Descriptor { entries: vec![entry], limit: Some(limit) }],
            hits_addend: 1,
        };
        let reply = self.runtime.block_on(grpc::unary(&mut self.client, ENVOY_METHOD, request))?;
        envoy_decision(&reply)
    }
}

fn envoy_decision(reply: &EnvoyReply) -> Result<CheckDecision> {
    let (code, statuses) = (reply.overall_code, &reply.statuses);
    ensure!(statuses.len() <= 1, "{} descriptors were decided, expected 1", statuses.len());
    ensure!(matches!(code, ENVOY_OK | ENVOY_OVER_LIMIT), "unexpected status code {code}");
    let remaining = statuses.first().map(|status| status.limit_remaining.into());
    Ok(CheckDecision { is_allowed: code == ENVOY_OK, remaining })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_a_rule_without_a_tolerance() {
        let text = rules_file(&[1, 1_000]);
        assert_eq!(text.matches("[[rules]]").count(), 2);
        assert!(
            text.contains("name = 'per_day_1000'\n") && text.contains("limit = 1000\nperiod = '86400s'\n")
        );
        assert!(!text.contains("tolerance"));
    }

    #[test]
    fn an_envoy_reply_is_a_decision_about_one_descriptor() {
        let status = EnvoyStatus { limit_remaining: 7 };
        let reply = |overall_code, statuses| EnvoyReply { overall_code, statuses };
        let allowed = envoy_decision(&reply(ENVOY_OK, vec![status])).unwrap();
        assert_eq!(allowed, CheckDecision { is_allowed: true, remaining: Some(7) });
        assert!(!envoy_decision(&reply(ENVOY_OVER_LIMIT, vec![status])).unwrap().is_allowed);
        assert!(envoy_decision(&reply(0, vec![status])).is_err());
        assert_eq!(envoy_decision(&reply(ENVOY_OK, vec![])).unwrap().remaining, None);
        assert!(envoy_decision(&reply(ENVOY_OK, vec![status; 2])).is_err());
    }
}
