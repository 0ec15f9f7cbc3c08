//! The addresses of a Redis origin, and its timeouts.

use std::fmt;
use std::time::Duration;

use redis::IntoConnectionInfo as _;
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{Client, ClientTlsConfig, ConnectionAddr, RedisResult, TlsCertificates, TlsMode};

/// The servers of an origin. Addresses are URLs: `redis://user:password@host:port/`, with `rediss`
/// for TLS.
#[derive(Clone)]
pub enum Servers {
    /// One server, or a proxy that presents several servers as one.
    Single(String),
    /// A master that sentinels know.
    Sentinel {
        /// URLs of the sentinels, with the credentials and the TLS scheme that they require.
        sentinels: Vec<String>,
        /// The name of the master.
        name: String,
        /// URL of the master, with its credentials and TLS scheme. The sentinels supply its host
        /// and port.
        master: String,
    },
    /// Some nodes of a cluster; the rest is found through them.
    Cluster(Vec<String>),
}

impl std::str::FromStr for Servers {
    type Err = String;

    /// Parses `redis://user:password@host:port`,
    /// `redis-cluster://user:password@host:port,host:port` or
    /// `redis-sentinel://user:password@host:port,host:port/name`, each with `rediss` for TLS. The
    /// credentials before the `@` are for the servers, not for the sentinels.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "not an address such as redis://host:6379, redis-cluster://host:6379,host:6379 or \
             redis-sentinel://host:26379,host:26379/name, with rediss for TLS"
                .to_owned()
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
        let plain = scheme.split_once('-').map_or(scheme, |(plain, _)| plain);
        if !matches!(plain, "redis" | "rediss") || rest.is_empty() {
            return Err(wrong());
        }
        let (user, hosts) = rest.rsplit_once('@').map_or(("", rest), |(user, hosts)| (user, hosts));
        let at = if user.is_empty() { String::new() } else { format!("{user}@") };
        let urls = |hosts: &str, at: &str| -> Vec<String> {
            hosts.split(',').map(|host| format!("{plain}://{at}{host}")).collect()
        };
        match scheme.strip_prefix(plain) {
            Some("") => Ok(Self::Single(text.to_owned())),
            Some("-cluster") => Ok(Self::Cluster(urls(hosts, &at))),
            Some("-sentinel") => {
                let (hosts, name) =
                    hosts.split_once('/').filter(|(_, name)| !name.is_empty()).ok_or_else(wrong)?;
                // A placeholder: the sentinels supply the host.
                let master = format!("{plain}://{at}master");
                Ok(Self::Sentinel { sentinels: urls(hosts, ""), name: name.to_owned(), master })
            }
            _ => Err(wrong()),
        }
    }
}

/// The address without credentials and parameters, for logs and answers.
impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single(url) => {
                let (scheme, host) = public_parts(url);
                write!(f, "{scheme}://{host}")
            }
            Self::Cluster(urls) => write_list(f, "cluster", urls),
            Self::Sentinel { sentinels, name, .. } => {
                write_list(f, "sentinel", sentinels)?;
                write!(f, "/{name}")
            }
        }
    }
}

impl Servers {
    /// Whether connections use TLS.
    pub(super) fn uses_tls(&self) -> bool {
        let url = match self {
            Self::Single(url) | Self::Sentinel { master: url, .. } => Some(url),
            Self::Cluster(urls) => urls.first(),
        };
        url.is_some_and(|url| url.starts_with("rediss:"))
    }
}

fn write_list(f: &mut fmt::Formatter<'_>, kind: &str, urls: &[String]) -> fmt::Result {
    let scheme = urls.first().map_or("redis", |url| public_parts(url).0);
    let hosts: Vec<&str> = urls.iter().map(|url| public_parts(url).1).collect();
    write!(f, "{scheme}-{kind}://{}", hosts.join(","))
}

/// Returns the scheme of a URL, and the rest without credentials and parameters.
fn public_parts(url: &str) -> (&str, &str) {
    let (scheme, rest) = url.split_once("://").unwrap_or(("redis", url));
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let host = host.split_once('?').map_or(host, |(host, _)| host);
    (scheme, host.trim_end_matches('/'))
}

