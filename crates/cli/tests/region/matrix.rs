//! Decisions that clients see for each class under each fault. The table in `docs/failures.md` is
//! the result of this test.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_testkit::{APPEND_ONLY, Proxy, Redis, Signal, Traffic, ask, wait_until};

use crate::client::{Answer, Client, FOR_EVER, TIME_MAX, start_region};
use crate::meters::is_recognised;

/// Keys for each cell of the table. Each has one request, so no node has a grant for it.
const KEYS: usize = 20;

/// Delay of replies, far beyond the time that a request waits.
const SLOW: Duration = Duration::from_millis(100);

/// The table is between these.
const BEGIN: &str = "<!-- begin: what the test saw -->\n";
const END: &str = "<!-- end -->\n";

/// Name of each kind of limit, dimension of its requests, and fields of its rule.
const KINDS: [(&str, &str, &str); 4] = [
    ("comfort", "comfort", "class = 'comfort'"),
    ("cost", "cost", "class = 'cost'"),
    ("cost, paid", "paid", "class = 'cost'\npaid = true"),
    ("security", "security", "class = 'security'"),
];

#[derive(Clone, Copy, Debug)]
enum Fault {
    Stopped,
    Killed,
    Refuses,
    Slow,
    CutOff,
}

impl Fault {
    const ALL: [Self; 5] = [Self::Stopped, Self::Killed, Self::Refuses, Self::Slow, Self::CutOff];

    const fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stands still (SIGSTOP)",
            Self::Killed => "is killed, and comes back with all it answered",
            Self::Refuses => "refuses writes (out of memory)",
            Self::Slow => "answers after 100 ms",
            Self::CutOff => "is cut off (packets vanish)",
        }
    }

    fn begin(self, redis: &mut Redis, proxy: &Proxy) {
        match self {
            Self::Stopped => redis.signal(Signal::STOP),
            Self::Killed => redis.kill(),
            Self::Refuses => ask(redis, &["CONFIG", "SET", "maxmemory", "1"]),
            Self::Slow => proxy.set(Traffic::DelayAnswers(SLOW)),
            Self::CutOff => proxy.set(Traffic::HalfOpen),
        }
    }

    fn end(self, redis: &mut Redis, proxy: &Proxy) {
        match self {
            Self::Stopped => redis.signal(Signal::CONT),
            Self::Killed => redis.restart(),
            Self::Refuses => ask(redis, &["CONFIG", "SET", "maxmemory", "0"]),
            Self::Slow | Self::CutOff => proxy.set(Traffic::Pass),
        }
    }
}

/// Decisions for each kind of limit, during a fault and after it.
struct Row {
    fault: Fault,
    meanwhile: Vec<String>,
    after: Vec<String>,
}

/// A client that uses each key once.
struct Asker {
    client: Client,
    asked: u64,
}

impl Asker {
    fn next(&mut self, dimension: &str) -> Answer {
        self.asked += 1;
        let answer = self.client.check(&[(dimension, &format!("key {}", self.asked))], 1);
        assert_eq!(answer.status, 200, "{dimension}: {answer:?}");
        answer
    }

    /// Returns the next reply with, or without, the decision source `regional`.
    fn next_by(&mut self, dimension: &str, regional: bool) -> Answer {
        let asked = &mut self.asked;
        let what = format!("{dimension} to be{} regional", if regional { "" } else { " not" });
        let key = || {
            *asked += 1;
            (dimension.to_owned(), format!("key {asked}"))
        };
        self.client.check_until(&what, key, |answer| answer.is_regional() == regional)
    }
}

fn rules() -> String {
    let rule = |(_, dimension, says): &(&str, &str, &str)| {
        format!(
            "[[rules]]\nname='{dimension}'\nkey=['{dimension}']\nlimit=100\nperiod='{FOR_EVER}'\n{says}\n"
        )
    };
    KINDS.iter().map(rule).collect()
}

/// Lists all distinct decisions.
fn in_words(answers: &[Answer]) -> String {
    let words = answers
        .iter()
        .map(|answer| format!("{}, `{}`", if answer.allowed { "passes" } else { "denied" }, answer.source));
    words.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join("; ")
}

fn watch(fault: Fault) -> Row {
    let mut redis = Redis::start(APPEND_ONLY);
    let proxy = Proxy::start(redis.address());
    let mut fleet = start_region(&proxy.url(), &rules(), 1);
    let mut asker = Asker { client: Client::of(&fleet.servers[0]), asked: 0 };
    for (_, dimension, _) in KINDS {
        assert!(asker.next_by(dimension, true).allowed, "{dimension} before anything happens");
    }
    fault.begin(&mut redis, &proxy);
    let meanwhile = KINDS.iter().map(|(_, dimension, _)| {
        asker.next_by(dimension, false);
        in_words(&(0..KEYS).map(|_| asker.next(dimension)).collect::<Vec<_>>())
    });
    let meanwhile = meanwhile.collect();
    fault.end(&mut redis, &proxy);
    // A node reads the identity of the store twice a second, so it detects a quicker restart later.
    wait_until("the store to be known for what it is", TIME_MAX, || {
        asker.next_by("comfort", true);
        is_recognised(&redis)
    });
    // On a busy machine a reply may be late, as from a slow store. Only decisions of the region
    // count here.
    let after = KINDS.iter().map(|(_, dimension, _)| {
        in_words(&(0..KEYS).map(|_| asker.next_by(dimension, true)).collect::<Vec<_>>())
    });
    let after = after.collect();
    fleet.stop();
    Row { fault, meanwhile, after }
}

fn table(title: &str, rows: &[Row], cells: fn(&Row) -> &[String]) -> String {
    let mut text = format!("| {title} |");
    for (name, ..) in KINDS {
        write!(text, " {name} |").expect("text");
    }
    write!(text, "\n|{}\n", "---|".repeat(KINDS.len() + 1)).expect("text");
    for row in rows {
        writeln!(text, "| {} | {} |", row.fault.name(), cells(row).join(" | ")).expect("text");
    }
    text
}

#[test]
fn clients_see_the_documented_decisions() {
    let rows: Vec<Row> = Fault::ALL.into_iter().map(watch).collect();
    let seen = format!(
        "{}\n{}",
        table("while the store", &rows, |row| &row.meanwhile),
        table("after the store", &rows, |row| &row.after)
    );
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/failures.md");
    let text = std::fs::read_to_string(&path).expect("the page");
    let (before, rest) = text.split_once(BEGIN).expect("a table begins");
    let (written, after) = rest.split_once(END).expect("a table ends");
    if std::env::var_os("TIDEGATE_REGION_REWRITE").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{seen}{END}{after}")).expect("written");
        return;
    }
    assert_eq!(written, seen, "TIDEGATE_REGION_REWRITE=1 writes down what was seen");
}
