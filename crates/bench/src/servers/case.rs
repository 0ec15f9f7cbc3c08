//! The cases, and the servers compared in each.

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

use super::grpc::GrpcLoad;
use super::redis::RedisLoad;
use super::wrk::WrkLoad;
use super::{Load, redis};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Case {
    /// A command at a time for each connection.
    RespP1,
    /// Sixteen commands at a time.
    RespP16,
    /// A request at a time for each connection.
    Http,
    /// A call at a time for each connection.
    Grpc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Contestant {
    Tidegate,
    RedisPing,
    RedisIncr,
    RedisGcraLua,
    ThrottlecrabHttp,
    ThrottlecrabGrpc,
    NoopHttp,
    NoopGrpc,
}

impl Case {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::RespP1 => "resp_p1",
            Self::RespP16 => "resp_p16",
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }

    pub(super) const fn contenders(self) -> &'static [Contestant] {
        match self {
            Self::RespP1 | Self::RespP16 => &[
                Contestant::Tidegate,
                Contestant::RedisPing,
                Contestant::RedisIncr,
                Contestant::RedisGcraLua,
            ],
            Self::Http => &[Contestant::Tidegate, Contestant::ThrottlecrabHttp, Contestant::NoopHttp],
            Self::Grpc => &[Contestant::Tidegate, Contestant::ThrottlecrabGrpc, Contestant::NoopGrpc],
        }
    }

    /// Returns the load for the server of `contender` at a port.
    pub(super) fn load(self, contender: Contestant, port: u16) -> Result<Box<dyn Loads>> {
        Ok(match self {
            Self::RespP1 => Box::new(RedisLoad::new(port, 1, redis::command(contender, port)?)?),
            Self::RespP16 => Box::new(RedisLoad::new(port, 16, redis::command(contender, port)?)?),
            Self::Http => Box::new(WrkLoad::new(port, contender)?),
            Self::Grpc => Box::new(GrpcLoad::new(port, contender)),
        })
    }
}

impl Contestant {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Tidegate => "tidegate",
            Self::RedisPing => "redis_ping",
            Self::RedisIncr => "redis_incr",
            Self::RedisGcraLua => "redis_gcra_lua",
            Self::ThrottlecrabHttp => "throttlecrab_http",
            Self::ThrottlecrabGrpc => "throttlecrab_grpc",
            Self::NoopHttp => "noop_http",
            Self::NoopGrpc => "noop_grpc",
        }
    }
}

/// Puts a load on a server from another process.
pub(super) trait Loads {
    /// Runs a short load that warms connections, keys and code. Returns its speed.
    fn warm_up(&self) -> Result<Load>;

    /// The load that counts.
    fn run(&self, warm: &Load, time: Duration) -> Result<Load>;
}
