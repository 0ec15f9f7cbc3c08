//! HTTP bodies as they might come, for fuzzing.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;

use ::http::Request;
use bytes::Bytes;

use super::{Asked, Reply, route_all};
use crate::config::Config;
use crate::shared::Shared;

/// Where a body is sent: all of them read it in their own way.
const PATHS: [&str; 7] = [
    "/v1/check",
    "/v2/ratelimit.limit",
    "/v2/ratelimit.multiLimit",
    "/v2/ratelimit.setOverride",
    "/v2/ratelimit.getOverride",
    "/v2/ratelimit.deleteOverride",
    "/v2/ratelimit.listOverrides",
];

/// Sends a body to every path of a server that keeps nothing. Gives the status of each answer that did not have to
/// wait for the store.
pub fn http_body(bytes: &[u8]) -> Vec<u16> {
    static SHARED: OnceLock<Option<Shared>> = OnceLock::new();
    let Some(shared) = SHARED.get_or_init(server) else { return Vec::new() };
    PATHS.iter().filter_map(|path| status(shared, path, Bytes::copy_from_slice(bytes))).collect()
}

fn server() -> Option<Shared> {
    let given =
        HashMap::from([("data_dir".to_owned(), "none".to_owned()), ("memory".to_owned(), "1MB".to_owned())]);
    Shared::new(&mut Config::read(&given, None).ok()?).ok()
}

fn status(shared: &Shared, path: &str, body: Bytes) -> Option<u16> {
    let (parts, ()) = Request::post(path).body(()).ok()?.into_parts();
    let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    match route_all(&Asked { shared, peer, parts, body }) {
        Reply::Ready(answer) => Some(answer.status().as_u16()),
        Reply::Later(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_path_answers_a_body() {
        let limit = br#"{"namespace":"n","identifier":"a","limit":1,"duration":1000}"#;
        let statuses = http_body(limit);
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
    }

    proptest! {
        /// Nearly right requests, which get furthest.
        #[test]
        fn no_body_breaks_anything(
            fields in prop::collection::vec(
                ("namespace|identifier|limit|duration|cost|cursor|x", "[0-9]{1,22}|-1|1e9|null|\"[*a>]{0,3}\"|\\[\\]|\\{\\}|true"),
                0..6,
            ),
            cut in any::<prop::sample::Index>(),
            is_cut: bool,
        ) {
            let members: Vec<String> =
                fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
            let object = format!("{{{}}}", members.join(","));
            for text in [object.clone(), format!("[{object},{object}]")] {
                let most = if is_cut { cut.index(text.len()) } else { text.len() };
                let statuses = http_body(&text.as_bytes()[..most]);
                prop_assert!(statuses.iter().all(|status| matches!(status, 200 | 400 | 404)), "{text} {statuses:?}");
            }
        }
    }
}
