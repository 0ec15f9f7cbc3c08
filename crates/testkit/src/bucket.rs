//! As much of an object store as snapshots of rules need: one bucket, in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::listener::{HttpListener, ReceivedRequest, Reply};

/// Modification time that this store reports for every object.
const WRITTEN: &str = "2026-11-16T14:00:00.000Z";

/// Maximum keys in a list reply. Further pages do not exist, because no client requests them.
const LISTED_MAX: usize = 1_000;

type Objects = BTreeMap<String, Vec<u8>>;

/// A bucket of an object store that speaks S3.
#[derive(Debug)]
pub struct ObjectStore {
    listener: HttpListener,
    objects: Arc<Mutex<Objects>>,
    /// Keys of objects that are listed, and not given.
    withheld: Arc<Mutex<BTreeSet<String>>>,
}

impl ObjectStore {
    /// Starts an empty bucket with this name. It refuses requests without a signature, and those
    /// with a query that `admits` rejects.
    pub fn start(bucket: &'static str, admits: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        let objects = Arc::new(Mutex::new(Objects::new()));
        let known = Arc::clone(&objects);
        let withheld = Arc::new(Mutex::new(BTreeSet::new()));
        let kept_back = Arc::clone(&withheld);
        let listener = HttpListener::start(move |_, heard| {
            let (path, query) = heard.path.split_once('?').unwrap_or((&heard.path, ""));
            if !query.contains("X-Amz-Signature=") || !admits(query) {
                return Reply::new(403, "");
            }
            match path.trim_start_matches('/').split_once('/').unwrap_or((path.trim_start_matches('/'), "")) {
                (name, "") if name == bucket && heard.method == "GET" => {
                    Reply::new(200, listed(&lock(&known), bucket, &prefix_of(query)))
                }
                (name, key) if name == bucket && heard.method == "GET" && lock(&kept_back).contains(key) => {
                    Reply::new(500, "")
                }
                (name, key) if name == bucket => answer(&mut lock(&known), heard, key),
                _ => Reply::new(404, ""),
            }
        });
        Self { listener, objects, withheld }
    }

    /// Its URL, as in `AWS_ENDPOINT_URL`.
    pub fn url(&self) -> String {
        self.listener.url()
    }

    /// Makes every later read of this object fail.
    pub fn withhold(&self, key: &str) {
        lock(&self.withheld).insert(key.to_owned());
    }

    /// Returns the stored objects by key.
    pub fn objects(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        lock(&self.objects)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the key prefix of a list query. A slash is the only escaped character that keys contain.
fn prefix_of(query: &str) -> String {
    let prefix = query.split('&').find_map(|parameter| parameter.strip_prefix("prefix="));
    prefix.unwrap_or_default().replace("%2F", "/")
}

fn answer(objects: &mut Objects, heard: &ReceivedRequest, key: &str) -> Reply {
    match (heard.method.as_str(), key) {
        ("GET", key) => objects.get(key).map_or(Reply::new(404, ""), |body| Reply::new(200, body.clone())),
        ("PUT", key) => {
            objects.insert(key.to_owned(), heard.body.clone());
            Reply::new(200, "")
        }
        ("DELETE", key) => {
            objects.remove(key);
            Reply::new(204, "")
        }
        _ => Reply::new(405, ""),
    }
}

fn listed(objects: &Objects, bucket: &str, prefix: &str) -> String {
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\
         <ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
         <Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
    );
    for (key, body) in objects.iter().filter(|(key, _)| key.starts_with(prefix)).take(LISTED_MAX) {
        let size = body.len();
        // Writing to a text cannot fail.
        let _ = write!(
            text,
            "<Contents><Key>{key}</Key><LastModified>{WRITTEN}</LastModified><Size>{size}</Size></Contents>"
        );
    }
    text.push_str("</ListBucketResult>");
    text
}
