//! The admin listener: health, readiness, metrics, requests of the command line, and the rules'
//! store.

mod audit;
mod bounds;
mod credentials;
mod emergencies;
mod log;
mod operations;
mod params;
mod regions;
mod routes;
mod rules;
pub(crate) mod status;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use ::http::StatusCode;
use prometheus_client::encoding::text::encode;
use tidegate_control::{PlanError, Stopping};
use tidegate_rules::store::StoreError;
use tokio::io::{AsyncRead, AsyncWrite};

pub use self::emergencies::UNRULED_REQUESTS;
use self::routes::{Access, AdminEndpoint, Route, RouteMatch, find};
use crate::auth::OPERATING_TENANT;
use crate::config::RulesLocation;
use crate::control::Control;
use crate::guard::ConnectionState;
use crate::http::{
    HttpRequest, HttpResponse, Problem, not_found, refuse_body_type, refuse_foreign_host,
    refuse_foreign_origin, route_check, serve_with, text,
};
use crate::origin_monitor::Audience;
use crate::worker::Context;

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The result of a handler of the admin API.
type AdminResult = Result<HttpResponse, Problem>;

/// Serves the requests of one connection.
pub(crate) async fn serve<S>(stream: S, state: Rc<ConnectionState>, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // The admin listener stops last, so operators can watch the other listeners drain.
    let stop = context.stop_admin.clone();
    serve_with(stream, state, Context { stop, ..context }, true, route).await
}

/// Serves one health check, of a connection for which the full listener has no other place.
pub(crate) async fn serve_health<S>(stream: S, state: Rc<ConnectionState>, context: Context) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let stop = context.stop_admin.clone();
    serve_with(stream, state, Context { stop, ..context }, false, route_health).await
}

async fn route_health(req: &HttpRequest<'_>) -> HttpResponse {
    match find(&req.parts.method, req.parts.uri.path()) {
        RouteMatch::Route(Route { to: AdminEndpoint::Alive | AdminEndpoint::Ready, .. }, _) => {
            route(req).await
        }
        _ => Problem::full().into(),
    }
}

pub(crate) async fn route(req: &HttpRequest<'_>) -> HttpResponse {
    let (to, parts) = match find(&req.parts.method, req.parts.uri.path()) {
        RouteMatch::Nothing => return not_found(req),
        RouteMatch::OtherMethod(allowed) => return Problem::wrong_method(allowed).into(),
        RouteMatch::Route(route, parts) => match may(req, route) {
            Err(problem) => return problem.into(),
            Ok(()) => (route.to, parts),
        },
    };
    let part = |at: usize| parts.get(at).map_or("", String::as_str);
    let answered = match to {
        AdminEndpoint::Alive => Ok(text(StatusCode::OK, "text/plain", "ok\n")),
        AdminEndpoint::Ready => Ok(ready(req)),
        AdminEndpoint::Metrics => metrics(req),
        AdminEndpoint::Check => Ok(route_check(req).await),
        AdminEndpoint::Why => log::why(req).await,
        AdminEndpoint::Heavy => log::heavy(req).await,
        AdminEndpoint::Bounds => bounds::list(req),
        AdminEndpoint::Regions => regions::list(req),
        AdminEndpoint::Status => Ok(status::answer(req)),
        AdminEndpoint::Rules => rules::list(req).await,
        AdminEndpoint::Rule => rules::get(req, part(0), part(1)).await,
        AdminEndpoint::Plan => rules::plan(req).await,
        AdminEndpoint::Apply => rules::apply(req).await,
        AdminEndpoint::History => rules::history(req).await,
        AdminEndpoint::Change => rules::change(req, part(0)).await,
        AdminEndpoint::Approve => rules::approve(req, part(0)).await,
        AdminEndpoint::Reject => rules::reject(req, part(0)).await,
        AdminEndpoint::Rollback => rules::rollback(req).await,
        AdminEndpoint::Shadow => rules::set_mode(req, part(0), "shadow").await,
        AdminEndpoint::Enforce => rules::set_mode(req, part(0), "enforce").await,
        AdminEndpoint::Emergencies => emergencies::list(req).await,
        AdminEndpoint::Declare => emergencies::declare(req).await,
        AdminEndpoint::Renew => emergencies::renew(req, part(0)).await,
        AdminEndpoint::End => emergencies::end(req, part(0)).await,
        AdminEndpoint::Credentials => credentials::list(req).await,
        AdminEndpoint::Admit => credentials::admit(req).await,
        AdminEndpoint::Revoke => credentials::revoke(req, part(0)).await,
        AdminEndpoint::Audit => audit::page(req).await,
        AdminEndpoint::Verify => audit::verify(req).await,
    };
    answered.unwrap_or_else(HttpResponse::from)
}

