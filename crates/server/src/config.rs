//! The configuration: read whole before a port opens, with every problem listed.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;
use tidegate::headers::ResetStyle;
use tidegate_rules::pattern::Pattern;
use tidegate_rules::store::Address;
use tidegate_rules::{RuleSet, parse_network, parse_period, syntax_problem};
use toml::{Table, Value};

use crate::auth::{Credentials, Role, TokenHash};
use crate::metrics::Listener;
use crate::origin::{OriginConfig, OriginTls, RegionConfig};
use crate::rules::read_text;
use crate::settings::SETTINGS;

/// The least size of a setting. Of a table: room for some ten thousand keys.
const SIZE_BYTES_MIN: usize = 1 << 20;
/// The largest: 16 TiB. Of a table: more than any machine has.
const SIZE_BYTES_MAX: usize = 1 << 44;
/// What is tried while the size that was meant is not known, to find what else is wrong.
pub(crate) const MEMORY_BYTES_STAND_IN: usize = 64 << 20;
/// The largest file: room for the most tokens, with names of ordinary length.
const FILE_BYTES_MAX: usize = 32 << 20;
/// The most tenants: each takes a part of the table.
const TENANTS_MAX: usize = 1_000;
/// The most tokens.
const TOKENS_MAX: usize = 100_000;
/// The longest name of a tenant or a token.
const NAME_BYTES_MAX: usize = 128;
/// The most patterns of one setting: each request looks at all of them.
const PATTERNS_MAX: usize = 100;
/// The heaviest tenant.
const WEIGHT_MAX: u32 = 1_000_000;

/// The tenant of requests without a credential, on a server that has none.
pub const DEFAULT_TENANT: &str = "";

/// Everything a server is told before it starts.
#[derive(Debug)]
pub struct Config {
    /// Where HTTP clients ask.
    pub http: Option<SocketAddr>,
    /// Where Envoy asks.
    pub grpc: Option<SocketAddr>,
    /// Where Redis clients ask.
    pub resp: Option<SocketAddr>,
    /// Where operators ask.
    pub admin: Option<SocketAddr>,
    /// Where the rules are.
    pub rules: Option<RulesConfig>,
    /// The file or folder with Envoy's descriptors.
    pub envoy_descriptors: Option<PathBuf>,
    /// Namespaces of the direct form that count by GCRA.
    pub gcra_namespaces: Vec<Pattern>,
    /// The folder of the embedded store; nothing keeps it in memory.
    pub data_dir: Option<PathBuf>,
    /// What is logged of decisions; nothing where they are not.
    pub log: Option<LogConfig>,
    /// The region it is a part of.
    pub region: RegionConfig,
    /// Memory of the table.
    pub memory_bytes: usize,
    /// Threads that answer.
    pub workers: usize,
    /// Connections of each listener.
    pub connections_max: usize,
    /// How long a connection may be silent.
    pub idle_timeout: Duration,
    /// How long one request may take to arrive, or its answer to be taken.
    pub request_timeout: Duration,
    /// How long a stop may take.
    pub drain_timeout: Duration,
    /// Whose word on the client's address counts.
    pub trusted_proxies: Vec<IpNet>,
    /// What `X-RateLimit-Reset` counts.
    pub reset: ResetStyle,
    /// Encryption of every listener.
    pub tls: Option<TlsFiles>,
    /// Who shares the table.
    pub tenants: Vec<TenantConfig>,
    /// Who may ask.
    pub credentials: Credentials,
}

/// Where rules are.
#[derive(Clone, Debug)]
pub enum RulesConfig {
    /// In a file.
    File(PathBuf),
    /// In a store.
    Store(StoreConfig),
}

/// A store of rules, and how it is followed.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Where it is. Shown without its password.
    pub address: Address,
    /// What a rules file says by this name.
    pub placement: Option<String>,
    /// The folder of the snapshots; nothing where none are written.
    pub snapshots: Option<PathBuf>,
    /// How often everything is compared, whatever the store says.
    pub reconcile: Duration,
}

/// What is logged of decisions, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogConfig {
    /// The share of what passes that is logged; denials always are.
    pub sample_rate: f64,
    /// How long it is kept.
    pub retention: Duration,
    /// How many bytes of it are kept.
    pub bytes_max: u64,
}

/// Where the certificate and its key are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of client certificates, if clients must show one.
    pub client_ca: Option<PathBuf>,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Unique.
    pub name: String,
    /// Parts of the table.
    #[serde(default = "equal_weight")]
    pub weight: u32,
}

