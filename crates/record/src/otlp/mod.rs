//! Export of records as OTLP logs over HTTP to a collector: batched, retried, on its own thread.
//!
//! No other thread waits for it. Records that do not fit into its queue, or cannot be delivered,
//! are dropped and counted; the store has them.

mod body;
mod queue;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ureq::Agent;
use ureq::http::{HeaderName, HeaderValue, Uri};

use self::body::{Resource, rejected};
pub use self::queue::Delivery;
pub(crate) use self::queue::Queue;
use crate::log::{LOOK_EVERY_MS, NowMs};
use crate::store::BlockOrigin;

/// Where a collector takes logs, if the address names no path.
const PATH: &str = "/v1/logs";

/// How long a collector may take for a batch. Longer: patience with a slow one; a stop takes longer
/// while it hangs.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// Maximum size of a response that is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Maximum attempts for a batch, over about three minutes. More: in longer outages of the
/// collector, only records that exceed the queue are lost; a batch that it never accepts delays the
/// others for longer.
const ATTEMPTS_MAX: u32 = 10;

/// The first wait before a batch is tried again; each is twice as long as the one before.
const BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// Time for the remaining records when the log closes, in milliseconds. Longer: fewer are lost with
/// a slow collector; a stop takes longer.
const CLOSE_MS_MAX: u64 = 5_000;

/// The most headers of a setting.
const HEADERS_MAX: usize = 16;

/// Address of a collector, and the headers that authorize requests.
#[derive(Clone, PartialEq, Eq)]
pub struct Otlp {
    url: String,
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// Omits the headers, which may contain secrets.
impl fmt::Debug for Otlp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Otlp").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Otlp {
    /// From a URL such as `http://127.0.0.1:4318`; without a path it is that of OTLP.
    pub fn new(url: &str) -> Result<Self, String> {
        let wrong = || format!("{url:?} is not a URL such as http://127.0.0.1:4318");
        let uri: Uri = url.parse().ok().filter(|_| !url.contains('@')).ok_or_else(|| {
            // The text before an @ may be a password.
            if url.contains('@') {
                "has an @: credentials belong in log_otlp_headers".to_owned()
            } else {
                wrong()
            }
        })?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err(wrong());
        }
        let bare = uri.query().is_none() && matches!(uri.path(), "" | "/");
        let url = if bare { format!("{}{PATH}", url.trim_end_matches('/')) } else { url.to_owned() };
        Ok(Self { url, headers: Vec::new() })
    }

    /// The same with headers, such as `authorization=Bearer abc,x-team=edge`. No message repeats a
    /// value.
    pub fn with_headers(mut self, text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
        if parts.len() > HEADERS_MAX {
            return Err(format!("{} headers is outside 0 to {HEADERS_MAX}", parts.len()));
        }
        for (at, part) in parts.into_iter().enumerate() {
            let wrong = || format!("the header {} is not a name=value that a header can carry", at + 1);
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| wrong())?;
            let mut value = HeaderValue::from_str(value.trim()).map_err(|_| wrong())?;
            value.set_sensitive(true);
            self.headers.push((name, value));
        }
        Ok(self)
    }
}

/// Handle of the sending thread. The thread ends when this is dropped.
pub(crate) struct OtlpThread {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl OtlpThread {
    pub(crate) fn start(to: Otlp, writer: &BlockOrigin, seed: u64, now_ms: NowMs) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ANSWER_TIME_MAX))
            .max_redirects(0)
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .build();
        let sender = Sender {
            to,
            agent: config.into(),
            resource: Resource::new(writer),
            queue: Arc::clone(&queue),
            chance: fastrand::Rng::with_seed(seed),
            now_ms,
            complained_ms: None,
            close_by_ms: None,
        };
        let thread = std::thread::Builder::new().name("log-otlp".to_owned()).spawn(move || sender.run())?;
        Ok(Self { queue, thread: Some(thread) })
    }

    pub(crate) fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    pub(crate) fn deliveries(&self) -> Deliveries {
        Deliveries(Arc::clone(&self.queue))
    }
}

/// Delivery counts of the OTLP export.
#[derive(Clone, Debug)]
pub struct Deliveries(Arc<Queue>);

impl Deliveries {
    /// Returns the counts so far, without the records that wait.
    pub fn until_now(&self) -> Delivery {
        self.0.delivery()
    }
}

/// Sends the queued records before it returns, if the collector accepts them in time.
impl Drop for OtlpThread {
    fn drop(&mut self) {
        self.queue.close();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that sends the decision log ended in a panic");
        }
    }
}

/// The reason why a batch was not accepted.
enum DeliveryError {
    /// A retry may succeed, after the delay that the collector asked for, if any.
    ForNow(String, Option<Duration>),
    /// It never will be.
    ForGood(String),
}

struct Sender {
    to: Otlp,
    agent: Agent,
    resource: Resource,
    queue: Arc<Queue>,
    chance: fastrand::Rng,
    now_ms: NowMs,
    complained_ms: Option<u64>,
    /// Deadline of the remaining records; `None` until the log is closed.
    close_by_ms: Option<u64>,
}

