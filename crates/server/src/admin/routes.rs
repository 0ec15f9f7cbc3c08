//! Routes of the admin listener, and the access that each requires.

use ::http::Method;
use percent_encoding::percent_decode_str;

use crate::auth::Role;

/// The handler of a route.
#[derive(Clone, Copy, Debug)]
pub(super) enum AdminEndpoint {
    Alive,
    Ready,
    Metrics,
    Check,
    Why,
    Heavy,
    Bounds,
    Regions,
    Status,
    Rules,
    Rule,
    Plan,
    Apply,
    History,
    Change,
    Approve,
    Reject,
    Rollback,
    Shadow,
    Enforce,
    Emergencies,
    Declare,
    Renew,
    End,
    Credentials,
    Admit,
    Revoke,
    Audit,
    Verify,
}

/// The access that a route requires.
#[derive(Clone, Copy, Debug)]
pub(super) enum Access {
    /// No credential.
    Public,
    /// The role; the caller sees its own tenant.
    Tenant(Role),
    /// The role, with a token without a tenant.
    Operators(Role),
}

#[derive(Debug)]
pub(super) struct Route {
    method: Method,
    /// `{}` matches one segment of the path.
    path: &'static str,
    pub(super) who: Access,
    pub(super) to: AdminEndpoint,
}

impl Route {
    /// Whether requests of this route only read.
    pub(super) fn reads(&self) -> bool {
        self.method == Method::GET
    }
}

const fn get(path: &'static str, who: Access, to: AdminEndpoint) -> Route {
    Route { method: Method::GET, path, who, to }
}

const fn post(path: &'static str, who: Access, to: AdminEndpoint) -> Route {
    Route { method: Method::POST, path, who, to }
}

const fn delete(path: &'static str, who: Access, to: AdminEndpoint) -> Route {
    Route { method: Method::DELETE, path, who, to }
}

const VIEWER: Access = Access::Operators(Role::Viewer);
const OPERATOR: Access = Access::Operators(Role::Operator);
const APPROVER: Access = Access::Operators(Role::Approver);
const ADMIN: Access = Access::Operators(Role::Admin);

/// All of them. Of several that fit, the first is meant.
static ROUTES: [Route; 29] = [
    get("/healthz", Access::Public, AdminEndpoint::Alive),
    get("/readyz", Access::Public, AdminEndpoint::Ready),
    get("/metrics", VIEWER, AdminEndpoint::Metrics),
    post("/v1/check", Access::Tenant(Role::Client), AdminEndpoint::Check),
    get("/v1/why", Access::Tenant(Role::Viewer), AdminEndpoint::Why),
    get("/v1/heavy", Access::Tenant(Role::Viewer), AdminEndpoint::Heavy),
    get("/v1/bounds", VIEWER, AdminEndpoint::Bounds),
    get("/v1/regions", VIEWER, AdminEndpoint::Regions),
    get("/v1/status", VIEWER, AdminEndpoint::Status),
    get("/v1/rules", VIEWER, AdminEndpoint::Rules),
    get("/v1/rules/history", VIEWER, AdminEndpoint::History),
    get("/v1/rules/changes/{}", VIEWER, AdminEndpoint::Change),
    get("/v1/rules/{}/{}", VIEWER, AdminEndpoint::Rule),
    post("/v1/rules/plan", OPERATOR, AdminEndpoint::Plan),
    post("/v1/rules/apply", OPERATOR, AdminEndpoint::Apply),
    post("/v1/rules/rollback", OPERATOR, AdminEndpoint::Rollback),
    post("/v1/rules/{}/shadow", OPERATOR, AdminEndpoint::Shadow),
    post("/v1/rules/{}/enforce", OPERATOR, AdminEndpoint::Enforce),
    post("/v1/rules/changes/{}/approve", APPROVER, AdminEndpoint::Approve),
    post("/v1/rules/changes/{}/reject", OPERATOR, AdminEndpoint::Reject),
    get("/v1/emergencies", VIEWER, AdminEndpoint::Emergencies),
    post("/v1/emergencies", OPERATOR, AdminEndpoint::Declare),
    post("/v1/emergencies/{}/renew", OPERATOR, AdminEndpoint::Renew),
    delete("/v1/emergencies/{}", OPERATOR, AdminEndpoint::End),
    get("/v1/credentials", ADMIN, AdminEndpoint::Credentials),
    post("/v1/credentials", ADMIN, AdminEndpoint::Admit),
    delete("/v1/credentials/{}", ADMIN, AdminEndpoint::Revoke),
    get("/v1/audit", VIEWER, AdminEndpoint::Audit),
    get("/v1/audit/verify", VIEWER, AdminEndpoint::Verify),
];