const fn equal_weight() -> u32 {
    1
}

/// A token as the file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenRow {
    name: String,
    hash: String,
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    role: Role,
}

/// Everything that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblems(pub Vec<String>);

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for ConfigProblems {}

impl Config {
    /// The configuration from what was `given` by flags and environment, by key, and the text of the file, which
    /// they override.
    pub fn read(given: &HashMap<String, String>, file: Option<&str>) -> Result<Self, ConfigProblems> {
        let mut reader = Reader::new(given);
        reader.take_file(file.unwrap_or_default());
        let config = Self::from_reader(&mut reader);
        if reader.problems.is_empty() { Ok(config) } else { Err(ConfigProblems(reader.problems)) }
    }

    /// As much as can be read, with everything that is wrong: where something is, a value that is allowed stands in for
    /// it, so that problems of what the rest names can be found too.
    pub fn read_on(given: &HashMap<String, String>, file: Option<&Path>) -> (Self, Vec<String>) {
        let mut reader = Reader::new(given);
        if let Some(path) = file {
            reader.take_path(path);
        }
        (Self::from_reader(&mut reader), reader.problems)
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
            reset: reader.reset_style(),
            tls: reader.tls(),
            tenants,
            credentials,
        };
        reader.unknown_keys();
        reader.listeners(&config.listeners());
        config
    }

    /// What listens, with its key and where; nothing for what does not.
    pub(crate) fn listeners(&self) -> [(Listener, &'static str, Option<SocketAddr>); 4] {
        [
            (Listener::Http, "http_listen", self.http),
            (Listener::Grpc, "grpc_listen", self.grpc),
            (Listener::Resp, "resp_listen", self.resp),
            (Listener::Admin, "admin_listen", self.admin),
        ]
    }
}

struct Reader<'g> {
    given: &'g HashMap<String, String>,
    file: Table,
    /// Whether all tokens that were meant could be read: while they cannot, nobody is told that there are none.
    tokens_known: bool,
    problems: Vec<String>,
}

impl<'g> Reader<'g> {
    fn new(given: &'g HashMap<String, String>) -> Self {
        Self { given, file: Table::new(), tokens_known: true, problems: Vec::new() }
    }

    fn take_path(&mut self, path: &Path) {
        if path.as_os_str().is_empty() {
            return self.without_file("empty: leave it out, or name a file");
        }
        let table = read_text(path, FILE_BYTES_MAX).and_then(|text| {
            let problem = |error| format!("{}: {}", path.display(), syntax_problem(&text, &error));
            text.parse::<Table>().map_err(problem)
        });
        match table {
            Ok(table) => self.file = table,
            Err(problem) => self.without_file(problem),
        }
    }

    fn take_file(&mut self, text: &str) {
        match text.parse::<Table>() {
            Ok(table) => self.file = table,
            Err(error) => self.without_file(syntax_problem(text, &error)),
        }
    }

    fn without_file(&mut self, problem: impl fmt::Display) {
        self.tokens_known = false;
        self.problem("config", problem);
    }

    fn problem(&mut self, key: &str, problem: impl fmt::Display) {
        self.problems.push(format!("{key}: {problem}"));
    }

    /// The value of a setting, as text: what was given, or what the file says, or the default.
    fn text(&mut self, key: &str) -> Option<String> {
        let setting = SETTINGS.iter().find(|setting| setting.key == key)?;
        let default = Some(setting.default.to_owned()).filter(|default| !default.is_empty());
        let text = match (self.given.get(key), self.file.remove(key)) {
            (Some(given), _) => given.clone(),
            (None, None) => return default,
            (None, Some(value)) => {
                let Some(text) = as_text(&value) else {
                    self.problem(key, format!("a {} is not a value of this setting", value.type_str()));
                    return default;
                };
                text
            }
        };
        if text.is_empty() && !setting.is_list {
            // More often a variable that somebody forgot to fill than a wish.
            let otherwise = default.as_ref().map(|default| format!(" for {default}")).unwrap_or_default();
            self.problem(key, format!("empty: leave it out{otherwise}, or give it a value"));
            return default;
        }
        Some(text).filter(|text| !text.is_empty())
    }

