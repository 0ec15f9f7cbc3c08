//! Asks a running server over HTTP.

use std::path::Path;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::Value;
use ureq::http::{Response, Uri};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, RequestBuilder, Timeout};

use crate::{Failure, environment};

/// Where a server's admin listener is when nothing else was said.
const LOCAL_SERVER: &str = "http://127.0.0.1:8090";

/// How long a server may take to be there. Longer: patience with a slow network; shorter: sooner to know that it is down.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// How long a server may take for all of an answer. A change is compiled with all the rules there are, and a person who gave
/// up would not know what became of it. Longer: patience with a million rules; shorter: sooner to know of one that hangs.
const ANSWER_TIME_MAX: Duration = Duration::from_mins(1);

/// The largest answer: far above any that a server of ours gives.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// The largest certificate file.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// The flags of every command that asks a server.
pub(crate) fn args() -> Vec<Arg> {
    vec![
        Arg::new("server")
            .long("server")
            .value_name("URL")
            .env(environment::SERVER)
            .default_value(LOCAL_SERVER)
            .help("The server to ask"),
        token_arg(),
        file_arg("ca", "Authority (PEM) of the server's certificate, instead of the well-known ones"),
        file_arg("client_cert", "Certificate chain (PEM) to show to a server that asks for one")
            .requires("client_key"),
        file_arg("client_key", "Private key (PEM) of the certificate").requires("client_cert"),
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
        .help("Token, where the server has any; better in the variable, where other users do not see it")
}

/// The flag for answers that programs read.
pub(crate) fn json_arg() -> Arg {
    Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON")
}

fn file_arg(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id.replace('_', "-")).value_name("FILE").help(help)
}

/// A server, and what opens it.
pub(crate) struct Client {
    agent: Agent,
    server: String,
    token: Option<String>,
}

/// What a server said.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl Client {
    /// The server that the flags name.
    pub(crate) fn new(matches: &ArgMatches) -> Result<Self, Failure> {
        let server = matches.get_one::<String>("server").map_or(LOCAL_SERVER, String::as_str);
        let server = server.trim_end_matches('/').to_owned();
        check_url(&server)?;
        let config = Agent::config_builder()
            // What a server says about an error is worth more than its number.
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

    /// Posts JSON, and waits for the answer.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Answer, Failure> {
        let url = format!("{}{path}", self.server);
        let sent = self.with_token(self.agent.post(&url)).send_json(body);
        self.read(&url, sent)
    }

    /// Gets what a path and its parameters name, and waits for it.
    pub(crate) fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Answer, Failure> {
        let url = format!("{}{path}", self.server);
        let sent = self.with_token(self.agent.get(&url).query_pairs(query.iter().copied())).call();
        self.read(&url, sent)
    }

    /// Deletes what a path names, and waits until it is gone.
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
        let body = serde_json::from_str(&text)
            .map_err(|_| Failure::failed(format!("{url}: answered {status}, and not with JSON")))?;
        Ok(Answer { status, body })
    }

    fn not_answered(&self, error: &ureq::Error) -> Failure {
        let server = &self.server;
        match error {
            ureq::Error::Http(_) => {
                Failure::usage("token: has characters that a header cannot carry".to_owned())
            }
            ureq::Error::Timeout(Timeout::Connect) => {
                Failure::unreachable(format!("{server}: not there within {CONNECT_TIME_MAX:?}"))
            }
            ureq::Error::Timeout(_) => {
                Failure::unreachable(format!("{server}: no answer within {ANSWER_TIME_MAX:?}"))
            }
            error => Failure::unreachable(format!(
                "{server}: {error}: is the server running, and is this its address? (--server, TIDEGATE_SERVER)"
            )),
        }
    }
}

impl Answer {
    /// The answer of a request that worked; otherwise what the server says was wrong.
    pub(crate) fn decided(self, good: &[u16]) -> Result<Self, Failure> {
        if good.contains(&self.status) {
            return Ok(self);
        }
        let detail = self.body.get("detail").and_then(Value::as_str).unwrap_or("no reason given");
        let hint = match self.status {
            401 | 403 => " (--token, TIDEGATE_TOKEN)",
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

fn check_url(server: &str) -> Result<(), Failure> {
    let parsed: Option<Uri> = server.parse().ok();
    let good = parsed.is_some_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some() && uri.query().is_none()
    });
    if good {
        return Ok(());
    }
    Err(Failure::usage(format!("server: {server:?} is not a URL such as {LOCAL_SERVER}")))
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
    if certificates.is_empty() { Err(unfit(flag, path, &"no certificate in it")) } else { Ok(certificates) }
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
