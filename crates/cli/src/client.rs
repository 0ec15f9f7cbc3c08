//! HTTP client for the admin API of a running server.

use std::path::Path;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::Value;
use ureq::http::{Response, Uri};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, RequestBuilder, Timeout};

use crate::{Failure, environment, tls_failure};

/// Default address of a server's admin listener.
const LOCAL_SERVER: &str = "http://127.0.0.1:8090";

/// Timeout of a connection. Longer: more patience with a slow network; shorter: an earlier error if
/// the server is down.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// Timeout for a complete response. The server compiles a change with all rules, and a client that
/// gives up does not learn the outcome. Longer: allows for a million rules; shorter: detects a hung
/// server sooner.
const ANSWER_TIME_MAX: Duration = Duration::from_mins(1);

/// The beginning of a server's answer for an unknown path.
const NOTHING_AT: &str = "there is nothing at ";

/// Maximum size of a response, bytes: far above any response of the server.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// The largest certificate file.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// The flags of every command that calls a server.
pub(crate) fn args() -> Vec<Arg> {
    vec![
        Arg::new("server")
            .long("server")
            .value_name("ADDRESS")
            .env(environment::SERVER)
            .default_value(LOCAL_SERVER)
            .help("Admin listener of the server: HOST:PORT, http://HOST:PORT or https://HOST:PORT"),
        token_arg(),
        file_arg("ca", "CA certificate (PEM) of an https:// server, instead of the public ones"),
        file_arg("client_cert", "Certificate chain (PEM), for servers that require one")
            .requires("client_key"),
        file_arg("client_key", "Private key (PEM) of the client certificate").requires("client_cert"),
        json_arg(),
    ]
}

/// The flag for a token. Its value is never shown, not even as a default in a help text.
pub(crate) fn token_arg() -> Arg {
    Arg::new("token")
        .long("token")
        .value_name("TOKEN")
        .env(environment::TOKEN)
        .hide_env_values(true)
        .help("Token of the server; prefer the variable, because other users can read arguments")
}

/// The flag for output that programs read.
pub(crate) fn json_arg() -> Arg {
    Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON instead of text")
}

/// A flag with a value.
pub(crate) fn text_arg(id: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name(value).help(help)
}

fn file_arg(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id.replace('_', "-")).value_name("FILE").help(help)
}

/// A server, and the credential for it.
pub(crate) struct Client {
    agent: Agent,
    server: String,
    token: Option<String>,
}

/// A server's response.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl Client {
    /// The server that the flags name.
    pub(crate) fn new(matches: &ArgMatches) -> Result<Self, Failure> {
        let server = matches.get_one::<String>("server").map_or(LOCAL_SERVER, String::as_str);
        let server = base_url(server)?;
        let config = Agent::config_builder()
            // The body of an error response has more detail than its status.
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIME_MAX))
            .timeout_global(Some(ANSWER_TIME_MAX))
            .max_redirects(0)
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls(matches)?)
            .build();
        let token = matches.get_one::<String>("token").filter(|token| !token.is_empty()).cloned();
        Ok(Self { agent: config.into(), server, token })
    }

    /// Posts JSON and waits for the response.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Answer, Failure> {
        let url = format!("{}{path}", self.server);
        let sent = self.with_token(self.agent.post(&url)).send_json(body);
        self.read(&url, sent)
    }

    /// Gets a path with parameters and waits for the response.
    pub(crate) fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Answer, Failure> {
        let url = format!("{}{path}", self.server);
        let sent = self.with_token(self.agent.get(&url).query_pairs(query.iter().copied())).call();
        self.read(&url, sent)
    }

    /// Deletes a path and waits for the response.
    pub(crate) fn delete(&self, path: &str) -> Result<Answer, Failure> {
        let url = format!("{}{path}", self.server);
        let sent = self.with_token(self.agent.delete(&url)).call();
        self.read(&url, sent)
    }

    fn with_token<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    fn read(&self, url: &str, sent: Result<Response<Body>, ureq::Error>) -> Result<Answer, Failure> {
        let mut response = sent.map_err(|error| self.not_answered(&error))?;
        let status = response.status().as_u16();
        let text = response
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_string()
            .map_err(|error| self.not_answered(&error))?;
        let body = serde_json::from_str(&text).map_err(|_| {
            Failure::failed(format!(
                "{url}: the response with status {status} is not JSON: is it the admin listener?"
            ))
        })?;
        Ok(Answer { status, body })
    }

    fn not_answered(&self, error: &ureq::Error) -> Failure {
        let server = &self.server;
        if let Some(problem) = tls_failure::describe(error) {
            return Failure::unreachable(format!("{server}: {problem}"));
        }
        match error {
            ureq::Error::Http(_) => {
                Failure::usage("token: a header field cannot carry its characters: use printable ASCII")
            }
            ureq::Error::HostNotFound => Failure::unreachable(format!(
                "{server}: the host name has no address (--server, TIDEGATE_SERVER)"
            )),
            ureq::Error::Timeout(Timeout::Connect) => {
                Failure::unreachable(format!("{server}: no connection within {CONNECT_TIME_MAX:?}"))
            }
            ureq::Error::Timeout(_) => {
                Failure::unreachable(format!("{server}: no response within {ANSWER_TIME_MAX:?}"))
            }
            ureq::Error::Protocol(error) => Failure::unreachable(format!(
                "{server}: the response is not HTTP ({error}): if the server uses TLS, use https://"
            )),
            ureq::Error::Io(error) => self.not_reached(error),
            error => self.not_reached(error),
        }
    }

    fn not_reached(&self, error: &dyn std::fmt::Display) -> Failure {
        let server = &self.server;
        Failure::unreachable(format!(
            "{server}: {error}: is the server running, and is this its address? (--server, \
             TIDEGATE_SERVER)"
        ))
    }
}

