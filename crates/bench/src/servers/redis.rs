//! Load over RESP, by redis-benchmark.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::{Contestant, Loads};
use super::{CONNECTIONS, KEYS, LIMIT, Load, PERIOD};

/// Requests of the warm-up, by which the number for the measured time is chosen.
const WARM_UP: u64 = 300_000;

/// Pattern that redis-benchmark replaces with a number below the number of keys.
const KEY: &str = "key:__rand_int__";

/// Timeout of the answer to the first request.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// A plain GCRA, as people write it for Redis: one arrival time for each key, in microseconds of
/// the server's clock.
const GCRA_SCRIPT: &str = r"
local burst, count, period = tonumber(ARGV[1]) + 1, tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local interval = period * 1000000 / count
local tolerance = interval * burst
local tat = math.max(tonumber(redis.call('GET', KEYS[1]) or now), now)
local new = tat + interval
if new - now > tolerance then
  return {1, burst, 0, math.ceil((new - tolerance - now) / 1000000), math.ceil((tat - now) / 1000000)}
end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return {0, burst, math.floor((tolerance - (new - now)) / interval), -1, math.ceil((new - now) / 1000000)}
";

/// Returns the command for `contender`.
pub(super) fn command(contender: Contestant, port: u16) -> Result<Vec<String>> {
    let (burst, limit, period) = ((LIMIT - 1).to_string(), LIMIT.to_string(), PERIOD.as_secs().to_string());
    let words: Vec<&str> = match contender {
        Contestant::RedisPing => vec!["PING"],
        Contestant::RedisIncr => vec!["INCR", KEY],
        Contestant::RedisGcraLua => {
            let digest = load_script(port)?;
            return Ok(["EVALSHA", &digest, "1", KEY, &burst, &limit, &period].map(str::to_owned).to_vec());
        }
        _ => vec!["CL.THROTTLE", KEY, &burst, &limit, &period],
    };
    Ok(words.into_iter().map(str::to_owned).collect())
}

fn load_script(port: u16) -> Result<String> {
    let reply = ask(port, &["SCRIPT", "LOAD", GCRA_SCRIPT])?;
    let digest = reply.lines().nth(1).filter(|digest| digest.len() == 40);
    digest.map(str::to_owned).with_context(|| format!("SCRIPT LOAD answered {reply:?}"))
}

/// Sends one command, and returns the beginning of the answer.
fn ask(port: u16, words: &[&str]) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(ANSWER_TIME_MAX))?;
    stream.write_all(tidegate_load::command(words).as_bytes())?;
    let mut reply = [0; 256];
    let length = stream.read(&mut reply).with_context(|| format!("no answer to {}", words[0]))?;
    Ok(String::from_utf8_lossy(&reply[..length]).into_owned())
}

pub(super) struct RedisLoad {
    port: u16,
    pipeline: u32,
    command: Vec<String>,
}

impl RedisLoad {
    /// Sends the command once, because redis-benchmark before version 7 counts errors as answers.
    /// Later versions end at the first error.
    pub(super) fn new(port: u16, pipeline: u32, command: Vec<String>) -> Result<Self> {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        let reply = ask(port, &words)?;
        ensure!(
            !reply.is_empty() && !reply.starts_with('-'),
            "{} is answered with {reply:?}",
            words.first().unwrap_or(&"")
        );
        Ok(Self { port, pipeline, command })
    }

    fn benchmark(&self, requests: u64) -> Result<Load> {
        let mut benchmark = Command::new("redis-benchmark");
        benchmark
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string()])
            .args(["-c", &CONNECTIONS.to_string(), "-P", &self.pipeline.to_string()])
            .args(["-n", &requests.to_string(), "-r", &KEYS.to_string(), "--csv"])
            .args(&self.command);
        let output = benchmark.output().context("redis-benchmark: Debian has it in redis-tools")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "redis-benchmark ended with {}: {}",
            output.status,
            stderr.trim_end()
        );
        parse(&String::from_utf8_lossy(&output.stdout), requests)
    }
}

impl Loads for RedisLoad {
    fn warm_up(&self) -> Result<Load> {
        self.benchmark(WARM_UP)
    }

    fn run(&self, warm: &Load, time: Duration) -> Result<Load> {
        self.benchmark((warm.per_second * time.as_secs_f64()) as u64)
    }
}

/// The columns `rps`, `p50_latency_ms` and `p99_latency_ms` of the last line; a command may have
/// commas in its name.
fn parse(csv: &str, requests: u64) -> Result<Load> {
    let mut lines = csv.lines().filter(|line| line.starts_with('"'));
    let (Some(header), Some(line)) = (lines.next(), lines.next_back()) else {
        bail!("redis-benchmark printed no table: {csv:?}");
    };
    let names: Vec<&str> = header.trim_matches('"').split("\",\"").collect();
    let values: Vec<&str> = line.trim_matches('"').split("\",\"").collect();
    let value = |name: &str| -> Result<f64> {
        let at = names.iter().position(|known| *known == name);
        let value = at.and_then(|at| values.get(at)).with_context(|| format!("no {name} in {header}"))?;
        Ok(value.parse()?)
    };
    Ok(Load {
        operations: requests as f64,
        per_second: value("rps")?,
        p50_us: value("p50_latency_ms")? * 1e3,
        p99_us: value("p99_latency_ms")? * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_redis_benchmark_is_read_by_its_names() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\
                   \"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
                   \"INCR key:__rand_int__\",\"127226.46\",\"0.205\",\"0.072\",\
                   \"0.199\",\"0.287\",\"0.383\",\"1.167\"\n";
        let load = parse(csv, 1_000).expect("a table");
        assert!((load.per_second - 127_226.46).abs() < 0.01 && (load.operations - 1e3).abs() < 0.01);
        assert!((load.p50_us - 199.0).abs() < 0.01 && (load.p99_us - 383.0).abs() < 0.01);
        assert!(parse("Could not connect", 1).is_err());
    }
}