impl fmt::Debug for Servers {
    /// Without addresses: they have passwords in them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single(_) => "Single",
            Self::Sentinel { .. } => "Sentinel",
            Self::Cluster(_) => "Cluster",
        })
    }
}

/// TLS certificates and keys, beside or instead of those of the system. All in PEM.
#[derive(Clone, Default)]
pub struct RedisCertificates {
    /// Root certificates to trust instead of those of the system.
    pub roots: Option<Vec<u8>>,
    /// The certificate and the key that are shown to the servers.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for RedisCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").finish_non_exhaustive()
    }
}

/// The addresses of an origin, and its timeouts.
#[derive(Clone, Debug)]
pub struct RedisConfig {
    /// The servers.
    pub servers: Servers,
    /// TLS certificates and keys, beside or instead of those of the system.
    pub certificates: RedisCertificates,
    /// How long an attempt to connect may take. Longer: servers that are far are reached; a hung
    /// one is noticed later.
    pub connect_time_max: Duration,
    /// Timeout of a call. Longer: fewer calls with an unknown result; nodes wait longer while a
    /// store hangs.
    pub call_time_max: Duration,
    /// How many calls may be under way; more are turned away. Higher: more memory while a store is
    /// slow.
    pub calls_max: usize,
    /// Wait after the first failure to connect, doubled after each further one. Longer: fewer
    /// attempts while a store is down; a later reconnect.
    pub backoff_min: Duration,
    /// The longest wait between two attempts to connect, and so the longest until a store is found
    /// that is back.
    pub backoff_max: Duration,
    /// Seed of the jitter in waits, different on each node, so that nodes do not all reconnect at
    /// once.
    pub seed: u64,
}

impl RedisConfig {
    /// Returns a configuration for these servers, with defaults that suit most deployments.
    pub fn new(servers: Servers, seed: u64) -> Self {
        Self {
            servers,
            certificates: RedisCertificates::default(),
            connect_time_max: Duration::from_secs(1),
            call_time_max: Duration::from_millis(300),
            calls_max: 1_024,
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(500),
            seed,
        }
    }

    /// Whether the servers are a cluster.
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }
}

/// The client that opens connections.
pub(super) enum ConnectionSource {
    Single(Box<Client>),
    Sentinel(Box<RedisConfig>),
    Cluster(Box<ClusterClient>),
}

impl ConnectionSource {
    pub(super) fn new(config: &RedisConfig) -> RedisResult<Self> {
        let certificates = certificates(&config.certificates);
        Ok(match &config.servers {
            Servers::Single(url) => Self::Single(Box::new(match certificates {
                Some(certificates) => Client::build_with_tls(url.as_str(), certificates)?,
                None => Client::open(url.as_str())?,
            })),
            Servers::Sentinel { sentinels, name, master } => {
                sentinel_builder(sentinels, name, master, &config.certificates)?.build()?;
                Self::Sentinel(Box::new(config.clone()))
            }
            Servers::Cluster(urls) => {
                let builder = ClusterClientBuilder::new(urls.iter().map(String::as_str))
                    .connection_timeout(config.connect_time_max)
                    .response_timeout(config.call_time_max)
                    .overall_response_timeout(Some(config.call_time_max))
                    .max_retry_wait(RETRY_WAIT_MS_MAX)
                    .min_retry_wait(RETRY_WAIT_MS_MIN);
                let builder = match certificates {
                    Some(certificates) => builder.certs(certificates),
                    None => builder,
                };
                Self::Cluster(Box::new(builder.build()?))
            }
        })
    }
}

/// How long a call to a cluster waits before it is tried again, ms: while slots move, and well
/// within the time of a call.
const RETRY_WAIT_MS_MIN: u64 = 5;
const RETRY_WAIT_MS_MAX: u64 = 50;

