//! Written records are found again: a moment later, a day later, and by the next process.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use support::{NOW_MS, denied};
use tidegate_record::{
    Archive, DecisionEntry, DecisionRecord, FLUSH_EVERY, Log, LogSettings, RecordKind, RecordVerdict,
    WhyQuery,
};

const DAY_MS: u64 = 86_400_000;

/// Number of records: with long paths, twice the capacity of the buffers.
const WRITTEN: u64 = 120_000;

fn settings() -> LogSettings {
    LogSettings {
        threads: 2,
        sample_rate: 0.5,
        retention: Duration::from_hours(7 * 24),
        bytes_max: 1 << 30,
        region: "eu".to_owned(),
        node: "n1".to_owned(),
        seed: 1,
        otlp: None,
        flush_every: FLUSH_EVERY,
    }
}

fn open(folder: &Path, settings: LogSettings) -> Log {
    Log::open(folder, settings, || NOW_MS).expect("opens")
}

async fn why(folder: &Path, key: &str, at_ms: u64) -> Vec<DecisionRecord> {
    let mut archive = Archive::open(folder).await.expect("opens");
    let why = WhyQuery { tenant: "acme", key, at_ms, window_ms: 60_000, records: 10 };
    archive.why(&why).await.expect("answers")
}

async fn replayed(folder: &Path, from_ms: u64, to_ms: u64) -> Vec<DecisionRecord> {
    let mut archive = Archive::open(folder).await.expect("opens");
    let mut all = Vec::new();
    let each = |record| {
        all.push(record);
        true
    };
    archive.replay(from_ms, to_ms, each).await.expect("answers");
    all
}

#[tokio::test]
async fn a_denial_is_explained_a_moment_and_a_day_later() {
    let folder = tempfile::tempdir().expect("a folder");
    for at_ms in [NOW_MS - DAY_MS, NOW_MS - 1_000] {
        let log = open(folder.path(), settings());
        log.recorder().write(1, &denied("user:42", at_ms), [("user", "42"), ("path", "/v1/orders")]);
        log.recorder().write(0, &denied("user:7", at_ms), [("user", "7")]);
        drop(log);
    }
    for at_ms in [NOW_MS - DAY_MS, NOW_MS] {
        let records = why(folder.path(), "user:42", at_ms).await;
        let [record] = records.as_slice() else { panic!("{records:?}") };
        assert_eq!((record.remaining, record.level, record.limit.burst), (1, 119, 120));
        assert_eq!((record.rule.as_str(), record.rule_version), ("per_user", 3));
        assert_eq!((record.replaced_by.as_str(), record.set_version.as_str()), ("launch", "5f2a"));
        assert_eq!(
            (record.region.as_str(), record.node.as_str(), record.source.as_str()),
            ("eu", "n1", "regional")
        );
        assert_eq!((record.retry_ms, record.cost), (Some(600), 2));
        assert_eq!((record.reason.as_str(), record.until_ms), ("block", Some(NOW_MS + 3_600_000)));
        assert_eq!(record.dimensions[1], ("path".to_owned(), "/v1/orders".to_owned()));
        assert!((record.sample_rate - 1.0).abs() < f64::EPSILON, "every denial is there");
        assert!(record.at_ms.abs_diff(at_ms) <= 1_000);
    }
    assert_eq!(why(folder.path(), "path:/v1/orders", NOW_MS).await.len(), 1);
    assert!(why(folder.path(), "user:42", NOW_MS - DAY_MS / 2).await.is_empty());
    let mut archive = Archive::open(folder.path()).await.expect("opens");
    let another = WhyQuery { tenant: "other", key: "user:42", at_ms: NOW_MS, window_ms: DAY_MS, records: 10 };
    assert!(archive.why(&another).await.expect("answers").is_empty(), "another tenant's");
}