    fn listen(&mut self, key: &str, credentials: &Credentials) -> Option<SocketAddr> {
        let text = self.text(key).filter(|text| text != "off")?;
        let Ok(address) = text.parse::<SocketAddr>() else {
            self.problem(
                key,
                format!("{text:?} is not an address and a port, such as 127.0.0.1:8080, nor \"off\""),
            );
            return None;
        };
        if !address.ip().is_loopback() && credentials.is_open() && self.tokens_known {
            self.problem(
                key,
                format!(
                    "{address} can be reached from other machines, and there are no tokens: make one with `tidegate \
                     token new` and add its [[tokens]] entry to the configuration, or listen on 127.0.0.1"
                ),
            );
        }
        Some(address)
    }

    /// Whether there is anything to ask, and everything has an address of its own.
    fn listeners(&mut self, listeners: &[(Listener, &'static str, Option<SocketAddr>)]) {
        let mut taken: Vec<(&str, SocketAddr)> = Vec::new();
        for (_, key, address) in listeners {
            let Some(address) = address else { continue };
            // Of port 0, each gets one of its own.
            let same = taken.iter().find(|(_, known)| known == address && address.port() != 0);
            if let Some((other, _)) = same {
                self.problem(key, format!("{address} is the address of {other} too"));
            }
            taken.push((key, *address));
        }
        let is_wrong =
            |(_, key, _): &_| self.problems.iter().any(|problem| problem.starts_with(&format!("{key}: ")));
        if taken.is_empty() && !listeners.iter().any(is_wrong) {
            self.problem("http_listen", "\"off\", and so is every other listener: nobody could ask");
        }
    }

    fn path(&mut self, key: &str) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    fn patterns(&mut self, key: &str) -> Vec<Pattern> {
        let text = self.text(key).unwrap_or_default();
        let patterns: Vec<Pattern> =
            text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(Pattern::new).collect();
        if patterns.len() > PATTERNS_MAX {
            self.problem(key, format!("{} patterns is outside 0 to {PATTERNS_MAX}", patterns.len()));
        }
        patterns
    }

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

    fn region(&mut self) -> RegionConfig {
        let origin = self.text("origin").unwrap_or_default().parse().unwrap_or_else(|problem: String| {
            self.problem("origin", problem);
            OriginConfig::None
        });
        let name = self.text("region").unwrap_or_default();
        if !is_name(&name) {
            self.problem("region", format!("{name:?} is not 1 to {NAME_BYTES_MAX} printable bytes"));
        }
        let (cert, key) = (self.path("origin_cert"), self.path("origin_key"));
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            (cert, _) => {
                let missing = if cert.is_none() { "origin_cert" } else { "origin_key" };
                self.problem(missing, "missing: origin_cert and origin_key need each other");
                None
            }
        };
        RegionConfig { name, origin, tls: OriginTls { ca: self.path("origin_ca"), identity } }
    }

    /// A file, or a store with what only a store has.
    fn rules(&mut self, data_dir: Option<&Path>) -> Option<RulesConfig> {
        let placement = self.text("rules_placement");
        let snapshots = self.text("rules_snapshots");
        let least = Duration::from_millis(100);
        let reconcile = self.time("rules_reconcile", least, Duration::from_hours(24));
        let text = self.text("rules");
        let is_store = |text: &str| {
            ["sqlite:", "postgres:", "postgresql:"].iter().any(|scheme| text.starts_with(scheme))
        };
        let Some(text) = text.as_ref().filter(|text| is_store(text)) else {
            for (key, given) in [("rules_placement", &placement), ("rules_snapshots", &snapshots)] {
                if given.is_some() {
                    self.problem(
                        key,
                        "only for rules in a store: rules is neither sqlite:FILE nor postgres://...",
                    );
                }
            }
            return text.map(PathBuf::from).map(RulesConfig::File);
        };
        let address = match text.parse() {
            Ok(address) => address,
            Err(problem) => {
                self.problem("rules", format!("{problem}, or the path of a file"));
                return None;
            }
        };
        if let Some(Err(problem)) = placement.as_deref().map(check_placement) {
            self.problem("rules_placement", problem);
        }
        let snapshots = match snapshots.as_deref() {
            Some("none") => None,
            Some(folder) => Some(PathBuf::from(folder)),
            None => data_dir.map(|folder| folder.join("rules")),
        };
        Some(RulesConfig::Store(StoreConfig { address, placement, snapshots, reconcile }))
    }

    fn log(&mut self, has_folder: bool) -> Option<LogConfig> {
        let is_on = match self.text("decision_log").as_deref() {
            None => has_folder,
            Some("on") if has_folder => true,
            Some("off") => false,
            Some("on") => {
                self.problem("decision_log", "\"on\" needs a folder: data_dir is \"none\"");
                false
            }
            Some(other) => {
                self.problem("decision_log", format!("{other:?} is neither \"on\" nor \"off\""));
                false
            }
        };
        let log = LogConfig {
            sample_rate: self.share("log_sample"),
            retention: self.time("log_retention", Duration::from_mins(1), Duration::from_hours(365 * 24)),
            bytes_max: self.size("log_bytes_max") as u64,
        };
        is_on.then_some(log)
    }

    fn share(&mut self, key: &str) -> f64 {
        let text = self.text(key).unwrap_or_default();
        let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
        share.unwrap_or_else(|| {
            self.problem(key, format!("{text:?} is not a share from 0 to 1, such as \"0.001\""));
            0.0
        })
    }

    fn size(&mut self, key: &str) -> usize {
        let text = self.text(key).unwrap_or_default();
        let bytes = parse_size(&text).filter(|bytes| (SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(bytes));
        bytes.unwrap_or_else(|| {
            self.problem(key, format!("{text:?} is not a size from 1MB to 16TB, such as \"256MB\""));
            MEMORY_BYTES_STAND_IN
        })
    }

    fn workers(&mut self) -> usize {
        if self.given.contains_key("workers") || self.file.contains_key("workers") {
            return self.number("workers", 1, 256);
        }
        std::thread::available_parallelism().map_or(1, usize::from).min(256)
    }

    fn number(&mut self, key: &str, least: usize, most: usize) -> usize {
        let Some(text) = self.text(key) else { return least };
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.unwrap_or_else(|| {
            self.problem(key, format!("{text:?} is not a number from {least} to {most}"));
            least
        })
    }

    fn time(&mut self, key: &str, least: Duration, most: Duration) -> Duration {
        let text = self.text(key).unwrap_or_default();
        match parse_period(&text) {
            Ok(time) if (least..=most).contains(&time) => time,
            Ok(time) => {
                self.problem(key, format!("{time:?} is outside {least:?} to {most:?}"));
                most
            }
            Err(problem) => {
                self.problem(key, problem);
                most
            }
        }
    }

    fn networks(&mut self, key: &str) -> Vec<IpNet> {
        let text = self.text(key).unwrap_or_default();
        let mut networks = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match parse_network(part) {
                Ok(network) => networks.push(network),
                Err(problem) => self.problem(key, problem),
            }
        }
        networks
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

    fn tls(&mut self) -> Option<TlsFiles> {
        let (cert, key, client_ca) =
            (self.path("tls_cert"), self.path("tls_key"), self.path("tls_client_ca"));
        match (cert, key) {
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key, client_ca }),
            (None, None) if client_ca.is_none() => None,
            (cert, key) => {
                for (name, _) in
                    [("tls_cert", cert), ("tls_key", key)].iter().filter(|(_, file)| file.is_none())
                {
                    self.problem(name, "missing: tls_cert, tls_key and tls_client_ca need each other");
                }
                None
            }
        }
    }

