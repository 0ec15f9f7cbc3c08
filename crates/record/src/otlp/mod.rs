//! Records as OTLP logs, sent over HTTP to a collector: batched, tried again, on a thread of its own.
//!
//! Nobody waits for it. What does not fit into its queue, or cannot be delivered, is lost and counted; the store has it.

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

/// How long a collector may take for a batch. Longer: patience with a slow one; a stop takes longer while it hangs.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// The largest answer that is looked at.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// How often a batch is tried: for some three minutes. More: longer pauses of the collector that lose only what the queue
/// has no room for; one batch that it never takes holds up the others for longer.
const ATTEMPTS_MAX: u32 = 10;

/// The first wait before a batch is tried again; each is twice as long as the one before.
const BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// How long what is left may take when the log is closed. Longer: less is lost with a slow collector; a stop takes longer.
const CLOSE_MS_MAX: u64 = 5_000;

/// The most headers of a setting.
const HEADERS_MAX: usize = 16;

/// Where logs are sent, and what opens it.
#[derive(Clone, PartialEq, Eq)]
pub struct Otlp {
    url: String,
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// Without what opens it.
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
            // Whatever stands before an @ may be a password.
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

    /// The same with headers, such as `authorization=Bearer abc,x-team=edge`. No message repeats a value.
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

/// The thread that sends, for as long as this is kept.
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

/// Tells what becomes of the records that are to be sent.
#[derive(Clone, Debug)]
pub struct Deliveries(Arc<Queue>);

impl Deliveries {
    /// What became of them until now, but for those that wait.
    pub fn until_now(&self) -> Delivery {
        self.0.delivery()
    }
}

/// What was taken down until now is sent when this returns, if the collector takes it in time.
impl Drop for OtlpThread {
    fn drop(&mut self) {
        self.queue.close();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that sends the decision log ended in a panic");
        }
    }
}

/// Why a batch was not taken.
enum DeliveryError {
    /// It may be, later: not before so long, if the collector said so.
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
    /// Nothing until the log is closed.
    close_by_ms: Option<u64>,
}

impl Sender {
    fn run(mut self) {
        while let Some(batch) = self.queue.next() {
            let lost = if self.is_late() { batch.records } else { self.deliver(&batch.bytes, batch.records) };
            self.queue.count(batch.records.saturating_sub(lost), lost);
        }
    }

    /// Whether the log is closed and what was left has had its time.
    fn is_late(&mut self) -> bool {
        if !self.queue.is_closed() {
            return false;
        }
        let now_ms = (self.now_ms)();
        now_ms >= *self.close_by_ms.get_or_insert(now_ms.saturating_add(CLOSE_MS_MAX))
    }

    /// Sends a batch until it is taken, or there is no point in it; how many of its records were lost.
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
                    // Who is about to stop does not wait for a collector that is gone.
                    if attempt == ATTEMPTS_MAX || self.queue.wait_closed(wait) {
                        self.close_by_ms = self.queue.is_closed().then_some(0);
                        return records;
                    }
                }
            }
        }
        records
    }

    /// Varied by up to a half, so that servers which lost one collector do not come back to it at once.
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
            // Those that the protocol says are worth another try.
            429 | 502 | 503 | 504 => {
                let after = response.headers().get("retry-after");
                let after = after.and_then(|after| after.to_str().ok()?.trim().parse().ok());
                Err(DeliveryError::ForNow(format!("it answered {status}"), after.map(Duration::from_secs)))
            }
            _ => Err(DeliveryError::ForGood(format!("it answered {status}"))),
        }
    }

    /// A collector that is gone stays so for a while: it is told once a minute, and counted always.
    fn complain(&mut self, why: &str) {
        let now_ms = (self.now_ms)();
        if self.complained_ms.is_none_or(|at_ms| now_ms.abs_diff(at_ms) >= LOOK_EVERY_MS) {
            self.complained_ms = Some(now_ms);
            tracing::warn!(url = self.to.url, why, "log_otlp: not delivered; what is lost is counted");
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
            let told = format!("{problem:?}");
            assert!(!told.contains("hunter2"), "{told}");
        }
        let good = to.with_headers("authorization=Bearer hunter2, x-team=edge=1").expect("headers");
        assert!(!format!("{good:?}").contains("hunter2"), "{good:?}");
        assert_eq!(good.headers[1].1, "edge=1");
    }
}