#[tokio::test]
async fn similar_keys_are_found_by_a_part_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), settings());
    for (key, user) in
        [("user:mallory,path:/x", "mallory"), ("user:mallory2", "mallory2"), ("user:eve", "eve")]
    {
        log.recorder().write(0, &denied(key, NOW_MS), [("user", user), ("path", "/x")]);
    }
    (0..9).for_each(|at| log.recorder().write(0, &denied(&format!("ip:{at}/8"), NOW_MS), []));
    drop(log);
    let mut archive = Archive::open(folder.path()).await.expect("opens");
    let mut similar = async |tenant: &str, key: &str, at_ms: u64| {
        let query = WhyQuery { tenant, key, at_ms, window_ms: 1_000, records: 10 };
        archive.similar(&query, 5).await.expect("answers")
    };
    // The whole value of a dimension comes before a part of one.
    let found = similar("acme", "mallory", NOW_MS).await;
    assert_eq!(found, ["user:mallory", "user:mallory,path:/x", "user:mallory2"]);
    assert_eq!(similar("acme", "eve", NOW_MS).await, ["user:eve"]);
    assert_eq!(similar("acme", "/8", NOW_MS).await.len(), 5, "no more than asked for");
    assert!(similar("acme", "bob", NOW_MS).await.is_empty());
    assert!(similar("other", "mallory", NOW_MS).await.is_empty(), "another tenant's");
    assert!(similar("acme", "mallory", NOW_MS + 5_000).await.is_empty(), "outside the window");
}

#[tokio::test]
async fn the_nearest_denials_come_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), settings());
    for second in 0..50 {
        log.recorder().write(0, &denied("user:1", NOW_MS + 1_000 * second), []);
    }
    let passed = DecisionEntry { verdict: RecordVerdict::Allowed, ..denied("user:1", NOW_MS + 20_400) };
    log.recorder().write(0, &passed, []);
    log.recorder().write(0, &DecisionEntry { key: "user:2", ..passed }, []);
    drop(log);
    let records = why(folder.path(), "user:1", NOW_MS + 20_300).await;
    let seconds: Vec<_> = records.iter().map(|record| (record.at_ms - NOW_MS) / 1_000).collect();
    assert_eq!(seconds, [20, 21, 19, 22, 18, 23, 17, 24, 16, 25]);
    let records = why(folder.path(), "user:2", NOW_MS + 20_300).await;
    assert_eq!(records[0].verdict, RecordVerdict::Allowed);
    assert!((records[0].sample_rate - 0.5).abs() < f64::EPSILON, "the record stands for two decisions");
}

#[tokio::test]
async fn everything_is_replayed_in_the_order_of_time() {
    let folder = tempfile::tempdir().expect("a folder");
    for part in 0..3 {
        let log = open(folder.path(), settings());
        for at in 0..2_000 {
            log.recorder().write(at % 2, &denied("user:1", NOW_MS + 3 * at as u64 + part), []);
        }
    }
    let all = replayed(folder.path(), NOW_MS + 3, NOW_MS + 5_999).await;
    let times: Vec<_> = all.iter().map(|record| record.at_ms - NOW_MS).collect();
    assert_eq!(times, (3..=5_999).collect::<Vec<_>>());
}

#[tokio::test]
async fn of_more_than_is_wanted_the_latest_are_replayed() {
    let folder = tempfile::tempdir().expect("a folder");
    for part in 0..3 {
        let log = open(folder.path(), settings());
        for at in 0..100 {
            log.recorder().write(0, &denied("user:1", NOW_MS + 1_000 * part + at), []);
        }
    }
    let mut archive = Archive::open(folder.path()).await.expect("opens");
    for (records, since_ms) in [(300, 0), (299, 1_000), (200, 1_000), (199, 2_000), (1, 2_000)] {
        let found = archive.since(NOW_MS, u64::MAX, records).await.expect("answers");
        assert_eq!(found - NOW_MS, since_ms, "{records}");
    }
    assert_eq!(archive.since(NOW_MS + 50, NOW_MS + 99, 1).await.expect("answers"), NOW_MS + 50);
    assert_eq!(archive.since(NOW_MS + 5_000, u64::MAX, 1).await.expect("answers"), NOW_MS + 5_000);
}

