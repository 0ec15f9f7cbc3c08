//! The admin listener: health, readiness, metrics, questions from the command line, and the rules' store.

mod audit;
mod bounds;
mod credentials;
mod emergencies;
mod given;
mod log;
mod regions;
mod routes;
mod rules;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use ::http::StatusCode;
use prometheus_client::encoding::text::encode;
use tidegate_rules::store::{Act, StoreError};
use tokio::io::{AsyncRead, AsyncWrite};

use self::routes::{Found, To, Who, find};
use crate::auth::TenantIndex;
use crate::control::{Control, Unfit};
use crate::http::{Answer, Asked, Problem, not_found, route_check, serve_with, text};
use crate::worker::Context;

/// The tenant that tokens without one belong to: whoever runs the server.
const OPERATING_TENANT: TenantIndex = 0;

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the handlers of the store answer.
type Answered = Result<Answer, Problem>;

/// Answers the requests of one connection.
pub(crate) async fn serve<S>(stream: S, peer: SocketAddr, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    // Whoever watches the server sees the others drain.
    let stop = context.stop_admin.clone();
    serve_with(stream, peer, Context { stop, ..context }, route).await
}

async fn route(asked: &Asked<'_>) -> Answer {
    let (to, parts) = match find(&asked.parts.method, asked.parts.uri.path()) {
        Found::Nothing => return not_found(asked),
        Found::OtherMethod(allowed) => return Problem::wrong_method(allowed).into(),
        Found::Route(route, parts) => match may(asked, route.who) {
            Err(problem) => return problem.into(),
            Ok(()) => (route.to, parts),
        },
    };
    let part = |at: usize| parts.get(at).map_or("", String::as_str);
    let answered = match to {
        To::Alive => Ok(text(StatusCode::OK, "text/plain", "ok\n")),
        To::Ready => Ok(ready(asked)),
        To::Metrics => metrics(asked),
        To::Check => Ok(route_check(asked).await),
        To::Why => log::why(asked).await,
        To::Heavy => log::heavy(asked).await,
        To::Bounds => bounds::list(asked),
        To::Regions => regions::list(asked),
        To::Rules => rules::list(asked).await,
        To::Rule => rules::get(asked, part(0), part(1)).await,
        To::Plan => rules::plan(asked).await,
        To::Apply => rules::apply(asked).await,
        To::History => rules::history(asked).await,
        To::Change => rules::change(asked, part(0)).await,
        To::Approve => rules::approve(asked, part(0)).await,
        To::Reject => rules::reject(asked, part(0)).await,
        To::Rollback => rules::rollback(asked).await,
        To::Shadow => rules::set_mode(asked, part(0), "shadow").await,
        To::Enforce => rules::set_mode(asked, part(0), "enforce").await,
        To::Emergencies => emergencies::list(asked).await,
        To::Declare => emergencies::declare(asked).await,
        To::Renew => emergencies::renew(asked, part(0)).await,
        To::End => emergencies::end(asked, part(0)).await,
        To::Credentials => credentials::list(asked).await,
        To::Admit => credentials::admit(asked).await,
        To::Revoke => credentials::revoke(asked, part(0)).await,
        To::Audit => audit::page(asked).await,
        To::Verify => audit::verify(asked).await,
    };
    answered.unwrap_or_else(Answer::from)
}

/// Whether whoever asks may.
fn may(asked: &Asked<'_>, who: Who) -> Result<(), Problem> {
    match who {
        Who::Anybody => Ok(()),
        Who::Tenant(role) => asked.principal(role).map(|_| ()),
        // What concerns every tenant is not for one of them.
        Who::Operators(role) => match asked.principal(role)?.tenant {
            OPERATING_TENANT => Ok(()),
            _ => Err(Problem::for_operators()),
        },
    }
}

/// Probes have no credentials, and learn nothing here but whether to send traffic.
fn ready(asked: &Asked<'_>) -> Answer {
    if asked.shared.is_ready() {
        text(StatusCode::OK, "text/plain", "ready\n")
    } else {
        text(StatusCode::SERVICE_UNAVAILABLE, "text/plain", "draining\n")
    }
}

fn metrics(asked: &Asked<'_>) -> Answered {
    let mut body = String::new();
    match encode(&mut body, &asked.shared.registry) {
        Ok(()) => Ok(text(StatusCode::OK, METRICS_TYPE, body)),
        Err(error) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// The store of this server, if its rules are in one.
fn control<'a>(asked: &'a Asked<'_>) -> Result<&'a Arc<Control>, Problem> {
    let file = "rules: this server reads its rules from a file, which is changed where it is; start it with `--rules \
                sqlite:FILE` or `--rules postgres://...` for rules that are changed here";
    let missing = || match &asked.shared.rules_address {
        None => Problem::new(StatusCode::CONFLICT, file),
        Some(address) => {
            let gone = format!("rules: {address} was not there since the server started; it is looked for");
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, gone)
        }
    };
    asked.shared.control().ok_or_else(missing)
}

/// Who does something, and when.
fn act<'a>(actor: &'a str, control: &Control) -> Act<'a> {
    Act { by: actor, now_ms: control.now_ms() }
}

/// Puts a change of the store in force on this server at once, or says why it is not. The others are told by the store.
async fn take_over(refreshing: impl Future<Output = Result<(), String>>) -> Option<String> {
    let problem = refreshing.await.err();
    if let Some(problem) = &problem {
        tracing::error!(%problem, "a change is in the store, and not yet in force here");
    }
    problem
}

/// Asks whether something is meant.
fn unconfirmed(because: &str) -> Problem {
    let problem = format!("confirmed: {because}; say `\"confirmed\": true` if that is meant");
    Problem::new(StatusCode::CONFLICT, problem)
}

fn unfit(unfit: Unfit) -> Problem {
    match unfit {
        Unfit::Store(error) => refused(&error),
        Unfit::Wrong(problems) => Problem::bad_request(problems),
    }
}

fn refused(error: &StoreError) -> Problem {
    let status = match error {
        StoreError::Unreachable(_) | StoreError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        StoreError::Invalid(_) | StoreError::Ahead { .. } => StatusCode::BAD_REQUEST,
        StoreError::NotThere(_) => StatusCode::NOT_FOUND,
        StoreError::OwnApproval(_) | StoreError::RelatedApproval(_) | StoreError::LaterApproval(_) => {
            StatusCode::FORBIDDEN
        }
        StoreError::Conflict(_)
        | StoreError::Missing(_)
        | StoreError::InEmergency(_)
        | StoreError::TooManyEmergencies
        | StoreError::TooManyCredentials
        | StoreError::TooManyWaiting
        | StoreError::Moved { .. }
        | StoreError::Needs(..)
        | StoreError::State(..)
        | StoreError::Audit(_)
        | StoreError::NothingToRestore => StatusCode::CONFLICT,
        StoreError::Schema(_) | StoreError::Foreign(_) | StoreError::Database(_) => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    Problem::new(status, error.to_string())
}
