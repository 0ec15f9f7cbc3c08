//! Tokens that the store knows open servers too.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::Value;
use tidegate_rules::change::ChangeState;
use tidegate_rules::store::Credential;
use tidegate_server::auth::TokenHash;
use tidegate_testkit::{START_TIME_MAX, wait_until};

use crate::fixture::{ControlFixture, by, serve};
use crate::support::raw::{begin, finish, request, send};
use crate::support::{token_entry, write};

#[test]
fn a_token_of_the_store_opens_a_server_until_it_is_revoked() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let config = write(folder.path(), "tidegate.toml", &token_entry("configured", "", "viewer"));
    let server = serve(&url, folder.path(), &["--config", &config]);
    let status = |token: &str| {
        let bearer = format!("Bearer {token}");
        send(server.address("admin"), &request("GET", "/metrics", &[("authorization", &bearer)], None)).status
    };
    assert_eq!((status("configured"), status("kept")), (200, 401));

    let hash = TokenHash::of(b"kept").to_string().replace("sha256:", "");
    let credential = |role: &str| Credential {
        hash: hash.clone(),
        name: "kept".to_owned(),
        tenant: String::new(),
        role: role.to_owned(),
        created_ms: by().now_ms,
        expires_ms: None,
    };
    let put = |role| {
        fixture.runtime.block_on(fixture.store.put_credential(&credential(role), by())).expect("put");
    };
    let wait = |expected| wait_until("the token's role", START_TIME_MAX, || status("kept") == expected);
    put("approver");
    wait(200);
    put("client");
    wait(403);
    put("king");
    wait(401);
    put("viewer");
    wait(200);
    fixture.runtime.block_on(fixture.store.revoke_credential(&hash, by())).expect("revoked");
    wait(401);
    assert_eq!(status("configured"), 200);
}

/// Whether the server answers `Expect: 100-continue` with 100.
fn receives_continue(stream: &mut TcpStream) -> bool {
    let mut said = [0; b"HTTP/1.1 100 Continue\r\n\r\n".len()];
    stream.set_read_timeout(Some(START_TIME_MAX)).expect("a time");
    stream.read_exact(&mut said).expect("an answer");
    said.starts_with(b"HTTP/1.1 100")
}

/// A request must not act for a token that is revoked before the request body arrives.
#[test]
fn a_token_that_is_revoked_while_its_request_is_under_way_approves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let config = write(folder.path(), "tidegate.toml", &token_entry("configured", "", "viewer"));
    let server = serve(&url, folder.path(), &["--config", &config]);
    let credential = Credential {
        hash: TokenHash::of(b"kept").to_string().replace("sha256:", ""),
        name: "kept".to_owned(),
        tenant: String::new(),
        role: "approver".to_owned(),
        created_ms: by().now_ms,
        expires_ms: None,
    };
    fixture.runtime.block_on(fixture.store.put_credential(&credential, by())).expect("put");
    let change = fixture.waiting("kept");
    let fields = [
        ("authorization", "Bearer kept"),
        ("expect", "100-continue"),
        ("content-length", "2"),
        ("content-type", "application/json"),
    ];
    let status = || send(server.address("admin"), &request("GET", "/metrics", &[fields[0]], None)).status;
    wait_until("the token to open it", START_TIME_MAX, || status() == 200);

    let target = format!("/v1/rules/changes/{change}/approve");
    let mut stream = begin(server.address("admin"), &request("POST", &target, &fields, None));
    assert!(receives_continue(&mut stream), "who asks is known, and the body is awaited");
    fixture.runtime.block_on(fixture.store.revoke_credential(&credential.hash, by())).expect("revoked");
    wait_until("the token to end", START_TIME_MAX, || status() == 401);
    stream.write_all(b"{}").expect("sends");
    let reply = finish(stream);
    assert_eq!(reply.status, 401, "{}", reply.body);
    assert_eq!(fixture.state(change), ChangeState::Waiting);
}

#[test]
fn author_cannot_approve_with_a_second_credential() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let config = write(folder.path(), "tidegate.toml", &token_entry("root", "", "admin"));
    let server = serve(&url, folder.path(), &["--config", &config]);
    let post = |token: &str, target: &str, body: &str| {
        let bearer = format!("Bearer {token}");
        send(server.address("admin"), &request("POST", target, &[("authorization", &bearer)], Some(body)))
    };
    let made = post("root", "/v1/credentials", r#"{"name":"other","role":"approver"}"#);
    assert_eq!(made.status, 200, "{}", made.body);
    let made: Value = serde_json::from_str(&made.body).expect("JSON");
    let token = made["token"].as_str().expect("told once");
    for (author, why) in
        [("token:root", "the credentials of approver and author are related"), ("other", "by its author")]
    {
        let change = fixture.waiting(author);
        let reply = post(token, &format!("/v1/rules/changes/{change}/approve"), "{}");
        assert_eq!(reply.status, 403, "{}", reply.body);
        assert!(reply.body.contains(why), "{}", reply.body);
        assert_eq!(fixture.state(change), ChangeState::Waiting);
    }
    let change = fixture.waiting("somebody else");
    let reply = post(token, &format!("/v1/rules/changes/{change}/approve"), "{}");
    assert_eq!(reply.status, 200, "{}", reply.body);
}

/// Sends a command, and returns the first line of the reply.
fn tell(stream: &mut TcpStream, command: &str) -> String {
    stream.write_all(format!("{command}\r\n").as_bytes()).expect("sends");
    let (mut line, mut byte) = (String::new(), [0]);
    while !line.ends_with("\r\n") {
        stream.read_exact(&mut byte).expect("answers");
        line.push(char::from(byte[0]));
    }
    line.trim_end().to_owned()
}

#[test]
fn an_open_connection_ends_with_its_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let config = write(folder.path(), "tidegate.toml", &token_entry("configured", "", "viewer"));
    let server = serve(&url, folder.path(), &["--config", &config]);
    let credential = |name: &str, expires_ms| Credential {
        hash: TokenHash::of(name.as_bytes()).to_string().replace("sha256:", ""),
        name: name.to_owned(),
        tenant: String::new(),
        role: "client".to_owned(),
        created_ms: by().now_ms,
        expires_ms,
    };
    let put = |credential: &Credential| {
        fixture.runtime.block_on(fixture.store.put_credential(credential, by())).expect("put");
    };
    let connect = |token: &str| {
        let mut stream = TcpStream::connect(server.address("resp")).expect("connects");
        wait_until("the token to open it", START_TIME_MAX, || {
            tell(&mut stream, &format!("AUTH {token}")) == "+OK"
        });
        stream
    };
    let revoked = credential("revoked", None);
    put(&revoked);
    put(&credential("ending", None));
    let mut connections = ["configured", "revoked", "ending"].map(connect);
    for stream in &mut connections {
        assert_eq!(tell(stream, "PING"), "+PONG");
    }
    fixture.runtime.block_on(fixture.store.revoke_credential(&revoked.hash, by())).expect("revoked");
    put(&credential("ending", Some(by().now_ms + 1_000)));
    for stream in &mut connections[1..] {
        wait_until("the token to end", START_TIME_MAX, || tell(stream, "PING").starts_with("-NOAUTH"));
    }
    assert_eq!(tell(&mut connections[0], "PING"), "+PONG", "whoever else there is, stays");
    assert_eq!(tell(&mut connections[1], "AUTH configured"), "+OK", "another token opens it again");
    assert_eq!(tell(&mut connections[1], "PING"), "+PONG");
}
