//! The configuration. It is read completely before a port opens, and every problem is listed.

mod listen;
mod log;
mod reader;
mod region;
mod rules;
mod tenants;

pub use listen::TlsFiles;
pub use log::LogConfig;
pub use rules::RulesConfig;
pub(crate) use rules::RulesLocation;
pub use tenants::TenantConfig;
pub use tidegate_control::StoreConfig;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use tidegate::headers::ResetStyle;
use tidegate_rules::SecretHeaders;
use tidegate_rules::pattern::Pattern;

use self::reader::Reader;
use crate::auth::Credentials;
use crate::metrics::Listener;
use crate::origin::RegionConfig;

/// The size that replaces an invalid one, in bytes, so that the check can find further problems.
pub(crate) const MEMORY_BYTES_STAND_IN: usize = 64 << 20;

/// The tenant of requests to a server without credentials.
pub const DEFAULT_TENANT: &str = "";

/// The configuration of a server.
#[derive(Debug)]
pub struct Config {
    /// The listener for HTTP clients.
    pub http: Option<SocketAddr>,
    /// The listener for Envoy.
    pub grpc: Option<SocketAddr>,
    /// The listener for Redis clients.
    pub resp: Option<SocketAddr>,
    /// The listener for operators.
    pub admin: Option<SocketAddr>,
    /// Where the rules are.
    pub rules: Option<RulesConfig>,
    /// The file or folder with Envoy's descriptors.
    pub envoy_descriptors: Option<PathBuf>,
    /// Namespaces of the direct form that count by GCRA.
    pub gcra_namespaces: Vec<Pattern>,
    /// The folder of the embedded store; `None` keeps the store in memory.
    pub data_dir: Option<PathBuf>,
    /// The decision log; `None` if it is off.
    pub log: Option<LogConfig>,
    /// The region it is a part of.
    pub region: RegionConfig,
    /// Memory of the table.
    pub memory_bytes: usize,
    /// Memory for requests that have arrived in part.
    pub request_memory_bytes: usize,
    /// Number of worker threads.
    pub workers: usize,
    /// Connections of each listener.
    pub connections_max: usize,
    /// The longest time that a connection may be idle.
    pub idle_timeout: Duration,
    /// The longest time for a request to arrive, or for the client to read the response.
    pub request_timeout: Duration,
    /// How long a stop may take.
    pub drain_timeout: Duration,
    /// Proxies that may state the client's address.
    pub trusted_proxies: Vec<IpNet>,
    /// Header fields whose values are kept as digests.
    pub secret_headers: SecretHeaders,
    /// Host names of a server without tokens, besides those of loopback, in lower case.
    pub allowed_hosts: Vec<String>,
    /// The unit of `X-RateLimit-Reset`.
    pub reset: ResetStyle,
    /// Encryption of every listener.
    pub tls: Option<TlsFiles>,
    /// The tenants that share the table.
    pub tenants: Vec<TenantConfig>,
    /// The tokens that the server accepts.
    pub credentials: Credentials,
}

/// All problems of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblems(pub Vec<String>);

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for ConfigProblems {}

impl Config {
    /// Reads the configuration. `given` holds the values of flags and environment by key; they
    /// override the text of the file.
    pub fn read(given: &HashMap<String, String>, file: Option<&str>) -> Result<Self, ConfigProblems> {
        let mut reader = Reader::new(given);
        reader.take_file(file.unwrap_or_default().to_owned());
        let config = Self::from_reader(&mut reader);
        let problems = reader.into_problems();
        if problems.is_empty() { Ok(config) } else { Err(ConfigProblems(problems)) }
    }

    /// Reads as much as possible, and returns all problems. A valid value replaces each invalid
    /// one, so that the files and stores which the rest names can be checked too.
    pub fn read_on(given: &HashMap<String, String>, file: Option<&Path>) -> (Self, Vec<String>) {
        let mut reader = Reader::new(given);
        if let Some(path) = file {
            reader.take_path(path);
        }
        let config = Self::from_reader(&mut reader);
        (config, reader.into_problems())
    }