#[cfg(feature = "parquet")]
#[tokio::test]
async fn export_contains_the_stored_records() {
    use parquet::file::reader::{FileReader, SerializedFileReader};

    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), settings());
    for at in 0..60_000 {
        let retry_ms = (at % 2 == 0).then_some(at);
        let dimensions = [("user", "4\"2"), ("path", "/x")];
        log.recorder().write(0, &DecisionEntry { retry_ms, ..denied("user:42", NOW_MS + at) }, dimensions);
    }
    log.recorder().write(0, &DecisionEntry { tenant: "other", ..denied("user:7", NOW_MS) }, []);
    drop(log);
    let mut archive = Archive::open(folder.path()).await.expect("opens");
    let mut file = Vec::new();
    let count = archive.export(Some("acme"), (NOW_MS, NOW_MS + 54_999), &mut file).await.expect("exports");
    assert_eq!(count, 55_000);
    let reader = SerializedFileReader::new(bytes::Bytes::from(file)).expect("Parquet");
    let rows: Vec<_> = reader.get_row_iter(None).expect("rows").map(|row| row.expect("a row")).collect();
    assert_eq!(rows.len(), 55_000);
    let row = rows[54_321].to_string();
    for part in [
        "tenant: \"acme\"",
        "key: \"user:42\"",
        "verdict: \"denied\"",
        "rule_version: 3",
        "level: 119",
        "retry_ms: null",
    ] {
        assert!(row.contains(part), "{part}: {row}");
    }
    assert!(rows[54_320].to_string().contains("retry_ms: 54320"), "{}", rows[54_320]);
    assert!(row.contains(r#"{"path":"/x","user":"4\"2"}"#), "{row}");
}

#[tokio::test]
async fn counts_match_the_stored_records() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), settings());
    let recorder = std::sync::Arc::clone(log.recorder());
    // Far more than the capacity of the buffers, as fast as possible.
    let path = "/x".repeat(400);
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (recorder, path) = (&recorder, &path);
            scope.spawn(move || {
                for at in 0..WRITTEN / 2 {
                    let verdict = if at % 10 == 0 { RecordVerdict::Allowed } else { RecordVerdict::Denied };
                    recorder.write(
                        usize::try_from(thread).expect("small"),
                        &DecisionEntry { verdict, ..denied("user:1", NOW_MS + at) },
                        [("path", path.as_str())],
                    );
                }
            });
        }
    });
    drop(log);
    let counts = recorder.counts();
    let mut kept = [0; 2];
    for record in replayed(folder.path(), 0, u64::MAX).await {
        kept[usize::from(record.verdict == RecordVerdict::Denied)] += 1;
    }
    assert_eq!((counts.written(RecordKind::Sample), counts.written(RecordKind::Denial)), (kept[0], kept[1]));
    assert_eq!(kept[1] + counts.dropped(RecordKind::Denial), WRITTEN / 10 * 9);
    assert_eq!(kept[0] + counts.dropped(RecordKind::Sample), WRITTEN / 10);
}

#[tokio::test]
async fn records_the_store_rejects_are_counted_as_dropped() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = open(folder.path(), settings());
    let recorder = std::sync::Arc::clone(log.recorder());
    let file = SqliteConnectOptions::new().filename(folder.path().join("decisions.db"));
    let mut another = file.connect().await.expect("opens");
    sqlx::query("DROP TABLE blocks").execute(&mut another).await.expect("drops");
    recorder.write(0, &denied("user:1", NOW_MS), []);
    recorder.write(1, &denied("user:1", NOW_MS), []);
    drop(log);
    assert_eq!(
        (recorder.counts().written(RecordKind::Denial), recorder.counts().dropped(RecordKind::Denial)),
        (0, 2)
    );
}

#[tokio::test]
async fn records_beyond_age_or_size_limit_are_deleted() {
    let folder = tempfile::tempdir().expect("a folder");
    for days in [9, 8, 6] {
        let log = open(folder.path(), settings());
        log.recorder().write(0, &denied("user:1", NOW_MS - days * DAY_MS), []);
    }
    // The next one to open it looks at once.
    drop(open(folder.path(), settings()));
    let kept = replayed(folder.path(), 0, u64::MAX).await;
    assert_eq!(kept.iter().map(|record| (NOW_MS - record.at_ms) / DAY_MS).collect::<Vec<_>>(), [6]);

    let small = LogSettings { bytes_max: 100_000, ..settings() };
    for batch in 0..20 {
        let log = open(folder.path(), small.clone());
        for at in 0..1_000 {
            log.recorder().write(0, &denied(&format!("user:{at}"), NOW_MS + 1_000 * batch + at), []);
        }
    }
    let kept = replayed(folder.path(), 0, u64::MAX).await;
    assert!((1_000..15_000).contains(&kept.len()), "{}", kept.len());
    assert_eq!(kept.last().map(|record| record.at_ms), Some(NOW_MS + 19_999), "the newest stay");
}

#[test]
fn files_of_a_log_are_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("made");
    let log = open(&inner, settings());
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(&inner), 0o700);
    let files: Vec<_> =
        std::fs::read_dir(&inner).expect("a folder").map(|file| file.expect("one").path()).collect();
    assert!(files.len() > 1, "the database and its log: {files:?}");
    assert!(files.iter().all(|file| mode(file) == 0o600), "{files:?}");
    drop(log);
}
