//! Snapshots in a bucket of an S3-compatible object store, for servers without a disk of their own.

use std::fmt;
use std::time::Duration;

use rusty_s3::actions::ListObjectsV2;
use rusty_s3::{Bucket as Place, Credentials, S3Action, UrlStyle};
use tidegate_record::moment;
use tidegate_rules::snapshot::{self, Snapshot};
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::snapshots::DatedSnapshot;

/// Timeout of one request. Longer: tolerates a slow network; a start without the store takes longer
/// while the bucket is unreachable too.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

/// How long the signature of a request holds: a clock that is off by more is refused by the object
/// store anyway.
const SIGNED_FOR: Duration = Duration::from_mins(5);

/// The largest snapshot: room for a million rules, several times.
const SNAPSHOT_BYTES_MAX: u64 = 2 << 30;

/// Maximum size of any other response, in bytes.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Region if the environment names none.
const REGION: &str = "us-east-1";

/// A bucket, the prefix of its keys, and its credentials.
#[derive(Clone)]
pub struct Bucket {
    place: Place,
    /// Ends with a slash, unless it is empty.
    prefix: String,
    credentials: Credentials,
    agent: Agent,
}

/// Omits the credentials.
impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.place.name(), self.prefix)
    }
}

impl Bucket {
    /// From `s3://BUCKET/PREFIX`, and the variables that every client of S3 reads.
    pub fn new(url: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let set =
            |names: &[&str]| names.iter().find_map(|name| variable(name).filter(|value| !value.is_empty()));
        let (name, prefix) =
            url.strip_prefix("s3://").map_or(("", ""), |rest| rest.split_once('/').unwrap_or((rest, "")));
        if name.is_empty() {
            return Err(format!("{url:?} is not s3://BUCKET/PREFIX"));
        }
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let (Some(key), Some(secret)) = (set(&["AWS_ACCESS_KEY_ID"]), set(&["AWS_SECRET_ACCESS_KEY"])) else {
            return Err(
                "s3:// needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment".to_owned()
            );
        };
        let credentials = match set(&["AWS_SESSION_TOKEN"]) {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        };
        let region = set(&["AWS_REGION", "AWS_DEFAULT_REGION"]).unwrap_or_else(|| REGION.to_owned());
        // Other stores than Amazon's have one name for all buckets.
        let (endpoint, style) = match set(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]) {
            Some(endpoint) => (endpoint, UrlStyle::Path),
            None => (format!("https://s3.{region}.amazonaws.com"), UrlStyle::VirtualHost),
        };
        let endpoint = endpoint.parse().map_err(|error| format!("AWS_ENDPOINT_URL: {error}"))?;
        let place = Place::new(endpoint, style, name.to_owned(), region)
            .map_err(|error| format!("{url:?} is not s3://BUCKET/PREFIX: {error}"))?;
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ANSWER_TIME_MAX))
            .max_redirects(0)
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Ok(Self { place, prefix, credentials, agent })
    }

    /// Writes a snapshot, and removes all but the last few.
    pub(super) fn write(&self, snapshot: &Snapshot, now_ms: u64) -> Result<(), String> {
        let earlier = self.list(now_ms)?;
        let number = earlier.first().map_or(1, |known| known.number.saturating_add(1));
        let key = format!("{}{}", self.prefix, snapshot::name_of(number));
        let url =
            self.place.put_object(Some(&self.credentials), &key).sign_with_time(SIGNED_FOR, &at(now_ms));
        let sent = self.agent.put(url.as_str()).send(&snapshot::encode(snapshot)[..]);
        self.good(&key, sent)?;
        for old in earlier.iter().skip(snapshot::SNAPSHOTS_KEPT - 1) {
            let delete = self.place.delete_object(Some(&self.credentials), &old.key);
            let url = delete.sign_with_time(SIGNED_FOR, &at(now_ms));
            self.good(&old.key, self.agent.delete(url.as_str()).call())?;
        }
        Ok(())
    }

    /// Returns the latest snapshot that is intact and readable. Logs and skips later ones that are
    /// not.
    pub(super) fn read(&self, now_ms: u64) -> Result<DatedSnapshot, String> {
        let mut latest_problem = None;
        for known in self.list(now_ms)? {
            match self.get(&known.key, now_ms) {
                Ok(snapshot) => return Ok((snapshot, known.written_ms)),
                Err(problem) => {
                    tracing::error!(problem, "a snapshot is passed over");
                    latest_problem.get_or_insert(problem);
                }
            }
        }
        Err(match latest_problem {
            None => format!("there is no snapshot in {self}"),
            Some(problem) => format!("no snapshot in {self} can be read; of the latest: {problem}"),
        })
    }

    /// One snapshot.
    fn get(&self, key: &str, now_ms: u64) -> Result<Snapshot, String> {
        let get = self.place.get_object(Some(&self.credentials), key);
        let url = get.sign_with_time(SIGNED_FOR, &at(now_ms));
        let mut answer = self.good(key, self.agent.get(url.as_str()).call())?;
        let bytes = answer.body_mut().with_config().limit(SNAPSHOT_BYTES_MAX).read_to_vec();
        let bytes = bytes.map_err(|error| self.wrong(key, &error))?;
        snapshot::decode(&bytes).map_err(|damage| self.wrong(key, &damage))
    }

    /// Returns the snapshots, the latest first. Only a few are kept, so one page lists them all,
    /// even with other objects below the prefix.
    fn list(&self, now_ms: u64) -> Result<Vec<StoredSnapshot>, String> {
        let mut list = self.place.list_objects_v2(Some(&self.credentials));
        list.with_prefix(format!("{}{}", self.prefix, snapshot::PREFIX));
        let url = list.sign_with_time(SIGNED_FOR, &at(now_ms));
        let mut answer = self.good("", self.agent.get(url.as_str()).call())?;
        let text = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        let text = text.map_err(|error| self.wrong("", &error))?;
        let listed = ListObjectsV2::parse_response(&text).map_err(|error| self.wrong("", &error))?;
        let known = listed.contents.into_iter().filter_map(|object| {
            let number = snapshot::number_of(object.key.strip_prefix(&self.prefix)?)?;
            let written_ms = object.last_modified.and_then(|text| moment(&text, now_ms).ok());
            Some(StoredSnapshot { number, key: object.key, written_ms })
        });
        let mut known: Vec<StoredSnapshot> = known.collect();
        known.sort_unstable_by_key(|known| std::cmp::Reverse(known.number));
        Ok(known)
    }

    /// Returns a successful response. The error of any other contains no signature.
    fn good(&self, key: &str, sent: Result<Response<Body>, ureq::Error>) -> Result<Response<Body>, String> {
        let answer = sent.map_err(|error| self.wrong(key, &error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        Err(self.wrong(key, &format!("the object store answered {}", answer.status().as_u16())))
    }

    fn wrong(&self, key: &str, problem: &dyn fmt::Display) -> String {
        let name = key.strip_prefix(&self.prefix).unwrap_or(key);
        format!("{self}{name}: {problem}")
    }
}

/// A snapshot in the bucket.
struct StoredSnapshot {
    number: u64,
    key: String,
    written_ms: Option<u64>,
}

/// Converts a time for a signature. Times beyond the year 9999 become the maximum.
fn at(now_ms: u64) -> jiff::Timestamp {
    let now_ms = i64::try_from(now_ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(now_ms).unwrap_or(jiff::Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::RuleRows;
    use tidegate_testkit::{HttpListener, ObjectStore, Reply};

    use super::*;

    /// 2026-11-16 14:32:17 UTC.
    const NOW_MS: u64 = 1_794_839_537_000;

    /// An object store that accepts only requests signed for `NOW_MS`.
    fn store() -> ObjectStore {
        ObjectStore::start("books", |query| query.contains("X-Amz-Date=20261116T143217Z"))
    }

    fn bucket(endpoint: &str) -> Bucket {
        let endpoint = endpoint.to_owned();
        let variable = move |name: &str| match name {
            "AWS_ENDPOINT_URL" => Some(endpoint.clone()),
            "AWS_ACCESS_KEY_ID" => Some("AKIA".to_owned()),
            "AWS_SECRET_ACCESS_KEY" => Some("hunter2".to_owned()),
            _ => None,
        };
        Bucket::new("s3://books/eu/node-1", variable).expect("a bucket")
    }

    fn rule_rows(revision: u64) -> Snapshot {
        Snapshot { rule_rows: RuleRows { revision, ..RuleRows::default() }, ..Snapshot::default() }
    }

    #[test]
    fn latest_intact_snapshot_is_read_and_the_last_few_are_kept() {
        let store = store();
        let bucket = bucket(&store.url());
        let none = bucket.read(NOW_MS).expect_err("empty");
        assert_eq!(none, "there is no snapshot in s3://books/eu/node-1/");
        store.objects().insert("eu/node-1/notes.txt".to_owned(), b"of somebody else".to_vec());
        for revision in 1..=5 {
            bucket.write(&rule_rows(revision), NOW_MS).expect("written");
        }
        let names: Vec<String> = store.objects().keys().cloned().collect();
        let kept = [3, 4, 5].map(|number| format!("eu/node-1/book-{number:020}.snapshot"));
        assert_eq!(names[..3], kept);
        assert_eq!(names.len(), 4, "what is not ours stays");
        let written_ms = Some(NOW_MS - 32 * 60_000 - 17_000);
        assert_eq!(bucket.read(NOW_MS).expect("reads"), (rule_rows(5), written_ms));

        // One bit of the latest is another, and the one before it is cut.
        store.objects().entry(kept[2].clone()).and_modify(|bytes| bytes[30] ^= 1);
        store.objects().entry(kept[1].clone()).and_modify(|bytes| bytes.truncate(40));
        assert_eq!(bucket.read(NOW_MS).expect("reads"), (rule_rows(3), written_ms));
    }

    #[test]
    fn other_objects_under_the_prefix_hide_no_snapshot() {
        let store = store();
        let bucket = bucket(&store.url());
        // More than a page of a list has, all of them before the snapshots.
        for at in 0..2_000 {
            store.objects().insert(format!("eu/node-1/backup-{at}"), Vec::new());
        }
        for revision in 1..=5 {
            bucket.write(&rule_rows(revision), NOW_MS).expect("written");
        }
        assert_eq!(bucket.read(NOW_MS).expect("reads").0, rule_rows(5));
        assert_eq!(store.objects().len(), 2_000 + snapshot::SNAPSHOTS_KEPT);
    }

    #[test]
    fn a_snapshot_that_the_bucket_does_not_give_is_passed_over() {
        let store = store();
        let bucket = bucket(&store.url());
        for revision in 1..=2 {
            bucket.write(&rule_rows(revision), NOW_MS).expect("written");
        }
        let [first, second] = [1, 2].map(|number| format!("eu/node-1/{}", snapshot::name_of(number)));
        store.withhold(&second);
        assert_eq!(bucket.read(NOW_MS).expect("reads").0, rule_rows(1));
        store.withhold(&first);
        let latest = format!("s3://books/{second}: the object store answered 500");
        assert_eq!(
            bucket.read(NOW_MS).expect_err("it gives none"),
            format!("no snapshot in s3://books/eu/node-1/ can be read; of the latest: {latest}")
        );
    }

    #[test]
    fn bucket_errors_contain_no_credentials() {
        let listener = HttpListener::start(|_, _| Reply::new(403, "AKIA hunter2"));
        let refused = bucket(&listener.url());
        let gone = bucket(&format!("http://127.0.0.1:{}", tidegate_testkit::free_port()));
        for (bucket, words) in [(refused, "the object store answered 403"), (gone, "refused")] {
            for problem in [bucket.write(&rule_rows(1), NOW_MS).err(), bucket.read(NOW_MS).err()] {
                let problem = problem.expect("it fails").to_lowercase();
                assert!(
                    problem.starts_with("s3://books/eu/node-1/: ") && problem.contains(words),
                    "{problem}"
                );
                assert!(!problem.contains("hunter2") && !problem.contains("x-amz"), "{problem}");
            }
            assert!(!format!("{bucket:?}").contains("hunter2"));
        }
    }

    #[test]
    fn bucket_needs_a_name_and_credentials() {
        let all = |name: &str| name.starts_with("AWS_ACCESS_KEY").then(|| "AKIA".to_owned());
        for url in ["s3://", "s3:///x"] {
            assert!(Bucket::new(url, all).expect_err(url).contains("is not s3://BUCKET/PREFIX"), "{url}");
        }
        let problem = Bucket::new("s3://books", all).expect_err("no secret");
        assert!(problem.contains("AWS_SECRET_ACCESS_KEY") && !problem.contains("AKIA"), "{problem}");
    }
}