    fn from_reader(reader: &mut Reader<'_>) -> Self {
        let tenants = reader.tenants();
        let credentials = reader.credentials(&tenants);
        let data_dir = reader.data_dir();
        let config = Self {
            http: reader.listen("http_listen", &credentials),
            grpc: reader.listen("grpc_listen", &credentials),
            resp: reader.listen("resp_listen", &credentials),
            admin: reader.listen("admin_listen", &credentials),
            rules: reader.rules(data_dir.as_deref()),
            envoy_descriptors: reader.path("envoy_descriptors"),
            gcra_namespaces: reader.patterns("gcra_namespaces"),
            log: reader.log(data_dir.is_some()),
            data_dir,
            region: reader.region(),
            memory_bytes: reader.size("memory"),
            request_memory_bytes: reader.size("request_memory"),
            workers: reader.workers(),
            connections_max: reader.number("connections_max", 1, 1_000_000),
            idle_timeout: reader.time("idle_timeout", Duration::from_secs(1), Duration::from_hours(24)),
            request_timeout: reader.time(
                "request_timeout",
                Duration::from_millis(100),
                Duration::from_mins(5),
            ),
            drain_timeout: reader.time("drain_timeout", Duration::ZERO, Duration::from_mins(10)),
            trusted_proxies: reader.networks("trusted_proxies"),
            secret_headers: reader.secret_headers(),
            allowed_hosts: reader.hosts("allowed_hosts"),
            reset: reader.reset_style(),
            tls: reader.tls(),
            tenants,
            credentials,
        };
        reader.unknown_keys();
        reader.listeners(&config.listeners());
        config
    }

    /// Returns each listener with its key and its address; `None` if it is off.
    pub(crate) fn listeners(&self) -> [(Listener, &'static str, Option<SocketAddr>); 4] {
        [
            (Listener::Http, "http_listen", self.http),
            (Listener::Grpc, "grpc_listen", self.grpc),
            (Listener::Resp, "resp_listen", self.resp),
            (Listener::Admin, "admin_listen", self.admin),
        ]
    }
}

impl Reader<'_> {
    fn data_dir(&mut self) -> Option<PathBuf> {
        match self.text("data_dir") {
            Some(text) if text == "none" => None,
            Some(text) => Some(PathBuf::from(text)),
            None => state_dir().or_else(|| {
                self.problem("data_dir", "there is no home folder to keep it in: name one, or \"none\"");
                None
            }),
        }
    }

    fn secret_headers(&mut self) -> SecretHeaders {
        let text = self.text("secret_headers").unwrap_or_default();
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        SecretHeaders::new(names).unwrap_or_else(|problem| {
            self.problem("secret_headers", problem);
            SecretHeaders::default()
        })
    }

    fn workers(&mut self) -> usize {
        if self.given.contains_key("workers") || self.file.contains_key("workers") {
            return self.number("workers", 1, 256);
        }
        std::thread::available_parallelism().map_or(1, usize::from).min(256)
    }

    fn reset_style(&mut self) -> ResetStyle {
        match self.text("reset_header").as_deref() {
            Some("epoch") => ResetStyle::Epoch,
            Some("delta") => ResetStyle::Delta,
            other => {
                let given = other.unwrap_or_default().to_owned();
                self.problem("reset_header", format!("{given:?} is neither \"epoch\" nor \"delta\""));
                ResetStyle::default()
            }
        }
    }
}

/// Where programs of this user keep their state.
pub(crate) fn state_dir() -> Option<PathBuf> {
    let set = |variable| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("tidegate"))
}