/// The route of a path, if there is one.
pub(super) enum RouteMatch {
    Nothing,
    /// The path exists, but only with this method.
    OtherMethod(&'static Method),
    /// The route, and the parts of the path that it leaves open.
    Route(&'static Route, Vec<String>),
}

/// Finds the route of a request. HEAD uses the routes of GET.
pub(super) fn find(method: &Method, path: &str) -> RouteMatch {
    let method = if *method == Method::HEAD { &Method::GET } else { method };
    let mut found = RouteMatch::Nothing;
    for route in &ROUTES {
        let Some(parts) = parts(route.path, path) else { continue };
        if route.method == *method {
            return RouteMatch::Route(route, parts);
        }
        found = RouteMatch::OtherMethod(&route.method);
    }
    found
}

/// Returns the segments in place of `{}`, or `None` if the path does not match the pattern.
fn parts(pattern: &str, path: &str) -> Option<Vec<String>> {
    let mut parts = Vec::new();
    let (mut wanted, mut given) = (pattern.split('/'), path.split('/'));
    loop {
        match (wanted.next(), given.next()) {
            (None, None) => return Some(parts),
            (Some("{}"), Some(part)) => parts.push(percent_decode_str(part).decode_utf8().ok()?.into_owned()),
            (Some(wanted), Some(given)) if wanted == given => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart() {
        assert_eq!(parts("/a/{}/b", "/a/x%2Fy%20z/b"), Some(vec!["x/y z".to_owned()]));
        assert_eq!(parts("/a", "/a"), Some(vec![]));
        for other in ["/a", "/a/", "/a/x/c", "/a/x/b/", "/a/%ff/b", "a/x/b"] {
            assert_eq!(parts("/a/{}/b", other), None, "{other}");
        }
        let change = find(&Method::GET, "/v1/rules/changes/7");
        assert!(matches!(change, RouteMatch::Route(Route { to: AdminEndpoint::Change, .. }, _)));
        let allowed = find(&Method::PUT, "/v1/rules/plan");
        assert!(matches!(allowed, RouteMatch::OtherMethod(method) if *method == Method::POST));
        assert!(matches!(find(&Method::GET, "/v1"), RouteMatch::Nothing));
    }

    /// The test of roles takes its routes from the documented table. It would not test a route that
    /// the table lacks.
    #[test]
    fn the_documentation_has_all_routes() {
        let text = include_str!("../../../../docs/control-plane.md");
        let documented: Vec<(String, String)> = text
            .lines()
            .filter_map(|line| line.strip_prefix("| `"))
            .filter_map(|line| line.split_once('`')?.0.split_once(' '))
            .filter(|(method, _)| ["GET", "POST", "DELETE"].contains(method))
            .map(|(method, path)| (method.to_owned(), open(path)))
            .collect();
        let all: Vec<(String, String)> =
            ROUTES.iter().map(|route| (route.method.to_string(), route.path.to_owned())).collect();
        assert_eq!(documented, all);
    }

    /// A path as a pattern has it, without the names of its open parts.
    fn open(path: &str) -> String {
        let parts = path.split('/').map(|part| if part.starts_with('{') { "{}" } else { part });
        parts.collect::<Vec<_>>().join("/")
    }
}