impl Answer {
    /// Returns the response if its status is one of `good`. Otherwise returns the server's error.
    pub(crate) fn decided(self, good: &[u16]) -> Result<Self, Failure> {
        if good.contains(&self.status) {
            return Ok(self);
        }
        let detail =
            self.body.get("detail").and_then(Value::as_str).unwrap_or("the response has no `detail`");
        let hint = match self.status {
            401 | 403 => " (--token, TIDEGATE_TOKEN)",
            404 if detail.starts_with(NOTHING_AT) => ": is this the admin listener (default 8090)?",
            _ => "",
        };
        let words = format!("the server answered {}: {detail}{hint}", self.status);
        Err(if self.status == 400 { Failure::usage(words) } else { Failure::failed(words) })
    }
}

/// A text as a part of a path.
pub(crate) fn segment(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// The URL of a server, to which paths are appended. An address without a scheme has a port, and
/// means `http://`.
fn base_url(server: &str) -> Result<String, Failure> {
    let server = server.trim_end_matches('/');
    let has_scheme = server.contains("://");
    let url = if has_scheme { server.to_owned() } else { format!("http://{server}") };
    let is_base = |uri: Uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
            && (has_scheme || uri.port_u16().is_some())
            && uri.query().is_none()
    };
    if url.parse().is_ok_and(is_base) {
        return Ok(url);
    }
    Err(Failure::usage(format!(
        "server: {server:?} is not an address such as localhost:8090, {LOCAL_SERVER} or \
         https://gate.example:8090"
    )))
}

fn tls(matches: &ArgMatches) -> Result<TlsConfig, Failure> {
    let file = |id: &str| matches.get_one::<String>(id).map(Path::new);
    let mut tls = TlsConfig::builder();
    if let Some(path) = file("ca") {
        tls = tls.root_certs(RootCerts::new_with_certs(&certificates("ca", path)?));
    }
    if let (Some(cert), Some(key)) = (file("client_cert"), file("client_key")) {
        let chain = certificates("client-cert", cert)?;
        let key = PrivateKey::from_pem(&read("client-key", key)?)
            .map_err(|error| unfit("client-key", key, &error))?;
        tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
    }
    Ok(tls.build())
}

fn certificates(flag: &str, path: &Path) -> Result<Vec<Certificate<'static>>, Failure> {
    let mut certificates = Vec::new();
    for item in parse_pem(&read(flag, path)?) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| unfit(flag, path, &error))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        Err(unfit(flag, path, &"the file has no certificate"))
    } else {
        Ok(certificates)
    }
}

fn read(flag: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    let length = std::fs::metadata(path).map_err(|error| unfit(flag, path, &error))?.len();
    if length > PEM_BYTES_MAX {
        return Err(unfit(flag, path, &format!("{length} bytes is outside 0 to {PEM_BYTES_MAX}")));
    }
    std::fs::read(path).map_err(|error| unfit(flag, path, &error))
}

fn unfit(flag: &str, path: &Path, problem: &dyn std::fmt::Display) -> Failure {
    Failure::usage(format!("{flag}: {}: {problem}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_listener_is_suspected_where_a_path_is_missing() {
        let words = |detail: &str| {
            let answer = Answer { status: 404, body: serde_json::json!({ "detail": detail }) };
            answer.decided(&[200]).err().map(|failure| failure.words)
        };
        assert_eq!(
            words("there is nothing at /v1/status").as_deref(),
            Some(
                "the server answered 404: there is nothing at /v1/status: is this the admin listener \
                 (default 8090)?"
            )
        );
        assert_eq!(
            words("there is no change 7").as_deref(),
            Some("the server answered 404: there is no change 7")
        );
    }

    #[test]
    fn an_address_may_omit_the_scheme() {
        for (server, url) in [
            ("localhost:18080", "http://localhost:18080"),
            ("127.0.0.1:8090/", "http://127.0.0.1:8090"),
            ("[::1]:8090", "http://[::1]:8090"),
            ("http://localhost:18080/", "http://localhost:18080"),
            ("https://gate.example", "https://gate.example"),
            ("https://gate.example/tidegate/", "https://gate.example/tidegate"),
        ] {
            assert_eq!(base_url(server).ok().as_deref(), Some(url), "{server}");
        }
        for server in [
            "",
            "localhost",
            "::1:8090",
            ":8090",
            "ftp://localhost:21",
            "http://",
            "localhost:80000",
            "a b:1",
        ] {
            let failure = base_url(server).err().unwrap_or_else(|| panic!("{server} is refused"));
            assert!(failure.words.starts_with("server: "), "{}", failure.words);
        }
    }
}
