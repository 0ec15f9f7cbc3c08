//! The table of commands, and `COMMAND`, which describes them to clients.

use std::sync::Once;

use super::client_state::ClientState;
use super::reply::Reply;
use super::request::Request;
use super::{client, connection, info, throttle};

/// The event that follows a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// The next one.
    Continue,
    /// The end of the connection.
    Close,
}

/// A command.
pub(super) struct Command {
    /// In lower case.
    name: &'static str,
    /// How many words a request has, the name among them; below zero, how many at least.
    arity: i64,
    flags: &'static [&'static str],
    /// Where its keys are: the first, the last, and the step between them.
    keys: [i64; 3],
    /// Whether an unauthenticated client may use it.
    strangers: bool,
    group: &'static str,
    summary: &'static str,
    answer: fn(&mut ClientState, &Request<'_>, &mut Reply<'_>) -> Flow,
}

const NO_KEYS: [i64; 3] = [0; 3];

const COMMANDS: &[Command] = &[
    Command {
        name: "cl.throttle",
        arity: -1,
        flags: &["write", "fast"],
        keys: [1, 1, 1],
        strangers: false,
        group: "generic",
        summary: "Decides whether so much may pass on a key",
        answer: throttle::answer,
    },
    Command {
        name: "ping",
        arity: -1,
        flags: &["fast"],
        keys: NO_KEYS,
        strangers: false,
        group: "connection",
        summary: "Answers, to show that it does",
        answer: connection::ping,
    },
    Command {
        name: "echo",
        arity: 2,
        flags: &["fast"],
        keys: NO_KEYS,
        strangers: false,
        group: "connection",
        summary: "Returns its argument",
        answer: connection::echo,
    },
    Command {
        name: "hello",
        arity: -1,
        flags: &["fast", "no_auth"],
        keys: NO_KEYS,
        strangers: true,
        group: "connection",
        summary: "Negotiates the protocol and authenticates",
        answer: connection::hello,
    },
    Command {
        name: "auth",
        arity: -2,
        flags: &["fast", "no_auth"],
        keys: NO_KEYS,
        strangers: true,
        group: "connection",
        summary: "Authenticates with a token",
        answer: connection::auth,
    },
    Command {
        name: "select",
        arity: 2,
        flags: &["fast"],
        keys: NO_KEYS,
        strangers: false,
        group: "connection",
        summary: "Chooses database 0, the only one",
        answer: connection::select,
    },
    Command {
        name: "quit",
        arity: -1,
        flags: &["fast", "no_auth"],
        keys: NO_KEYS,
        strangers: true,
        group: "connection",
        summary: "Ends the connection",
        answer: connection::quit,
    },
    Command {
        name: "reset",
        arity: 1,
        flags: &["fast", "no_auth"],
        keys: NO_KEYS,
        strangers: true,
        group: "connection",
        summary: "Makes the connection as new",
        answer: connection::reset,
    },
    Command {
        name: "client",
        arity: -2,
        flags: &[],
        keys: NO_KEYS,
        strangers: false,
        group: "connection",
        summary: "Names this connection, and tells of it",
        answer: client::answer,
    },
    Command {
        name: "command",
        arity: -1,
        flags: &[],
        keys: NO_KEYS,
        strangers: false,
        group: "server",
        summary: "Tells of commands",
        answer,
    },
    Command {
        name: "info",
        arity: -1,
        flags: &[],
        keys: NO_KEYS,
        strangers: false,
        group: "server",
        summary: "Tells of the server",
        answer: info::info,
    },
    Command {
        name: "config",
        arity: -2,
        flags: &[],
        keys: NO_KEYS,
        strangers: false,
        group: "server",
        summary: "Tells of settings that clients ask for",
        answer: info::config,
    },
];

/// Executes a request.
pub(super) fn dispatch(client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let Some(name) = request.get(0) else { return Flow::Continue };
    if is_http(name) {
        warn_of_http();
        return Flow::Close;
    }
    let Some(command) = find(name) else {
        reply.error(&unknown(name, request));
        return Flow::Continue;
    };
    if !takes(command.arity, request.len()) {
        reply.error(&wrong_arity(command.name));
        return Flow::Continue;
    }
    if client_state.principal.is_none() && !command.strangers {
        reply.error(b"NOAUTH Authentication required.");
        return Flow::Continue;
    }
    (command.answer)(client_state, request, reply)
}

/// Whether the client is a browser: `POST` begins an HTTP request, and `Host:` is a field of each.
/// A web page can make a browser send them here, with commands in the body. As in Redis, they get
/// no reply.
fn is_http(name: &[u8]) -> bool {
    [&b"post"[..], b"host:"].iter().any(|word| name.eq_ignore_ascii_case(word))
}

