//! Load over HTTP, by wrk.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tempfile::TempDir;

use super::case::{Contestant, Loads};
use super::{CONNECTIONS, KEYS, LIMIT, Load, PERIOD};

const WARM_UP: Duration = Duration::from_secs(2);

/// Prefix of the script's output.
const MARK: &str = "tidegate-bench: ";

pub(super) struct WrkLoad {
    port: u16,
    folder: TempDir,
}

/// The output of the script; latencies in microseconds.
#[derive(Deserialize)]
struct WrkOutput {
    requests: f64,
    duration_us: f64,
    p50_us: f64,
    p99_us: f64,
    errors: u64,
}

impl WrkLoad {
    pub(super) fn new(port: u16, contender: Contestant) -> Result<Self> {
        let load = Self { port, folder: tempfile::tempdir()? };
        std::fs::write(load.script(), script(contender))?;
        Ok(load)
    }

    fn script(&self) -> std::path::PathBuf {
        self.folder.path().join("load.lua")
    }

    fn wrk(&self, time: Duration) -> Result<Load> {
        let mut wrk = Command::new("wrk");
        // One thread: the other core is the server's.
        wrk.args(["-t", "1", "-c", &CONNECTIONS.to_string(), "-d", &format!("{}s", time.as_secs()), "-s"]);
        wrk.arg(self.script()).arg(format!("http://127.0.0.1:{}/", self.port));
        let output = wrk.output().context("wrk: Debian has it in wrk")?;
        ensure!(output.status.success(), "wrk ended with {}", output.status);
        parse(&String::from_utf8_lossy(&output.stdout))
    }
}

impl Loads for WrkLoad {
    fn warm_up(&self) -> Result<Load> {
        self.wrk(WARM_UP)
    }

    fn run(&self, _warm: &Load, time: Duration) -> Result<Load> {
        self.wrk(time)
    }
}

/// Returns the path and the body of a check of one limit by `contender`, for a key `k%d`.
fn question(contender: Contestant) -> (&'static str, String) {
    let seconds = PERIOD.as_secs();
    match contender {
        Contestant::ThrottlecrabHttp => (
            "/throttle",
            format!(
                r#"{{"key":"k%d","max_burst":{},"count_per_period":{LIMIT},"period":{seconds}}}"#,
                LIMIT - 1
            ),
        ),
        _ => (
            "/v2/ratelimit.limit",
            format!(
                r#"{{"namespace":"bench","identifier":"k%d","limit":{LIMIT},"duration":{}}}"#,
                seconds * 1_000
            ),
        ),
    }
}

/// The question, about a key drawn at random. The script never sets a seed, so every server gets
/// the same keys.
fn script(contender: Contestant) -> String {
    let (path, body) = question(contender);
    format!(
        r#"
local headers = {{ ["content-type"] = "application/json" }}
request = function()
  return wrk.format("POST", "{path}", headers, string.format('{body}', math.random(0, {})))
end
done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format('{MARK}{{"requests":%d,"duration_us":%d,"p50_us":%f,"p99_us":%f,"errors":%d}}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.timeout + errors.status))
end
"#,
        KEYS - 1
    )
}

fn parse(output: &str) -> Result<Load> {
    let line = output.lines().find_map(|line| line.strip_prefix(MARK));
    let printed: WrkOutput = serde_json::from_str(line.with_context(|| format!("wrk printed {output:?}"))?)?;
    ensure!(
        printed.errors == 0 && printed.requests > 0.0,
        "{} errors in {} requests",
        printed.errors,
        printed.requests
    );
    Ok(Load {
        operations: printed.requests,
        per_second: printed.requests / (printed.duration_us / 1e6),
        p50_us: printed.p50_us,
        p99_us: printed.p99_us,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_is_asked_the_same() {
        let asked = |contender| {
            let (_, body) = question(contender);
            serde_json::from_str::<serde_json::Value>(&body.replace("%d", "7")).expect("JSON")
        };
        let (ours, theirs) = (asked(Contestant::Tidegate), asked(Contestant::ThrottlecrabHttp));
        assert_eq!(ours["identifier"], theirs["key"]);
        assert_eq!(ours["limit"], theirs["count_per_period"]);
        assert_eq!(ours["duration"].as_u64(), theirs["period"].as_u64().map(|seconds| seconds * 1_000));
        // Both allow a burst of the whole limit, as a window does: one request, and `max_burst` on
        // top.
        assert_eq!(ours["limit"].as_u64(), theirs["max_burst"].as_u64().map(|burst| burst + 1));
        for contender in [Contestant::Tidegate, Contestant::ThrottlecrabHttp, Contestant::NoopHttp] {
            assert!(script(contender).contains("math.random(0, 999999)"), "a million keys");
        }
    }

    #[test]
    fn a_load_with_errors_is_no_load() {
        let line = |errors| {
            format!(
                "Running\n{MARK}{{\"requests\":100,\"duration_us\":2000000,\
                 \"p50_us\":1,\"p99_us\":2,\"errors\":{errors}}}\n"
            )
        };
        assert!((parse(&line(0)).expect("good").per_second - 50.0).abs() < 1e-9);
        assert!(parse(&line(1)).is_err() && parse("").is_err());
    }
}
