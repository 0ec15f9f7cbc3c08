//! Protects a server that believes every local client from web pages in a browser on its machine.
//!
//! A page can make the browser send requests to loopback. It can send a form without asking the
//! server first (cross-site request forgery), and it can read responses if its own name resolves to
//! loopback (DNS rebinding). A browser then states the name in `Host`, and the page in `Origin`.
//! Only JSON makes it ask the server first. Programs outside a browser send no `Origin`.

use ::http::header::{CONTENT_TYPE, HOST, ORIGIN};
use ::http::uri::Authority;
use ::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{HttpRequest, Problem};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses a name that is not the server's, on a server without tokens. A browser always sends a
/// name, so a request without one is none of a browser.
pub(crate) fn refuse_foreign_host(req: &HttpRequest<'_>) -> Result<(), Problem> {
    if !req.shared.credentials.load().is_open() {
        return Ok(());
    }
    let allowed = &req.shared.protocol.allowed_hosts;
    let of_target = req.parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let named = req.parts.headers.get_all(HOST).iter().map(HeaderValue::as_bytes);
    match named.chain(of_target).find(|name| !is_own_name(name, allowed)) {
        None => Ok(()),
        Some(foreign) => Err(forbidden(format!(
            "host: {:?} is neither a loopback name nor in `allowed_hosts`, which a server without \
             tokens requires",
            String::from_utf8_lossy(foreign)
        ))),
    }
}

fn is_own_name(name: &[u8], allowed: &[String]) -> bool {
    let Ok(authority) = Authority::try_from(name) else { return false };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let host = host.strip_suffix('.').unwrap_or(&host);
    let is_loopback = host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    is_loopback
        || host == "localhost"
        || host.ends_with(".localhost")
        || allowed.iter().any(|own| own == host)
}

/// Refuses a request of a web page that is not of this server.
pub(crate) fn refuse_foreign_origin(req: &HttpRequest<'_>) -> Result<(), Problem> {
    let headers = &req.parts.headers;
    if let Some(foreign) = headers.get_all(ORIGIN).iter().find(|origin| !is_same_origin(origin, headers)) {
        return Err(forbidden(format!(
            "origin: a web page of {:?} may not change this server",
            String::from_utf8_lossy(foreign.as_bytes())
        )));
    }
    let is_foreign = |site: &&HeaderValue| !matches!(site.as_bytes(), b"same-origin" | b"none");
    if let Some(foreign) = headers.get_all(SEC_FETCH_SITE).iter().find(is_foreign) {
        return Err(forbidden(format!(
            "sec-fetch-site: a web page that is {:?} may not change this server",
            String::from_utf8_lossy(foreign.as_bytes())
        )));
    }
    Ok(())
}

/// Whether a page has the name and the port of the request.
fn is_same_origin(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let of_scheme = |scheme: &[u8]| origin.as_bytes().strip_prefix(scheme);
    let page = of_scheme(b"http://").or_else(|| of_scheme(b"https://"));
    let host = headers.get(HOST).map(HeaderValue::as_bytes);
    page.zip(host).is_some_and(|(page, host)| page.eq_ignore_ascii_case(host))
}

/// Refuses a body that a web page may send without asking the server first.
pub(crate) fn refuse_body_type(req: &HttpRequest<'_>) -> Result<(), Problem> {
    if req.body.is_empty() || is_json(&req.parts.headers) {
        return Ok(());
    }
    let given = req.parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    Err(Problem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        format!(
            "content-type: {:?} is not application/json (curl: --json, or -H 'content-type: \
             application/json')",
            String::from_utf8_lossy(given)
        ),
    ))
}

fn is_json(headers: &HeaderMap) -> bool {
    let media = headers.get(CONTENT_TYPE).and_then(|media| media.to_str().ok()).unwrap_or_default();
    let essence = media.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

fn forbidden(detail: String) -> Problem {
    Problem::new(StatusCode::FORBIDDEN, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_allowed_names_are_its_own() {
        let allowed = ["gate.example".to_owned()];
        for own in [
            "localhost",
            "LOCALHOST:8090",
            "a.localhost",
            "127.0.0.1:8090",
            "127.9.9.9",
            "[::1]:8090",
            "[::1]",
            "gate.example",
            "Gate.Example.:1",
        ] {
            assert!(is_own_name(own.as_bytes(), &allowed), "{own}");
        }
        for foreign in [
            "",
            "evil.example",
            "evil.example:8090",
            "localhost.evil.example",
            "10.0.0.1:8090",
            "0.0.0.0",
            "a.gate.example",
            "[::2]",
            "127.0.0.1.evil.example",
            "notlocalhost",
            "a b",
            "\u{e9}",
        ] {
            assert!(!is_own_name(foreign.as_bytes(), &allowed), "{foreign}");
        }
    }

    #[test]
    fn origin_is_the_name_and_port_of_the_request() {
        let is_same = |origin: &'static str, host: &'static str| {
            let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))]);
            is_same_origin(&HeaderValue::from_static(origin), &headers)
        };
        assert!(is_same("http://localhost:8090", "localhost:8090"));
        assert!(is_same("https://Gate.example", "gate.example"));
        for foreign in ["null", "http://localhost:3000", "http://localhost", "http://evil.example", ""] {
            assert!(!is_same(foreign, "localhost:8090"), "{foreign}");
        }
    }
}