/// Returns an error unless the caller has the access that a route requires, and is no web page.
fn may(req: &HttpRequest<'_>, route: &Route) -> Result<(), Problem> {
    match route.who {
        Access::Public => return Ok(()),
        Access::Tenant(role) => req.principal(role).map(|_| ()),
        // A token of one tenant has no access to data of all tenants.
        Access::Operators(role) => match req.principal(role)?.tenant {
            OPERATING_TENANT => Ok(()),
            _ => Err(Problem::for_operators()),
        },
    }?;
    refuse_foreign_host(req)?;
    if !route.reads() {
        refuse_foreign_origin(req)?;
        refuse_body_type(req)?;
    }
    Ok(())
}

/// Answers a probe, which needs no credential: whether the server takes traffic, and why it does
/// not work as configured. The reasons contain no address; `/v1/status` has them in full. Without
/// its origin a server is ready, because it still decides.
fn ready(req: &HttpRequest<'_>) -> HttpResponse {
    let (status, word) = if req.shared.node.is_ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    };
    let reasons = status::degraded(req.shared, Audience::Public).into_iter().map(|reason| reason + "\n");
    text(status, "text/plain", [word.to_owned()].into_iter().chain(reasons).collect::<String>())
}

fn metrics(req: &HttpRequest<'_>) -> AdminResult {
    let mut body = String::new();
    match encode(&mut body, &req.shared.telemetry.registry) {
        Ok(()) => Ok(text(StatusCode::OK, METRICS_TYPE, body)),
        Err(error) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// The store of this server, if its rules are in one.
fn control<'a>(req: &'a HttpRequest<'_>) -> Result<&'a Arc<Control>, Problem> {
    let missing = || match &req.shared.rules.location {
        None => {
            let none = "this server has no rules: start it with --rules FILE or --rules sqlite:FILE";
            Problem::new(StatusCode::CONFLICT, none)
        }
        Some(RulesLocation::File(path)) => {
            let file = format!("rules come from the file {}: edit it", path.display());
            Problem::new(StatusCode::CONFLICT, file)
        }
        Some(RulesLocation::Store(address)) => {
            let gone = format!("rules: {address} was not there since the server started; it is looked for");
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, gone)
        }
    };
    req.shared.rules.control().ok_or_else(missing)
}

/// Puts a change of the store in force on this server at once, or returns the reason why it failed.
/// Other servers follow the store.
async fn take_over(refreshing: impl Future<Output = Result<(), String>>) -> Option<String> {
    let problem = refreshing.await.err();
    if let Some(problem) = &problem {
        tracing::error!(%problem, "a change is in the store, and not yet in force here");
    }
    problem
}

/// Returns the problem that asks the caller for a confirmation.
fn unconfirmed(because: &str) -> Problem {
    let problem = format!("confirmed: {because}; say `\"confirmed\": true` if that is meant");
    Problem::new(StatusCode::CONFLICT, problem)
}

fn unfit(unfit: PlanError) -> Problem {
    match unfit {
        PlanError::Store(error) => refused(&error),
        PlanError::Wrong(problems) => Problem::bad_request(problems),
    }
}

impl From<Stopping> for Problem {
    fn from(stopping: Stopping) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, stopping.to_string())
    }
}

fn refused(error: &StoreError) -> Problem {
    let status = match error {
        StoreError::Unreachable(_) | StoreError::Busy | StoreError::InUse(_) => {
            StatusCode::SERVICE_UNAVAILABLE
        }
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
        | StoreError::TooManyOverrides(_)
        | StoreError::TooManyWaiting
        | StoreError::Moved { .. }
        | StoreError::Needs(..)
        | StoreError::State(..)
        | StoreError::Audit(_)
        | StoreError::Altered(_)
        | StoreError::NothingToRestore => StatusCode::CONFLICT,
        StoreError::Schema(_) | StoreError::Foreign(_) | StoreError::Database(_) => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    Problem::new(status, error.to_string())
}
