//! Questions over HTTP, one at a time for each connection.

use std::io;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use super::load::Answers;
use super::plan::{Plan, Surface};

/// Maximum size of a response, bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

pub(super) struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
}

impl HttpConnection {
    pub(super) async fn open(plan: &Plan) -> io::Result<Self> {
        let stream = TcpStream::connect(plan.address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        // The task ends with the sender or with the connection. In the second case the sender
        // returns an error.
        tokio::task::spawn_local(connection);
        Ok(Self { sender })
    }

    pub(super) async fn ask(&mut self, plan: &Plan, keys: &[u64]) -> io::Result<Answers> {
        let mut answers = Answers::default();
        for key in keys {
            self.ask_one(plan, *key, &mut answers).await?;
        }
        Ok(answers)
    }

    async fn ask_one(&mut self, plan: &Plan, key: u64, answers: &mut Answers) -> io::Result<()> {
        self.sender.ready().await.map_err(io::Error::other)?;
        let response = self.sender.send_request(question(plan, key)?).await.map_err(io::Error::other)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        match decision(plan.surface, status, &body) {
            Ok(allowed) => answers.decided(allowed),
            Err(words) => answers.failed(&words),
        }
        Ok(())
    }
}

fn question(plan: &Plan, key: u64) -> io::Result<Request<Full<Bytes>>> {
    let (path, body) = match plan.surface {
        Surface::Check => ("/v1/check", format!(r#"{{"dimensions":{{"user":"k{key}"}}}}"#)),
        Surface::Http | Surface::Resp => {
            let limit = plan.limit;
            let body =
                format!(r#"{{"namespace":"bench","identifier":"k{key}","limit":{limit},"duration":60000}}"#);
            ("/v2/ratelimit.limit", body)
        }
    };
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header(HOST, plan.address.to_string())
        .header(CONTENT_TYPE, "application/json");
    if let Some(token) = &plan.token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    request.body(Full::from(body)).map_err(io::Error::other)
}

fn decision(surface: Surface, status: StatusCode, body: &[u8]) -> Result<bool, String> {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let allowed = match surface {
        Surface::Check => answer["decision"].as_str().map(|decision| decision == "allow"),
        Surface::Http | Surface::Resp => answer["data"]["success"].as_bool(),
    };
    if let (StatusCode::OK, Some(allowed)) = (status, allowed) {
        return Ok(allowed);
    }
    let detail = answer["detail"]
        .as_str()
        .or(answer["error"]["detail"].as_str())
        .unwrap_or("the response has no decision");
    Err(format!("the server answered {}: {detail}", status.as_u16()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_decision_or_an_error() {
        let direct = |body: &str| decision(Surface::Http, StatusCode::OK, body.as_bytes());
        assert_eq!(direct(r#"{"data":{"success":true}}"#), Ok(true));
        assert_eq!(direct(r#"{"data":{"success":false}}"#), Ok(false));
        assert!(direct("{}").is_err() && direct("<html>").is_err());
        let check = |body: &str| decision(Surface::Check, StatusCode::OK, body.as_bytes());
        assert_eq!(check(r#"{"decision":"deny"}"#), Ok(false));
        let refused = decision(Surface::Check, StatusCode::UNAUTHORIZED, br#"{"detail":"no token"}"#);
        assert_eq!(refused, Err("the server answered 401: no token".to_owned()));
    }
}
