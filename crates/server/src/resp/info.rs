//! `INFO` and `CONFIG GET`, by which clients and load generators identify the server.

use std::fmt::Write;

use super::client_state::ClientState;
use super::command::{Flow, help, unknown_subcommand, wrong_arity};
use super::reply::Reply;
use super::request::Request;

/// The Redis version that these replies follow. Clients choose their commands by it.
pub(super) const REDIS_VERSION: &str = "7.0.0";

/// The settings that clients query, as in a Redis that writes nothing to disk and has one database.
const SETTINGS: [(&str, &str); 4] =
    [("save", ""), ("appendonly", "no"), ("databases", "1"), ("maxmemory-policy", "noeviction")];

/// `INFO [section...]`.
pub(super) fn info(client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let all = request.len() == 1 || ["all", "default", "everything"].iter().any(|name| names(request, name));
    let mut text = String::new();
    for (name, section) in SECTIONS {
        if all || names(request, name) {
            if !text.is_empty() {
                text.push_str("\r\n");
            }
            section(client_state, &mut text);
        }
    }
    reply.verbatim(&text);
    Flow::Continue
}

fn names(request: &Request<'_>, section: &str) -> bool {
    (1..request.len()).any(|at| request.is(at, section))
}

type Section = (&'static str, fn(&ClientState, &mut String));

const SECTIONS: [Section; 3] = [("server", server), ("memory", memory), ("keyspace", keyspace)];

fn server(_: &ClientState, text: &mut String) {
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\nserver_name:tidegate\r\n\
         tidegate_version:{}\r\nprocess_id:{}\r\n",
        env!("CARGO_PKG_VERSION"),
        std::process::id()
    );
}

fn memory(client_state: &ClientState, text: &mut String) {
    let bytes = client_state.shared.decider.limiter.memory_bytes();
    let _ = write!(text, "# Memory\r\nmaxmemory:{bytes}\r\n");
}

/// Writes the number of meters of the client's tenant.
fn keyspace(client_state: &ClientState, text: &mut String) {
    text.push_str("# Keyspace\r\n");
    let Some(principal) = client_state.principal else { return };
    let tenant = client_state.shared.tenant(principal.tenant);
    let keys = client_state.shared.decider.limiter.stats_of(&tenant.name).map_or(0, |stats| stats.live);
    if keys > 0 {
        let _ = write!(text, "db0:keys={keys},expires={keys},avg_ttl=0\r\n");
    }
}

/// `CONFIG GET pattern...`.
pub(super) fn config(_: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let name = request.get(1).unwrap_or_default();
    match name.to_ascii_lowercase().as_slice() {
        b"get" if request.len() > 2 => get(request, reply),
        b"get" => reply.error(&wrong_arity("config|get")),
        b"help" => help(reply, "CONFIG", &["GET <name> ..."]),
        _ => reply.error(&unknown_subcommand("CONFIG", name)),
    }
    Flow::Continue
}

fn get(request: &Request<'_>, reply: &mut Reply<'_>) {
    let asked = |name: &str| (2..request.len()).any(|at| request.is(at, name) || request.is(at, "*"));
    let found: Vec<_> = SETTINGS.iter().filter(|(name, _)| asked(name)).collect();
    reply.map(found.len());
    for (name, value) in found {
        reply.bulk(name.as_bytes());
        reply.bulk(value.as_bytes());
    }
}