impl Sender {
    fn run(mut self) {
        while let Some(batch) = self.queue.next() {
            let lost = if self.is_late() { batch.records } else { self.deliver(&batch.bytes, batch.records) };
            self.queue.count(batch.records.saturating_sub(lost), lost);
        }
    }

    /// Whether the log is closed and the time for the remaining records is over.
    fn is_late(&mut self) -> bool {
        if !self.queue.is_closed() {
            return false;
        }
        let now_ms = (self.now_ms)();
        now_ms >= *self.close_by_ms.get_or_insert(now_ms.saturating_add(CLOSE_MS_MAX))
    }

    /// Sends a batch until it is accepted or further retries are pointless. Returns the number of
    /// lost records.
    fn deliver(&mut self, batch: &[u8], records: u64) -> u64 {
        let body = self.resource.body(batch);
        for attempt in 1..=ATTEMPTS_MAX {
            match self.post(&body) {
                Ok(rejected) => return rejected.min(records),
                Err(DeliveryError::ForGood(why)) => {
                    self.complain(&why);
                    return records;
                }
                Err(DeliveryError::ForNow(why, asked)) => {
                    self.complain(&why);
                    let wait = asked.unwrap_or_else(|| self.backoff(attempt)).min(BACKOFF_MAX);
                    // A server that stops does not wait for an unreachable collector.
                    if attempt == ATTEMPTS_MAX || self.queue.wait_closed(wait) {
                        self.close_by_ms = self.queue.is_closed().then_some(0);
                        return records;
                    }
                }
            }
        }
        records
    }

    /// Returns the delay before a retry. It varies by up to a half, so that servers do not all
    /// return to a collector at once.
    fn backoff(&mut self, attempt: u32) -> Duration {
        let whole = BACKOFF_MIN.saturating_mul(1 << (attempt - 1).min(16)).min(BACKOFF_MAX);
        whole.mul_f64(1.0 - self.chance.f64() / 2.0)
    }

    /// Posts a batch; how many of its records the collector did not want.
    fn post(&self, body: &[u8]) -> Result<u64, DeliveryError> {
        let mut request = self.agent.post(&self.to.url).content_type("application/json");
        for (name, value) in &self.to.headers {
            request = request.header(name, value);
        }
        let mut response =
            request.send(body).map_err(|error| DeliveryError::ForNow(error.to_string(), None))?;
        let status = response.status().as_u16();
        match status {
            200..=299 => {
                let answer = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
                Ok(answer.map_or(0, |text| rejected(&text)))
            }
            // Status codes that the protocol defines as retryable.
            429 | 502 | 503 | 504 => {
                let after = response.headers().get("retry-after");
                let after = after.and_then(|after| after.to_str().ok()?.trim().parse().ok());
                Err(DeliveryError::ForNow(
                    format!("the collector answered {status}"),
                    after.map(Duration::from_secs),
                ))
            }
            _ => Err(DeliveryError::ForGood(format!("the collector answered {status}"))),
        }
    }

    /// Logs a failure once a minute at most, because an unreachable collector stays so for a while.
    /// Losses are always counted.
    fn complain(&mut self, why: &str) {
        let now_ms = (self.now_ms)();
        if self.complained_ms.is_none_or(|at_ms| now_ms.abs_diff(at_ms) >= LOOK_EVERY_MS) {
            self.complained_ms = Some(now_ms);
            tracing::warn!(
                url = self.to.url,
                why,
                "log_otlp: delivery failed; lost records are counted in `tidegate_log_otlp_records_total`"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_a_path_get_that_of_the_protocol() {
        for (given, url) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/logs"),
            ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/logs"),
            ("https://otlp.example/team/logs", "https://otlp.example/team/logs"),
        ] {
            assert_eq!(Otlp::new(given).expect(given).url, url);
        }
        for wrong in ["", "4318", "ftp://host", "http://", "grpc://host:4317"] {
            assert!(Otlp::new(wrong).expect_err(wrong).contains("is not a URL"), "{wrong}");
        }
    }

    #[test]
    fn no_message_has_a_secret() {
        let problem = Otlp::new("http://me:hunter2@host").expect_err("credentials");
        assert!(problem.contains("log_otlp_headers") && !problem.contains("hunter2"), "{problem}");
        let to = Otlp::new("http://host").expect("a URL");
        for wrong in ["authorization", "a b=hunter2", "x=hunter2\n"] {
            let problem = to.clone().with_headers(wrong).map(drop);
            let message = format!("{problem:?}");
            assert!(!message.contains("hunter2"), "{message}");
        }
        let good = to.with_headers("authorization=Bearer hunter2, x-team=edge=1").expect("headers");
        assert!(!format!("{good:?}").contains("hunter2"), "{good:?}");
        assert_eq!(good.headers[1].1, "edge=1");
    }
}
