//! The settings: each known by one key, in the file, as a flag and in the environment.

/// One setting. The key `http_listen` is the flag `--http-listen` and the variable `TIDEGATE_HTTP_LISTEN`.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The key in the configuration file.
    pub key: &'static str,
    /// The placeholder for the value in help texts.
    pub value: &'static str,
    /// The default; empty if there is none.
    pub default: &'static str,
    /// The effect of the setting, and its trade-off.
    pub about: &'static str,
    /// Whether it is a list, which may be empty.
    pub is_list: bool,
}

const fn setting(
    key: &'static str,
    value: &'static str,
    default: &'static str,
    about: &'static str,
) -> Setting {
    Setting { key, value, default, about, is_list: false }
}

impl Setting {
    const fn list(self) -> Self {
        Self { is_list: true, ..self }
    }
}

/// All settings that are a single value. Tenants and tokens are tables of the file.
pub const SETTINGS: &[Setting] = &[
    setting("http_listen", "ADDR", "127.0.0.1:8080", "Where HTTP clients ask; \"off\" to not listen"),
    setting("grpc_listen", "ADDR", "127.0.0.1:8081", "Where Envoy asks; \"off\" to not listen"),
    setting("resp_listen", "ADDR", "127.0.0.1:6380", "Where Redis clients ask; \"off\" to not listen"),
    setting(
        "admin_listen",
        "ADDR",
        "127.0.0.1:8090",
        "Health, readiness, metrics and administration; \"off\" to not listen",
    ),
    setting(
        "rules",
        "WHERE",
        "",
        "Rules for /v1/check and forward-auth: a file, which is read again when it changes, or a store that servers share, \
         sqlite:FILE or postgres://USER:PASSWORD@HOST:PORT/DATABASE",
    ),
    setting(
        "rules_placement",
        "DIMENSION",
        "",
        "For a store: the dimension that says where in a region a request's meters are kept, as `placement` does in a file",
    ),
    setting(
        "rules_snapshots",
        "WHERE",
        "",
        "For a store: a folder of this server's own for copies of the rules, or s3://BUCKET/PREFIX, to start from when the \
         store is gone; \"none\" writes none [default: rules/ in data_dir]",
    ),
    setting(
        "rules_reconcile",
        "TIME",
        "5m",
        "For a store: how often everything is compared with it, whatever it says, 100ms to 1d, varied by a fifth. Shorter: \
         what went unheard is caught up with earlier; all rules are read each time",
    ),
    setting(
        "rules_poll",
        "TIME",
        "",
        "For a store: how often it is asked how far it is, beside what PostgreSQL says itself, 100ms to 1d. Shorter: what a \
         connection that died silently did not say is seen earlier [default: 5s for PostgreSQL, 250ms for a file]",
    ),
    setting(
        "envoy_descriptors",
        "PATH",
        "",
        "Descriptors of Envoy's rate limit service, a file or a folder of them; read again when they change",
    ),
    setting(
        "gcra_namespaces",
        "PATTERNS",
        "",
        "Namespaces of /v2/ratelimit.* that count by GCRA instead of a sliding window, separated by commas; \
         \"*\" stands for anything",
    )
    .list(),
    setting(
        "data_dir",
        "DIR",
        "",
        "Where overrides and the decision log are kept; \"none\" keeps overrides in memory only, and no log [default: the \
         user's state folder]",
    ),
    setting(
        "decision_log",
        "WORD",
        "",
        "Whether decisions are logged: \"on\" or \"off\" [default: on where there is a data_dir]",
    ),
    setting(
        "log_sample",
        "SHARE",
        "0.001",
        "The share of decisions that pass which is logged, 0 to 1; denials always are. Higher: steady use is seen of smaller \
         limits, and back-tests see more; more CPU time and more bytes",
    ),
    setting("log_retention", "TIME", "7d", "How long logged decisions are kept, 1m to 365d"),
    setting(
        "log_bytes_max",
        "SIZE",
        "1GB",
        "How many bytes of them are kept, 1MB to 16TB: the oldest go first. Higher: a flood of denials pushes out less",
    ),
    setting(
        "log_otlp",
        "URL",
        "",
        "A collector that logged decisions are sent to as well, as OTLP logs in JSON over HTTP, such as \
         http://127.0.0.1:4318; what it does not take is lost there, and counted",
    ),
    setting(
        "log_otlp_headers",
        "HEADERS",
        "",
        "Headers for that collector, name=value, separated by commas: better in the variable or the file, where other users \
         do not see them",
    ),
    setting(
        "origin",
        "URL",
        "none",
        "Where the servers of a region count together: \"none\", \"memory\" for a region of this server alone, \
         redis://host:6379, redis-cluster://host:6379,host:6379 or redis-sentinel://host:26379,host:26379/name, with \
         rediss for TLS",
    ),
    setting(
        "region",
        "NAME",
        "default",
        "The region: servers that name the same, at the same origin, are one limiter. Of several regions, each has its own",
    ),
    setting(
        "origin_ca",
        "FILE",
        "",
        "Authorities (PEM) trusted at the origin, instead of those of the system",
    ),
    setting("origin_cert", "FILE", "", "Certificate (PEM) that is shown to the origin"),
    setting("origin_key", "FILE", "", "Private key (PEM) of that certificate"),
    setting(
        "origin_timeout",
        "TIME",
        "20ms",
        "How long a request waits for the origin, 1ms to 10s: then it is decided without it, by its rule's class. Longer: fewer \
         decisions without an origin that is slow; longer answers while it is gone",
    ),
    setting(
        "nodes",
        "N",
        "1",
        "Processes in each region, 1 to 1000000, as bounds, and parts of limits without an origin, count with them: this many, or as many as were ever heard of if that is more",
    ),
    setting(
        "peer",
        "NAME=HOST:PORT",
        "",
        "A server of another region, by its peer_listen; once for each server of each region, or separated by commas",
    )
    .list(),
    setting("peer_listen", "ADDR", "", "Where servers of other regions reach this one"),
    setting(
        "region_weights",
        "NAME=N",
        "",
        "Regions, this one included, whose standing parts weigh more than 1, up to 1000000, separated by commas; the same \
         everywhere",
    )
    .list(),
    setting(
        "peer_timeout",
        "TIME",
        "5s",
        "How long another region may be silent before each goes on with its standing part of global limits, 2s to 1m; the \
         same everywhere. Longer: short cuts are not noticed; more passes before a real one is",
    ),
    setting(
        "forward_timeout",
        "TIME",
        "250ms",
        "How long another region may take to decide under a strict limit, 10ms to 10s: then the request is refused. Longer: \
         more passes over a slow network; requests wait longer for a region that is gone",
    ),
    setting("peer_ca", "FILE", "", "The authority (PEM) that signs the certificates of all regions, and nothing else"),
    setting("peer_cert", "FILE", "", "Certificate (PEM) of this region, for the name REGION.tidegate"),
    setting("peer_key", "FILE", "", "Private key (PEM) of that certificate"),
    setting(
        "memory",
        "SIZE",
        "64MB",
        "Memory of the table, all it will ever take. More: more keys before any is forgotten, at 49 bytes each",
    ),
    setting("workers", "N", "", "Threads that answer requests, 1 to 256 [default: one for each core]"),
    setting(
        "connections_max",
        "N",
        "20000",
        "Connections of each listener, 1 to 1000000. Higher: more clients at once, more memory for buffers, more open files",
    ),
    setting(
        "idle_timeout",
        "TIME",
        "10m",
        "After this long without a request a connection is closed, 1s to 1d",
    ),
    setting(
        "request_timeout",
        "TIME",
        "10s",
        "A request that takes longer to arrive, or an answer to be taken, ends its connection, 100ms to 5m",
    ),
    setting(
        "drain_timeout",
        "TIME",
        "10s",
        "How long open requests may take to finish when the server stops, 0s to 10m",
    ),
    setting(
        "trusted_proxies",
        "NETWORKS",
        "127.0.0.0/8,::1",
        "Networks of proxies whose X-Forwarded-For is believed, separated by commas; \"\" to believe none",
    )
    .list(),
    setting(
        "reset_header",
        "STYLE",
        "epoch",
        "What X-RateLimit-Reset counts: \"epoch\" or \"delta\" seconds",
    ),
    setting("tls_cert", "FILE", "", "Certificate chain (PEM) for every listener"),
    setting("tls_key", "FILE", "", "Private key (PEM) of the certificate"),
    setting("tls_client_ca", "FILE", "", "Clients must show a certificate of this authority (PEM)"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_are_unique() {
        let keys: HashSet<_> = SETTINGS.iter().map(|setting| setting.key).collect();
        assert_eq!(keys.len(), SETTINGS.len());
    }
}
