//! Commands that clients send on connect, and to test a connection.

use super::client_state::{ClientState, check_name};
use super::command::{Flow, wrong_arity};
use super::info::REDIS_VERSION;
use super::reply::{Protocol, Reply};
use super::request::{Request, strict};

const WRONG_TOKEN: &[u8] = b"WRONGPASS invalid username-password pair or user is disabled.";

const NO_TOKENS: &[u8] = b"ERR AUTH <password> called without any password configured for the default user. \
    Are you sure your configuration is correct?";

const HELLO_STRANGER: &[u8] = b"NOAUTH HELLO must be called with the client already authenticated, otherwise the \
    HELLO AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at \
    the same time";

/// `PING [message]`.
pub(super) fn ping(_: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    match (request.len(), request.get(1)) {
        (1, _) => reply.status("PONG"),
        (2, Some(message)) => reply.bulk(message),
        _ => reply.error(&wrong_arity("ping")),
    }
    Flow::Continue
}

/// `ECHO message`.
pub(super) fn echo(_: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    reply.bulk(request.get(1).unwrap_or_default());
    Flow::Continue
}

/// `SELECT 0`.
pub(super) fn select(_: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    match strict(request.get(1).unwrap_or_default()) {
        Some(0) => reply.ok(),
        Some(_) => reply.error(b"ERR DB index is out of range"),
        None => reply.error(b"ERR value is not an integer or out of range"),
    }
    Flow::Continue
}

/// `QUIT`.
pub(super) fn quit(_: &mut ClientState, _: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    reply.ok();
    Flow::Close
}

/// `RESET`.
pub(super) fn reset(client_state: &mut ClientState, _: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    client_state.reset();
    reply.status("RESET");
    Flow::Continue
}

/// `AUTH [user] token`.
pub(super) fn auth(client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let (user, token) = match (request.len(), request.get(1), request.get(2)) {
        (2, ..) if client_state.shared.credentials.load().is_open() => {
            reply.error(NO_TOKENS);
            return Flow::Continue;
        }
        (2, Some(token), _) => (&b"default"[..], token),
        (3, Some(user), Some(token)) => (user, token),
        _ => {
            reply.error(b"ERR syntax error");
            return Flow::Continue;
        }
    };
    if client_state.authenticate(user, token) {
        reply.ok();
    } else {
        reply.error(WRONG_TOKEN);
    }
    Flow::Continue
}

/// The options of `HELLO`.
#[derive(Default)]
struct Hello<'r> {
    protocol: Option<Protocol>,
    user_and_token: Option<(&'r [u8], &'r [u8])>,
    name: Option<&'r [u8]>,
}

impl<'r> Hello<'r> {
    fn read(request: &Request<'r>) -> Result<Self, Vec<u8>> {
        let mut hello = Self::default();
        let Some(version) = request.get(1) else { return Ok(hello) };
        hello.protocol = Some(match strict(version) {
            Some(2) => Protocol::Resp2,
            Some(3) => Protocol::Resp3,
            Some(_) => return Err(b"NOPROTO unsupported protocol version".to_vec()),
            None => return Err(b"ERR Protocol version is not an integer or out of range".to_vec()),
        });
        let mut at = 2;
        while let Some(option) = request.get(at) {
            match (request.get(at + 1), request.get(at + 2)) {
                (Some(user), Some(token)) if request.is(at, "auth") => {
                    hello.user_and_token = Some((user, token));
                    at += 3;
                }
                (Some(name), _) if request.is(at, "setname") => {
                    check_name(name)?;
                    hello.name = Some(name);
                    at += 2;
                }
                _ => return Err([b"ERR Syntax error in HELLO option '", option, b"'"].concat()),
            }
        }
        Ok(hello)
    }
}

/// `HELLO [2 | 3 [AUTH user token] [SETNAME name]]`.
pub(super) fn hello(client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    match Hello::read(request).and_then(|hello| greet(client_state, &hello)) {
        Ok(()) => describe_server(client_state, reply),
        Err(problem) => reply.error(&problem),
    }
    Flow::Continue
}

fn greet(client_state: &mut ClientState, hello: &Hello<'_>) -> Result<(), Vec<u8>> {
    if let Some((user, token)) = hello.user_and_token
        && !client_state.authenticate(user, token)
    {
        return Err(WRONG_TOKEN.to_vec());
    }
    if client_state.principal.is_none() {
        return Err(HELLO_STRANGER.to_vec());
    }
    if let Some(name) = hello.name {
        client_state.set_name(name)?;
    }
    client_state.protocol = hello.protocol.unwrap_or(client_state.protocol);
    Ok(())
}

fn describe_server(client_state: &ClientState, reply: &mut Reply<'_>) {
    reply.speak(client_state.protocol);
    reply.map(7);
    for (key, value) in [("server", "tidegate"), ("version", REDIS_VERSION)] {
        reply.bulk(key.as_bytes());
        reply.bulk(value.as_bytes());
    }
    for (key, value) in [("proto", client_state.protocol.number()), ("id", client_state.id)] {
        reply.bulk(key.as_bytes());
        reply.integer(value);
    }
    for (key, value) in [("mode", "standalone"), ("role", "master")] {
        reply.bulk(key.as_bytes());
        reply.bulk(value.as_bytes());
    }
    reply.bulk(b"modules");
    reply.array(0);
}
