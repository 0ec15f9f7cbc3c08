//! Readings of a server: its counters, over HTTP, and the CPU time of its process.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// Timeout of a reply with metrics.
const METRICS_TIME_MAX: Duration = Duration::from_secs(30);

/// The counters of a server, as it reported them.
pub(crate) struct Metrics(String);

impl Metrics {
    /// Reads the metrics at the address of a server without tokens.
    pub(crate) fn read(address: SocketAddr) -> Result<Self> {
        Self::read_as("none", address)
    }

    /// Reads the metrics at the address with a token.
    pub(crate) fn read_as(token: &str, address: SocketAddr) -> Result<Self> {
        let mut stream = TcpStream::connect(address).context("the port for metrics")?;
        stream.set_read_timeout(Some(METRICS_TIME_MAX))?;
        let fields = format!("Host: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close");
        stream.write_all(format!("GET /metrics HTTP/1.1\r\n{fields}\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("metrics")?;
        Self::parse(&answer)
    }

    fn parse(answer: &str) -> Result<Self> {
        let (head, metrics) = answer.split_once("\r\n\r\n").context("no answer")?;
        ensure!(head.starts_with("HTTP/1.1 200"), "the answer is not a metrics page: {answer}");
        Ok(Self(metrics.to_owned()))
    }

    /// Returns the sum of a counter over its label sets that contain `label`, or over all if that
    /// is empty. `None` if there is no such counter: a server may omit counters without a count.
    pub(crate) fn sum(&self, counter: &str, label: &str) -> Result<Option<u64>> {
        let mut sum = None;
        for line in self.0.lines() {
            let Some(rest) = line.strip_prefix(counter) else { continue };
            let (labels, count) = rest.rsplit_once(' ').with_context(|| line.to_owned())?;
            if (labels.is_empty() || labels.starts_with('{')) && labels.contains(label) {
                let count: u64 = count.parse().with_context(|| line.to_owned())?;
                sum = Some(sum.unwrap_or(0) + count);
            }
        }
        Ok(sum)
    }

    /// Returns a value that need not be whole, of the first label set that contains `label`; 0 if
    /// there is none.
    pub(crate) fn number(&self, name: &str, label: &str) -> Result<f64> {
        let line = self.0.lines().find(|line| line.starts_with(name) && line.contains(label));
        let Some((_, value)) = line.and_then(|line| line.rsplit_once(' ')) else { return Ok(0.0) };
        value.parse().with_context(|| value.to_owned())
    }
}

/// CPU time that a process has used so far, all its threads together.
pub(crate) fn cpu_time(process: u32) -> Result<Duration> {
    let path = format!("/proc/{process}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let ticks = ticks(&stat).with_context(|| format!("{path} has no CPU times"))?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// Parses the CPU ticks. The program's name, in parentheses, may contain anything, so the fields
/// begin after the last parenthesis.
fn ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(text: &str) -> Metrics {
        Metrics::parse(&format!("HTTP/1.1 200 OK\r\n\r\n{text}")).unwrap()
    }

    #[test]
    fn a_counter_is_summed_over_all_else() {
        let metrics_page = metrics(
            "# TYPE tidegate_decisions counter\n\
             tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"allowed\",source=\"local\"} 7\n\
             tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"allowed\",source=\"shed\"} 40\n\
             tidegate_decisions_total{surface=\"direct\",class=\"comfort\",outcome=\"allowed\",source=\"shed\"} 2\n\
             tidegate_origin_calls_total 3\n\
             tidegate_origin_calls_total_of_something_else 100\n",
        );
        assert_eq!(metrics_page.sum("tidegate_decisions_total", "source=\"shed\"").unwrap(), Some(42));
        assert_eq!(metrics_page.sum("tidegate_decisions_total", "").unwrap(), Some(49));
        assert_eq!(metrics_page.sum("tidegate_origin_calls_total", "").unwrap(), Some(3));
        assert_eq!(metrics_page.sum("tidegate_origin_waited_total", "").unwrap(), None);
        assert!(metrics("broken_total x\n").sum("broken_total", "").is_err());
    }

    #[test]
    fn scrape_without_permission_is_an_error() {
        assert!(Metrics::parse("HTTP/1.1 403 Forbidden\r\n\r\n").is_err());
        assert!(Metrics::parse("").is_err());
    }

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "17 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 41 1 13 14 15";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("17 (x) S 1"), None);
    }
}
