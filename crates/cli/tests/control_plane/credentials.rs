//! Tokens that the store knows open servers too.

use tidegate_rules::store::Credential;
use tidegate_server::auth::TokenHash;
use tidegate_testkit::{START_TIME_MAX, wait_until};

use crate::ground::{Ground, by, serve};
use crate::support::raw::{request, send};
use crate::support::{token_entry, write};

#[test]
fn a_token_of_the_store_opens_a_server_until_it_is_revoked() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let ground = Ground::open(&url);
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
        ground.runtime.block_on(ground.store.put_credential(&credential(role), by())).expect("put");
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
    ground.runtime.block_on(ground.store.revoke_credential(&hash, by())).expect("revoked");
    wait(401);
    assert_eq!(status("configured"), 200);
}