fn warn_of_http() {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        tracing::warn!(
            "HTTP was sent to the listener for Redis clients, perhaps by a web page in a browser; the connection \
             is closed, as those of all who do so will be"
        );
    });
}

fn find(name: &[u8]) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| name.eq_ignore_ascii_case(command.name.as_bytes()))
}

/// Whether a command of this arity takes so many words.
pub(super) fn takes(arity: i64, words: usize) -> bool {
    let words = i64::try_from(words).unwrap_or(i64::MAX);
    if arity < 0 { words >= -arity } else { words == arity }
}

pub(super) fn wrong_arity(name: &str) -> Vec<u8> {
    format!("ERR wrong number of arguments for '{name}' command").into_bytes()
}

/// Cuts a client's text to the length that an error may repeat.
fn cut(text: &[u8], most: usize) -> &[u8] {
    &text[..text.len().min(most)]
}

/// How much of a client's words an error repeats, as in Redis.
const REPEATED_BYTES_MAX: usize = 128;

fn unknown(name: &[u8], request: &Request<'_>) -> Vec<u8> {
    let mut arguments = Vec::new();
    for argument in request.from(1) {
        let Some(room @ 1..) = REPEATED_BYTES_MAX.checked_sub(arguments.len()) else { break };
        arguments.extend_from_slice(&[b"'", cut(argument, room), b"' "].concat());
    }
    let name = cut(name, REPEATED_BYTES_MAX);
    [b"ERR unknown command '", name, b"', with args beginning with: ", &arguments].concat()
}

pub(super) fn unknown_subcommand(of: &str, name: &[u8]) -> Vec<u8> {
    let name = cut(name, REPEATED_BYTES_MAX);
    [b"ERR unknown subcommand '", name, b"'. Try ", of.as_bytes(), b" HELP."].concat()
}

/// `COMMAND [COUNT | LIST | INFO [name...] | DOCS [name...] | HELP]`.
fn answer(_: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let Some(subcommand) = request.get(1) else {
        write_all_commands(reply);
        return Flow::Continue;
    };
    match subcommand.to_ascii_lowercase().as_slice() {
        b"count" if request.len() == 2 => reply.integer(i64::try_from(COMMANDS.len()).unwrap_or(i64::MAX)),
        b"count" => reply.error(&wrong_arity("command|count")),
        b"list" => {
            reply.array(COMMANDS.len());
            for command in COMMANDS {
                reply.bulk(command.name.as_bytes());
            }
        }
        b"info" => write_named_commands(request, reply),
        b"docs" => document_some(request, reply),
        b"help" => help(reply, "COMMAND", &["COUNT", "LIST", "INFO [<name> ...]", "DOCS [<name> ...]"]),
        _ => reply.error(&unknown_subcommand("COMMAND", subcommand)),
    }
    Flow::Continue
}

/// The subcommands of a command, for people.
pub(super) fn help(reply: &mut Reply<'_>, of: &str, subcommands: &[&str]) {
    reply.array(subcommands.len() + 2);
    reply.status(&format!("{of} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"));
    for subcommand in subcommands {
        reply.status(subcommand);
    }
    reply.status("HELP");
}

fn write_all_commands(reply: &mut Reply<'_>) {
    reply.array(COMMANDS.len());
    for command in COMMANDS {
        command.describe(reply);
    }
}

fn write_named_commands(request: &Request<'_>, reply: &mut Reply<'_>) {
    if request.len() == 2 {
        return write_all_commands(reply);
    }
    reply.array(request.len() - 2);
    for name in request.from(2) {
        match find(name) {
            Some(command) => command.describe(reply),
            None => reply.null(),
        }
    }
}

fn document_some(request: &Request<'_>, reply: &mut Reply<'_>) {
    let named: Vec<&Command> = if request.len() == 2 {
        COMMANDS.iter().collect()
    } else {
        request.from(2).filter_map(find).collect()
    };
    reply.map(named.len());
    for command in named {
        command.document(reply);
    }
}

impl Command {
    fn describe(&self, reply: &mut Reply<'_>) {
        reply.array(10);
        reply.bulk(self.name.as_bytes());
        reply.integer(self.arity);
        reply.set(self.flags.len());
        for flag in self.flags {
            reply.status(flag);
        }
        for place in self.keys {
            reply.integer(place);
        }
        // Categories of access, hints, places of keys and subcommands: clients do without.
        for _ in 0..4 {
            reply.set(0);
        }
    }

    fn document(&self, reply: &mut Reply<'_>) {
        reply.bulk(self.name.as_bytes());
        reply.map(2);
        for (key, value) in [("summary", self.summary), ("group", self.group)] {
            reply.bulk(key.as_bytes());
            reply.bulk(value.as_bytes());
        }
    }
}