pub(super) fn sentinel_builder(
    sentinels: &[String],
    name: &str,
    master: &str,
    with: &RedisCertificates,
) -> RedisResult<SentinelClientBuilder> {
    let infos = sentinels.iter().map(|url| url.as_str().into_connection_info());
    let infos = infos.collect::<RedisResult<Vec<_>>>()?;
    let addresses: Vec<ConnectionAddr> = infos.iter().map(|info| info.addr().clone()).collect();
    let sentinels_use_tls = addresses.iter().any(|address| matches!(address, ConnectionAddr::TcpTls { .. }));
    let master = master.into_connection_info()?;
    let mut builder = SentinelClientBuilder::new(addresses, name, SentinelServerType::Master)?;
    if let Some(sentinel) = infos.first().map(redis::ConnectionInfo::redis_settings) {
        builder = match sentinel.username() {
            Some(user) => builder.set_client_to_sentinel_username(user),
            None => builder,
        };
        builder = match sentinel.password() {
            Some(password) => builder.set_client_to_sentinel_password(password),
            None => builder,
        };
    }
    builder = builder.set_client_to_redis_db(master.redis_settings().db());
    builder = match master.redis_settings().username() {
        Some(user) => builder.set_client_to_redis_username(user),
        None => builder,
    };
    builder = match master.redis_settings().password() {
        Some(password) => builder.set_client_to_redis_password(password),
        None => builder,
    };
    if matches!(master.addr(), ConnectionAddr::TcpTls { .. }) {
        builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
        if let Some(certificates) = certificates(with) {
            builder = builder.set_client_to_redis_certificates(certificates);
        }
    }
    Ok(match certificates(with) {
        Some(certificates) if sentinels_use_tls => builder.set_client_to_sentinel_certificates(certificates),
        _ => builder,
    })
}

fn certificates(with: &RedisCertificates) -> Option<TlsCertificates> {
    if with.roots.is_none() && with.identity.is_none() {
        return None;
    }
    let client_tls = with.identity.clone();
    let client_tls = client_tls.map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
    Some(TlsCertificates { client_tls, root_cert: with.roots.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_back_is_found_within_a_second() {
        let config = RedisConfig::new(Servers::Single("redis://host".to_owned()), 1);
        let engine = tidegate_core::engine::EngineSettings::default();
        let found = config.backoff_max + config.call_time_max + Duration::from_micros(engine.retry_us);
        assert!(found < Duration::from_secs(1), "{found:?}");
    }

    /// A list of servers in one line.
    fn spelled(text: &str) -> String {
        match text.parse::<Servers>() {
            Ok(Servers::Single(url)) => url,
            Ok(Servers::Cluster(urls)) => urls.join(" "),
            Ok(Servers::Sentinel { sentinels, name, master }) => {
                format!("{} {name} {master}", sentinels.join(" "))
            }
            Err(problem) => problem,
        }
    }

    #[test]
    fn addresses_are_read_as_they_are_written() {
        assert_eq!(spelled("redis://:p@h:1/2"), "redis://:p@h:1/2");
        assert_eq!(spelled("rediss-cluster://u:p@a:1,b:2"), "rediss://u:p@a:1 rediss://u:p@b:2");
        assert_eq!(
            spelled("redis-sentinel://:p@a:1,b:2/main"),
            "redis://a:1 redis://b:2 main redis://:p@master"
        );
    }

    #[test]
    fn addresses_are_shown_without_credentials() {
        for (text, shown) in [
            ("redis://h:1", "redis://h:1"),
            ("rediss://user:se@cret@h:1/2?protocol=resp3&x=secret", "rediss://h:1/2"),
            ("redis-cluster://:secret@a:1,b:2", "redis-cluster://a:1,b:2"),
            ("rediss-sentinel://u:secret@a:1,b:2/main", "rediss-sentinel://a:1,b:2/main"),
        ] {
            assert_eq!(text.parse::<Servers>().expect("an address").to_string(), shown);
        }
    }

    #[test]
    fn invalid_address_is_reported_without_its_password() {
        for wrong in [
            "localhost:6379",
            "http://:secret@h",
            "redis-sentinel://:secret@a:1",
            "redis-ring://secret",
            "redis://",
        ] {
            let problem = spelled(wrong);
            assert!(
                problem.starts_with("not an address such as") && !problem.contains("secret"),
                "{problem}"
            );
        }
    }
}