/// Reads a configuration; problems come without their lines.
#[cfg(test)]
fn read(given: &[(&str, &str)], file: &str) -> Result<Config, Vec<String>> {
    let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let without_line = |problem: String| match problem.split_once(": ") {
        Some((line, problem)) if line.starts_with("line ") => problem.to_owned(),
        _ => problem,
    };
    let read = Config::read(&given, Some(file));
    read.map_err(|problems| problems.0.into_iter().map(without_line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_needs_to_be_set() {
        let config = read(&[], "").expect("defaults are good");
        assert_eq!(config.http, Some(([127, 0, 0, 1], 8080).into()));
        assert_eq!(config.resp, Some(([127, 0, 0, 1], 6380).into()));
        assert_eq!(config.memory_bytes, 64 << 20);
        assert!(config.credentials.is_open());
        // Only this machine can connect from loopback, so the peer is a local proxy or the owner of
        // the machine.
        let trusted: Vec<_> = config.trusted_proxies.iter().map(ToString::to_string).collect();
        assert_eq!(trusted, ["127.0.0.0/8", "::1/128"]);
        assert!(read(&[("trusted_proxies", "")], "").is_ok_and(|config| config.trusted_proxies.is_empty()));
        assert!(read(&[], "trusted_proxies = []").is_ok_and(|config| config.trusted_proxies.is_empty()));
    }

    #[test]
    fn given_settings_override_the_file() {
        let file = "http_listen = '127.0.0.1:1'\ngrpc_listen = 'off'\n\
             connections_max = 5\ntrusted_proxies = ['10.0.0.0/8', '::1']";
        let config = read(&[("http_listen", "127.0.0.1:2")], file).expect("good");
        assert_eq!(config.http, Some(([127, 0, 0, 1], 2).into()));
        assert_eq!((config.grpc, config.connections_max, config.trusted_proxies.len()), (None, 5, 2));
    }

    #[test]
    fn problems_of_a_file_are_sorted_by_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tidegate.toml");
        let text = "workers = 0\n\nmemory = '3 bananas'\nreset_header = 'when'\n\n[[tenants]]\nname = 'a'\n\
                    weight = 0\n\n[[tokens]]\nname = 't'\nhash = 'secret'\n[colour]\nred = 1\n";
        let given = HashMap::from([("reset_header".to_owned(), "never".to_owned())]);
        let problems = |text: &str| {
            std::fs::write(&path, text).expect("written");
            Config::read_on(&given, Some(&path)).1
        };
        let found = problems(text);
        let at = |line: usize, key: &str| format!("{}: line {line}: {key}: ", path.display());
        let starts = [
            "reset_header: \"never\" is neither".to_owned(),
            at(1, "workers"),
            at(3, "memory"),
            at(8, "tenants[0]"),
            at(12, "tokens[0]"),
            at(13, "colour"),
        ];
        assert_eq!(found.len(), starts.len(), "{found:#?}");
        let is_so = found.iter().zip(&starts).all(|(problem, start)| problem.starts_with(start.as_str()));
        assert!(is_so, "{found:#?}");
        // A syntax error hides no problem of another line.
        let found = problems("workers = 0\nmemory = \nadmin_listen = 'here'\n");
        let starts = ["line 1: workers: ", "line 2, column 10: ", "line 3: admin_listen: "];
        let starts = starts.map(|start| format!("{}: {start}", path.display()));
        let of_file = &found[1..];
        assert!(
            of_file.len() == 3 && of_file.iter().zip(&starts).all(|(one, start)| one.starts_with(start)),
            "{found:#?}"
        );
    }

    #[test]
    fn every_problem_is_listed() {
        let file = "
            memory = '3 bananas'
            request_memory = 'no'
            allowed_hosts = ['gate.example', 'http://a']
            idle_timeout = '0s'
            workers = 0
            reset_header = 'when'
            tls_key = 'key.pem'
            colour = 'blue'
            resp_listen = true
            trusted_proxies = 'everyone'
            data_dir = 'none'
            decision_log = 'on'
            log_sample = 2
            log_retention = '1s'
            log_bytes_max = 'much'
            rules = 'postgres://ada:secret@db:x/rules'
            rules_reconcile = '1ms'
            rules_poll = '2d'
            tenants = [{ name = 'a', weight = 0 }, { name = '' }, { nmae = 'b' }]
            tokens = [{ name = 't', hash = 'secret', tenant = 'nobody' }]
        ";
        let problems = read(&[("http_listen", "localhost")], file).expect_err("has problems");
        for (key, words) in [
            ("http_listen", "is not an address or a host name with a port"),
            ("resp_listen", "a boolean is not a value"),
            ("memory", "is not a size from 1MB"),
            ("request_memory", "\"no\" is not a size from 1MB"),
            ("allowed_hosts", "\"http://a\" is not a host name"),
            ("idle_timeout", "is outside 1s to"),
            ("workers", "is not a number from 1 to 256"),
            ("reset_header", "neither"),
            ("tls_cert", "missing: "),
            ("colour", "not a setting"),
            ("decision_log", "\"on\" needs a folder"),
            ("log_sample", "\"2\" is not a share from 0 to 1"),
            ("log_retention", "1s is outside 60s to 31536000s"),
            ("log_bytes_max", "\"much\" is not a size from 1MB"),
            ("rules", "must be `sqlite:FILE`, "),
            ("rules_reconcile", "1ms is outside 100ms to 86400s"),
            ("rules_poll", "172800s is outside 100ms to 86400s"),
            ("trusted_proxies", "\"everyone\" is neither an address nor a network"),
            ("tenants[0]", "weight: 0 is outside 1 to 1000000"),
            ("tenants[1]", "name: \"\" is not"),
            ("tenants[2]", "unknown field `nmae`"),
            ("tokens[0]", "tenant: there is no [[tenants]] entry named \"nobody\""),
            ("tokens[0]", "hash: not sha256: and 64 hexadecimal digits"),
        ] {
            let found = problems.iter().any(|problem| problem.starts_with(key) && problem.contains(words));
            assert!(found, "{key}: {words}: {problems:#?}");
        }
        assert!(problems.iter().all(|problem| !problem.contains("ada:secret")), "{problems:#?}");
    }
}