    fn tenants(&mut self) -> Vec<TenantConfig> {
        let mut tenants: Vec<TenantConfig> = Vec::new();
        for (at, row) in self.rows("tenants", TENANTS_MAX).into_iter().enumerate() {
            let key = format!("tenants[{at}]");
            match row.try_into::<TenantConfig>() {
                Err(error) => self.problem(&key, error.message()),
                Ok(tenant) if !is_name(&tenant.name) => {
                    self.problem(
                        &key,
                        format!("name: {:?} is not 1 to {NAME_BYTES_MAX} printable bytes", tenant.name),
                    );
                }
                Ok(tenant) if tenants.iter().any(|known| known.name == tenant.name) => {
                    self.problem(&key, format!("name: {:?} is given twice", tenant.name));
                }
                Ok(tenant) if !(1..=WEIGHT_MAX).contains(&tenant.weight) => {
                    self.problem(&key, format!("weight: {} is outside 1 to {WEIGHT_MAX}", tenant.weight));
                    // Whoever names the tenant is right to.
                    tenants.push(TenantConfig { weight: equal_weight(), ..tenant });
                }
                Ok(tenant) => tenants.push(tenant),
            }
        }
        tenants
    }

    fn credentials(&mut self, tenants: &[TenantConfig]) -> Credentials {
        let mut credentials = Credentials::default();
        let problems_before = self.problems.len();
        for (at, row) in self.rows("tokens", TOKENS_MAX).into_iter().enumerate() {
            let key = format!("tokens[{at}]");
            if let Err(problem) = add_token(&mut credentials, row, tenants) {
                self.problem(&key, problem);
            }
        }
        self.tokens_known &= self.problems.len() == problems_before;
        credentials
    }

