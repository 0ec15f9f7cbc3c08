//! The settings: each known by one key, in the file, as a flag and in the environment.

/// One setting. The key `http_listen` is the flag `--http-listen` and the variable
/// `TIDEGATE_HTTP_LISTEN`.
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
    setting("http_listen", "ADDR", "127.0.0.1:8080", "Address of the HTTP listener; \"off\" disables it"),
    setting(
        "grpc_listen",
        "ADDR",
        "127.0.0.1:8081",
        "Address of the gRPC listener, for Envoy; \"off\" disables it",
    ),
    setting(
        "resp_listen",
        "ADDR",
        "127.0.0.1:6380",
        "Address of the RESP listener, for Redis clients; \"off\" disables it",
    ),
    setting(
        "admin_listen",
        "ADDR",
        "127.0.0.1:8090",
        "Address of the admin listener: health, readiness, metrics and admin API; \"off\" \
         disables it",
    ),
    setting(
        "rules",
        "WHERE",
        "",
        "Source of the rules for /v1/check and forward-auth: a file, which the server reads again \
         when it changes, or a store that servers share, sqlite:FILE or \
         postgres://USER:PASSWORD@HOST:PORT/DATABASE",
    ),
    setting(
        "rules_placement",
        "DIMENSION",
        "",
        "For a store: the dimension that selects the origin partition of a request's meters, like \
         `placement` in a file",
    ),
    setting(
        "rules_snapshots",
        "WHERE",
        "",
        "For a store: a folder of this server, or s3://BUCKET/PREFIX, for snapshots of the rules. \
         The server starts from a snapshot while the store is unreachable; \"none\" writes none \
         [default: rules/ in data_dir]",
    ),
    setting(
        "rules_reconcile",
        "TIME",
        "5m",
        "For a store: interval of full comparisons with it, 100ms to 1d, varied by a fifth. \
         Shorter: missed changes apply earlier; each comparison reads all rules",
    ),
    setting(
        "rules_poll",
        "TIME",
        "",
        "For a store: interval of revision polls, beside the notifications of PostgreSQL, 100ms \
         to 1d. Shorter: changes behind a dead connection apply earlier [default: 5s for \
         PostgreSQL, 250ms for a file]",
    ),
    setting(
        "envoy_descriptors",
        "PATH",
        "",
        "Descriptors of Envoy's rate limit service: a file or a folder of files; the server reads \
         them again when they change",
    ),
    setting(
        "gcra_namespaces",
        "PATTERNS",
        "",
        "Namespaces of /v2/ratelimit.* that count by GCRA instead of a sliding window, separated \
         by commas; \"*\" matches any text",
    )
    .list(),
    setting(
        "data_dir",
        "DIR",
        "",
        "Folder of the decision log, and without a rule store of overrides; \"none\" keeps overrides in \
         memory and disables the log [default: the user's state folder]",
    ),
    setting(
        "decision_log",
        "WORD",
        "",
        "Whether decisions are logged: \"on\" or \"off\" [default: on if there is a data_dir]",
    ),
    setting(
        "log_sample",
        "SHARE",
        "0.001",
        "Share of allowed requests that is logged, 0 to 1; all denials are logged. Higher: \
         back-tests and `heavy` see smaller limits; more CPU time and bytes",
    ),
    setting("log_retention", "TIME", "7d", "Retention of decision records, 1m to 365d"),
    setting(
        "log_bytes_max",
        "SIZE",
        "1GB",
        "Size limit of the decision log, 1MB to 16TB; the oldest records are deleted first. \
         Higher: a flood of denials deletes fewer records",
    ),
    setting(
        "log_evidence",
        "TIME",
        "5m",
        "Time that the records of a rule must cover to show that a change denies little, 0s to 1h. \
         Longer: more changes after a start need the consent of their worst case",
    ),
    setting(
        "log_otlp",
        "URL",
        "",
        "Collector that also receives decision records, as OTLP logs in JSON over HTTP, such as \
         http://127.0.0.1:4318. Records that it does not accept are dropped there and counted",
    ),
    setting(
        "log_otlp_headers",
        "HEADERS",
        "",
        "Headers for that collector, name=value, separated by commas. The variable and the file \
         hide them from other users of the machine",
    ),
    setting(
        "origin",
        "URL",
        "none",
        "The origin, in which the servers of a region count together: \"none\", \"memory\" for a \
         region of one server, redis://host:6379, redis-cluster://host:6379,host:6379 or \
         redis-sentinel://host:26379,host:26379/name; rediss for TLS",
    ),
    setting(
        "region",
        "NAME",
        "default",
        "Name of the region. Servers with the same name and the same origin are one limiter. Each \
         of several regions has its own origin",
    ),
    setting(
        "origin_ca",
        "FILE",
        "",
        "CA certificates (PEM) that are trusted for the origin, instead of those of the system",
    ),
    setting("origin_cert", "FILE", "", "Client certificate (PEM) for the origin"),
    setting("origin_key", "FILE", "", "Private key (PEM) of that certificate"),
    setting(
        "origin_timeout",
        "TIME",
        "20ms",
        "Longest wait of a request for the origin, 1ms to 10s; then the class of its rule \
         decides. Longer: fewer decisions without a slow origin; slower answers while the origin \
         is unreachable",
    ),
    setting(
        "nodes",
        "N",
        "1",
        "Nodes in each region, 1 to 1000000, for bounds and for node shares without an origin. \
         The server uses the largest number of nodes it has seen, if that is more",
    ),
    setting(
        "peer",
        "NAME=HOST:PORT",
        "",
        "Server of another region, by its peer_listen; once for each server of each region, or \
         separated by commas",
    )
    .list(),
    setting("peer_listen", "ADDR", "", "Address of the listener for servers of other regions"),
    setting(
        "region_weights",
        "NAME=N",
        "",
        "Weights of regions, this one included, for their regional shares, 1 to 1000000, \
         separated by commas; the same in all regions",
    )
    .list(),
    setting(
        "peer_timeout",
        "TIME",
        "5s",
        "Last-heard age of a peer region, 2s to 1m, at which regions become isolated and spend \
         only their regional shares; the same in all regions. Longer: short partitions go \
         unnoticed; more over-admission before a long one counts",
    ),
    setting(
        "forward_timeout",
        "TIME",
        "250ms",
        "Longest wait for the owner region of a strict limit, 10ms to 10s; then the request is \
         denied. Longer: more requests pass over a slow network; requests wait longer for an \
         unreachable region",
    ),
    setting(
        "peer_ca",
        "FILE",
        "",
        "CA certificate (PEM) that signs the certificates of all regions, and no others",
    ),
    setting("peer_cert", "FILE", "", "Certificate (PEM) of this region, for the name REGION.tidegate"),
    setting("peer_key", "FILE", "", "Private key (PEM) of that certificate"),
    setting(
        "memory",
        "SIZE",
        "64MB",
        "Size of the meter table, which never grows. More: more keys before eviction, at 49 bytes \
         each",
    ),
    setting(
        "request_memory",
        "SIZE",
        "64MB",
        "Memory for requests that have arrived in part, on all listeners together, 1MB to 16TB; a \
         tenant may hold as much as it leaves free. More: more slow clients at once",
    ),
    setting("workers", "N", "", "Threads that answer requests, 1 to 256 [default: one for each core]"),
    setting(
        "connections_max",
        "N",
        "20000",
        "Maximum number of connections of each listener, 1 to 1000000; beyond it, a new one closes \
         the one that is idle for longest. Higher: more clients at once; more memory for buffers \
         and more open files",
    ),
    setting(
        "idle_timeout",
        "TIME",
        "10m",
        "Time without a request after which a connection is closed, 1s to 1d",
    ),
    setting(
        "request_timeout",
        "TIME",
        "10s",
        "Longest time for the first byte of a connection, for a TLS handshake, to receive a request, \
         or to send an answer, 100ms to 5m; then the connection is closed",
    ),
    setting(
        "drain_timeout",
        "TIME",
        "10s",
        "Longest time for open requests to finish when the server stops, 0s to 10m",
    ),
    setting(
        "trusted_proxies",
        "NETWORKS",
        "127.0.0.0/8,::1",
        "Networks of proxies whose X-Forwarded-For is trusted, separated by commas; \"\" trusts \
         none",
    )
    .list(),
    setting(
        "secret_headers",
        "FIELDS",
        "",
        "Header fields whose values are counted and logged as digests, besides Authorization, Cookie, \
         X-Api-Key and the like, separated by commas; the same on every server",
    )
    .list(),
    setting(
        "allowed_hosts",
        "NAMES",
        "",
        "Without tokens: host names by which the admin API and changes of overrides may be reached, \
         besides those of loopback, separated by commas",
    )
    .list(),
    setting("reset_header", "STYLE", "epoch", "Format of X-RateLimit-Reset: \"epoch\" or \"delta\" seconds"),
    setting("tls_cert", "FILE", "", "Certificate chain (PEM) of every listener"),
    setting("tls_key", "FILE", "", "Private key (PEM) of that certificate"),
    setting(
        "tls_client_ca",
        "FILE",
        "",
        "CA certificate (PEM) that client certificates must be signed by; clients must present \
         one",
    ),
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
