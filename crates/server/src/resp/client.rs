//! `CLIENT`: the name of a connection. A client sees and changes only its own connection.

use super::client_state::ClientState;
use super::command::{Flow, help, takes, unknown_subcommand, wrong_arity};
use super::reply::Reply;
use super::request::Request;

/// The subcommands, and how many words a request has.
const ARITIES: [(&str, i64); 8] = [
    ("getname", 2),
    ("setname", 3),
    ("setinfo", 4),
    ("id", 2),
    ("info", 2),
    ("no-evict", 3),
    ("no-touch", 3),
    ("help", 2),
];

/// Executes `CLIENT`.
pub(super) fn answer(client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) -> Flow {
    let name = request.get(1).unwrap_or_default();
    match ARITIES.iter().find(|(known, _)| name.eq_ignore_ascii_case(known.as_bytes())) {
        None => reply.error(&unknown_subcommand("CLIENT", name)),
        Some((known, arity)) if !takes(*arity, request.len()) => {
            reply.error(&wrong_arity(&format!("client|{known}")));
        }
        Some((known, _)) => answer_known(known, client_state, request, reply),
    }
    Flow::Continue
}

fn answer_known(name: &str, client_state: &mut ClientState, request: &Request<'_>, reply: &mut Reply<'_>) {
    let argument = request.get(2).unwrap_or_default();
    match name {
        "getname" if client_state.name.is_empty() => reply.null(),
        "getname" => reply.bulk(&client_state.name),
        "setname" => match client_state.set_name(argument) {
            Ok(()) => reply.ok(),
            Err(problem) => reply.error(problem.as_bytes()),
        },
        // Which library it is makes no difference here.
        "setinfo" if request.is(2, "lib-name") || request.is(2, "lib-ver") => reply.ok(),
        "setinfo" => reply.error(&[b"ERR Unrecognized option '", argument, b"'"].concat()),
        "id" => reply.integer(client_state.id),
        "info" => reply.verbatim(&about(client_state)),
        // The server never evicts a connection, and has no access times, so both options have no
        // effect.
        "no-evict" | "no-touch" if request.is(2, "on") || request.is(2, "off") => reply.ok(),
        "no-evict" | "no-touch" => reply.error(b"ERR syntax error"),
        _ => help(
            reply,
            "CLIENT",
            &[
                "GETNAME",
                "SETNAME <name>",
                "SETINFO <option> <value>",
                "ID",
                "INFO",
                "NO-EVICT (ON|OFF)",
                "NO-TOUCH (ON|OFF)",
            ],
        ),
    }
}

fn about(client_state: &ClientState) -> String {
    let name = String::from_utf8_lossy(&client_state.name);
    format!("id={} name={name} db=0 resp={}\n", client_state.id, client_state.protocol.number())
}