    fn rows(&mut self, key: &str, most: usize) -> Vec<Value> {
        match self.file.remove(key) {
            None => Vec::new(),
            Some(Value::Array(rows)) if rows.len() <= most => rows,
            Some(Value::Array(rows)) => {
                self.problem(key, format!("{} is outside 0 to {most}", rows.len()));
                Vec::new()
            }
            Some(other) => {
                self.problem(key, format!("a {} is not a list: write [[{key}]]", other.type_str()));
                Vec::new()
            }
        }
    }

    fn unknown_keys(&mut self) {
        let unknown: Vec<String> = self.file.keys().cloned().collect();
        for key in unknown {
            self.problem(&key, "not a setting");
        }
    }
}

fn add_token(credentials: &mut Credentials, row: Value, tenants: &[TenantConfig]) -> Result<(), String> {
    let row: TokenRow = row.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
    if !is_name(&row.name) {
        return Err(format!("name: {:?} is not 1 to {NAME_BYTES_MAX} printable bytes", row.name));
    }
    let tenant = if row.tenant == DEFAULT_TENANT {
        0
    } else {
        let known = tenants.iter().position(|tenant| tenant.name == row.tenant);
        1 + known.ok_or_else(|| format!("tenant: there is no [[tenants]] entry named {:?}", row.tenant))?
    };
    let hash: TokenHash = row.hash.parse().map_err(|problem| format!("hash: {problem}"))?;
    credentials.add(hash, tenant, row.role).map_err(|problem| format!("hash: {problem}"))
}

/// Whether a dimension is one that rules can be placed by, as a set of no rules tells.
fn check_placement(dimension: &str) -> Result<(), String> {
    let empty = tidegate_rules::book::Book::default();
    RuleSet::compile(&empty, Some(dimension), 0).map(drop).map_err(|problems| problems.to_string())
}

fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Array(values) => {
            let parts: Option<Vec<_>> = values.iter().map(Value::as_str).collect();
            parts.map(|parts| parts.join(","))
        }
        _ => None,
    }
}

/// Bytes from a size such as `256MB` or `1GB` (powers of 1024), or a plain number of bytes.
fn parse_size(text: &str) -> Option<usize> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "KB" | "KiB" => 10,
        "MB" | "MiB" => 20,
        "GB" | "GiB" => 30,
        "TB" | "TiB" => 40,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// Where programs of this user keep their state.
fn state_dir() -> Option<PathBuf> {
    let set = |variable| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("tidegate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: &[(&str, &str)], file: &str) -> Result<Config, Vec<String>> {
        let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Config::read(&given, Some(file)).map_err(|problems| problems.0)
    }

    #[test]
    fn nothing_needs_to_be_set() {
        let config = read(&[], "").expect("defaults are good");
        assert_eq!(config.http, Some(([127, 0, 0, 1], 8080).into()));
        assert_eq!(config.resp, Some(([127, 0, 0, 1], 6380).into()));
        assert_eq!(config.memory_bytes, 64 << 20);
        assert!(config.credentials.is_open());
        // Only this machine can ask from there, so whoever does is a proxy on it, or its owner.
        let trusted: Vec<_> = config.trusted_proxies.iter().map(ToString::to_string).collect();
        assert_eq!(trusted, ["127.0.0.0/8", "::1/128"]);
        assert!(read(&[("trusted_proxies", "")], "").is_ok_and(|config| config.trusted_proxies.is_empty()));
        assert!(read(&[], "trusted_proxies = []").is_ok_and(|config| config.trusted_proxies.is_empty()));
    }

    #[test]
    fn what_is_given_overrides_the_file() {
        let file = "http_listen = '127.0.0.1:1'\ngrpc_listen = 'off'\nconnections_max = 5\ntrusted_proxies = ['10.0.0.0/8', '::1']";
        let config = read(&[("http_listen", "127.0.0.1:2")], file).expect("good");
        assert_eq!(config.http, Some(([127, 0, 0, 1], 2).into()));
        assert_eq!((config.grpc, config.connections_max, config.trusted_proxies.len()), (None, 5, 2));
    }

    #[test]
    fn every_problem_is_listed() {
        let file = "
            memory = '3 bananas'
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
            tenants = [{ name = 'a', weight = 0 }, { name = '' }, { nmae = 'b' }]
            tokens = [{ name = 't', hash = 'secret', tenant = 'nobody' }]
        ";
        let problems = read(&[("http_listen", "localhost")], file).expect_err("has problems");
        for (key, words) in [
            ("http_listen", "is not an address"),
            ("resp_listen", "a boolean is not a value"),
            ("memory", "is not a size from 1MB"),
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
            ("trusted_proxies", "\"everyone\" is neither an address nor a network"),
            ("tenants[0]", "weight: 0 is outside 1 to 1000000"),
            ("tenants[1]", "name: \"\" is not"),
            ("tenants[2]", "unknown field `nmae`"),
            ("tokens[0]", "tenant: there is no [[tenants]] entry named \"nobody\""),
        ] {
            let found = problems.iter().any(|problem| problem.starts_with(key) && problem.contains(words));
            assert!(found, "{key}: {words}: {problems:#?}");
        }
        assert!(problems.iter().all(|problem| !problem.contains("ada:secret")), "{problems:#?}");
    }

    #[test]
    fn rules_are_in_a_file_or_a_store() {
        let rules = |given: &[(&str, &str)]| read(given, "data_dir = '/tmp/x'").map(|config| config.rules);
        let file = rules(&[("rules", "rules.toml")]);
        assert!(matches!(file, Ok(Some(RulesConfig::File(path))) if path == Path::new("rules.toml")));
        let store = |given: &[(&str, &str)]| match rules(given) {
            Ok(Some(RulesConfig::Store(store))) => store,
            other => panic!("{other:?}"),
        };
        let usual = store(&[("rules", "postgres://ada:secret@db/rules")]);
        assert_eq!(usual.snapshots.as_deref(), Some(Path::new("/tmp/x/rules")));
        assert_eq!((usual.placement.as_deref(), usual.reconcile), (None, Duration::from_mins(5)));
        assert!(!format!("{usual:?}").contains("secret"));
        let other =
            store(&[("rules", "sqlite:a.db"), ("rules_snapshots", "none"), ("rules_placement", "user")]);
        assert_eq!((other.snapshots, other.placement.as_deref()), (None, Some("user")));
        for (given, problem) in [
            (&[("rules", "sqlite:a.db"), ("rules_placement", "")][..], "rules_placement: empty"),
            (&[("rules", "sqlite:a.db"), ("rules_placement", "a b")], "rules_placement: placement: "),
            (
                &[("rules", "a.toml"), ("rules_placement", "user")],
                "rules_placement: only for rules in a store",
            ),
            (&[("rules_snapshots", "/tmp/y")], "rules_snapshots: only for rules in a store"),
            (&[("rules", "sqlite:")], "rules: must be `sqlite:FILE`, "),
        ] {
            let problems = rules(given).expect_err(problem);
            assert!(problems.iter().any(|found| found.starts_with(problem)), "{problem}: {problems:?}");
        }
    }

    #[test]
    fn decisions_are_logged_where_there_is_a_folder() {
        let log = |given: &[(&str, &str)]| read(given, "").expect("good").log;
        let logged =
            LogConfig { sample_rate: 0.001, retention: Duration::from_hours(7 * 24), bytes_max: 1 << 30 };
        assert_eq!(log(&[("data_dir", "/tmp/x")]), Some(logged));
        assert_eq!(log(&[("data_dir", "none")]), None);
        assert_eq!(log(&[("data_dir", "/tmp/x"), ("decision_log", "off")]), None);
        let given = [("data_dir", "/tmp/x"), ("decision_log", "on"), ("log_sample", "0.5")];
        assert_eq!(log(&given), Some(LogConfig { sample_rate: 0.5, ..logged }));
    }

    #[test]
    fn other_machines_need_a_token() {
        let problems = read(&[("admin_listen", "0.0.0.0:8090")], "").expect_err("open to the world");
        assert!(problems[0].contains("tidegate token new"), "{problems:?}");
        let hash = TokenHash::of(b"a token");
        let file = format!("[[tokens]]\nname = 'me'\nrole = 'admin'\nhash = '{hash}'");
        assert!(read(&[("admin_listen", "0.0.0.0:8090")], &file).is_ok());
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        let cases = [
            ("10", Some(10)),
            ("2KB", Some(2048)),
            ("3MiB", Some(3 << 20)),
            ("1GB", Some(1 << 30)),
            ("x", None),
            ("1.5GB", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), bytes, "{text}");
        }
    }
}
