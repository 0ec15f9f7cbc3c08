//! The client's address behind proxies.
//!
//! Each proxy appends the address of its own client on the right of `X-Forwarded-For`. So the list
//! is read from the right: first the peer of the connection, then the entry that it wrote, then the
//! entry of the proxy before it. The walk goes on as long as the writer of an entry is trusted. The
//! first address that is not a trusted proxy's is the client's. The entries left of it come from
//! that client and can be forged, so they are not read.

use std::net::{IpAddr, Ipv6Addr};

use ::http::header::FORWARDED;
use ::http::{HeaderMap, HeaderName};
use ipnet::IpNet;
use tidegate_rules::canonical;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Returns the client's address: the first from the right that is not in `trusted`, or the leftmost
/// if all are.
///
/// An entry that is not an address ends the walk at the hop before it. A trusted proxy wrote that
/// entry, but the writer of the entries left of it is unknown.
pub(crate) fn client(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> IpAddr {
    let mut client = canonical(peer);
    let mut hops = hops(headers);
    while is_trusted(client, trusted) {
        let Some(Some(hop)) = hops.next() else { break };
        client = hop;
    }
    client
}

/// Whether `address` belongs to a trusted proxy.
pub(crate) fn is_trusted(address: IpAddr, trusted: &[IpNet]) -> bool {
    let address = canonical(address);
    trusted.iter().any(|network| network.contains(&address))
}

/// Whether the request has a header field that lists proxies.
pub(crate) fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.contains_key(X_FORWARDED_FOR) || headers.contains_key(FORWARDED)
}

/// Returns the addresses from the right, `None` for an unreadable entry. `Forwarded` is read only
/// without `X-Forwarded-For`: proxies that know the newer field may pass on an older one, but not
/// the other way round.
fn hops<'h>(headers: &'h HeaderMap) -> Box<dyn Iterator<Item = Option<IpAddr>> + 'h> {
    let lines = |name| headers.get_all(name).iter().rev().map(|line| line.to_str().unwrap_or(UNREADABLE));
    if headers.contains_key(X_FORWARDED_FOR) {
        Box::new(lines(X_FORWARDED_FOR).flat_map(|line| line.rsplit(',').map(node)))
    } else {
        Box::new(lines(FORWARDED).flat_map(|line| from_right(line).map(forwarded_for)))
    }
}

/// Characters that may surround an entry.
const BLANKS: [char; 2] = [' ', '\t'];

/// Replaces a header line that is not text. It does not parse as an address.
const UNREADABLE: &str = "?";

/// Parses an address of a list: bare, in brackets, with a port or with a zone.
fn node(entry: &str) -> Option<IpAddr> {
    let entry = entry.trim_matches(BLANKS);
    if let Some(bracketed) = entry.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        let port_makes_sense = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        return v6(address).filter(|_| port_makes_sense);
    }
    match entry.split_once(':') {
        None => entry.parse().ok(),
        Some((address, port)) if !port.contains(':') => {
            let address = address.parse().ok().map(IpAddr::V4);
            address.filter(|_| is_port(port))
        }
        Some(_) => v6(entry),
    }
}

/// Parses an IPv6 address. A zone is dropped: it names an interface of the machine that wrote it.
fn v6(text: &str) -> Option<IpAddr> {
    let (address, zone) = text.split_once('%').unwrap_or((text, "0"));
    let address: Ipv6Addr = address.parse().ok()?;
    let is_zone =
        !zone.is_empty() && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte));
    is_zone.then(|| canonical(address.into()))
}

/// A port, or a name that hides one (RFC 7239, section 6.3).
fn is_port(text: &str) -> bool {
    let hidden = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    text.strip_prefix('_').map_or_else(
        || (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()),
        hidden,
    )
}

/// Returns the elements of a `Forwarded` line from the right. Quotes are paired from the right too:
/// a quote that a client left open cannot hide a proxy's entry after it.
fn from_right(line: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest?;
        let mut quoted = false;
        let comma = line.bytes().rposition(|byte| {
            quoted ^= byte == b'"';
            byte == b',' && !quoted
        });
        rest = comma.map(|at| &line[..at]);
        Some(comma.map_or(line, |at| &line[at + 1..]))
    })
}

/// The address of a `Forwarded` element such as `for="[2001:db8::1]:4711";proto=https`.
fn forwarded_for(element: &str) -> Option<IpAddr> {
    let mut values = element.split(';').filter_map(value_of_for);
    // Twice in one element makes no sense.
    let (only, None) = (values.next()?, values.next()) else { return None };
    let unquoted = only.strip_prefix('"').map_or(Some(only), |rest| rest.strip_suffix('"'));
    unquoted.and_then(node)
}

fn value_of_for(pair: &str) -> Option<&str> {
    let (name, value) = pair.split_once('=')?;
    let is_for = name.trim_matches(BLANKS).eq_ignore_ascii_case("for");
    is_for.then(|| value.trim_matches(BLANKS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::http::HeaderValue;
    use proptest::prelude::*;

    const PROXIES: [&str; 3] = ["127.0.0.0/8", "10.0.0.0/8", "2001:db8:ffff::/48"];

    fn trusted() -> Vec<IpNet> {
        PROXIES.iter().map(|network| network.parse().expect("a network")).collect()
    }

    fn client_of(peer: &str, lines: &[(&'static str, &str)]) -> String {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
        }
        client(peer.parse().expect("an address"), &headers, &trusted()).to_string()
    }

    #[test]
    fn the_client_is_the_first_from_the_right_that_is_no_proxy() {
        let cases: [(&str, &str, &str); 27] = [
            // An untrusted peer cannot name another client.
            ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
            ("127.0.0.1", "198.51.100.7", "198.51.100.7"),
            // The client forged the left entries.
            ("127.0.0.1", "1.2.3.4, 198.51.100.7", "198.51.100.7"),
            ("127.0.0.1", "1.2.3.4, 10.9.9.9, 198.51.100.7", "198.51.100.7"),
            ("127.0.0.1", "127.0.0.1, 198.51.100.7, 10.0.0.2", "198.51.100.7"),
            ("127.0.0.1", "unknown, 198.51.100.7, 10.0.0.2", "198.51.100.7"),
            // Only proxies: the one farthest away.
            ("127.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
            // An unreadable entry ends the walk at the hop before it.
            ("127.0.0.1", "198.51.100.7, unknown", "127.0.0.1"),
            ("127.0.0.1", "198.51.100.7, _hidden, 10.0.0.2", "10.0.0.2"),
            ("127.0.0.1", "198.51.100.7, , 10.0.0.2", "10.0.0.2"),
            ("127.0.0.1", "198.51.100.7,", "127.0.0.1"),
            ("127.0.0.1", "", "127.0.0.1"),
            ("127.0.0.1", "198.51.100.007", "127.0.0.1"),
            ("127.0.0.1", "198.51.100.7 10.0.0.2", "127.0.0.1"),
            // Ports, brackets, zones.
            ("127.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
            ("127.0.0.1", "198.51.100.7:", "127.0.0.1"),
            ("127.0.0.1", "198.51.100.7:port", "127.0.0.1"),
            ("127.0.0.1", "2001:db8::1", "2001:db8::1"),
            ("127.0.0.1", "[2001:db8::1]", "2001:db8::1"),
            ("127.0.0.1", "[2001:db8::1]:4711", "2001:db8::1"),
            ("127.0.0.1", "[2001:db8::1", "127.0.0.1"),
            ("127.0.0.1", "[198.51.100.7]", "127.0.0.1"),
            ("127.0.0.1", "fe80::1%eth0", "fe80::1"),
            ("127.0.0.1", "fe80::1%", "127.0.0.1"),
            // IPv4 in the clothes of IPv6.
            ("::ffff:127.0.0.1", "::ffff:198.51.100.7", "198.51.100.7"),
            ("127.0.0.1", "198.51.100.7, ::ffff:10.0.0.2", "198.51.100.7"),
            ("2001:db8:ffff::1", "2001:db8::1, [2001:db8:ffff::2]:80", "2001:db8::1"),
        ];
        for (peer, value, expected) in cases {
            assert_eq!(client_of(peer, &[("x-forwarded-for", value)]), expected, "{peer} {value}");
        }
    }

    #[test]
    fn several_lines_are_one_list() {
        let lines = [("x-forwarded-for", "198.51.100.7"), ("x-forwarded-for", "10.0.0.3, 10.0.0.2")];
        assert_eq!(client_of("127.0.0.1", &lines), "198.51.100.7");
        let lines = [("x-forwarded-for", "1.2.3.4"), ("x-forwarded-for", "198.51.100.7")];
        assert_eq!(client_of("127.0.0.1", &lines), "198.51.100.7");
        assert_eq!(client_of("127.0.0.1", &[("x-forwarded-for", "198.51.100.7, \u{e9}")]), "127.0.0.1");
        assert_eq!(client_of("127.0.0.1", &[]), "127.0.0.1");
    }

    #[test]
    fn the_standard_field_is_read_where_the_common_one_is_absent() {
        let cases = [
            ("for=198.51.100.7", "198.51.100.7"),
            ("For=\"198.51.100.7:4711\"; proto=https;by=10.0.0.1", "198.51.100.7"),
            ("proto=http;for=\"[2001:db8::1]:4711\"", "2001:db8::1"),
            ("for=1.2.3.4, for=198.51.100.7, for=10.0.0.2", "198.51.100.7"),
            ("for=\"_gazonk\"", "127.0.0.1"),
            ("for=unknown", "127.0.0.1"),
            ("for=198.51.100.7, proto=https", "127.0.0.1"),
            ("for=198.51.100.7;for=198.51.100.8", "127.0.0.1"),
            ("for=\"198.51.100.7", "127.0.0.1"),
            ("for=\"198.51.100.7:_x\"", "198.51.100.7"),
            // A quote that the client left open does not hide the proxy's entry.
            ("for=\"1.2.3.4, for=198.51.100.7", "198.51.100.7"),
            ("for=\"1.2.3.4, for=\"198.51.100.7:80\"", "198.51.100.7"),
            ("for=\"a,b\", for=\"10.0.0.2\"", "10.0.0.2"),
        ];
        for (value, expected) in cases {
            assert_eq!(client_of("127.0.0.1", &[("forwarded", value)]), expected, "{value}");
        }
        let both = [("forwarded", "for=1.2.3.4"), ("x-forwarded-for", "198.51.100.7")];
        assert_eq!(client_of("127.0.0.1", &both), "198.51.100.7");
    }

    fn proxy() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("10.1.2.3".to_owned()),
            Just("[2001:db8:ffff::1]:80".to_owned()),
            Just("127.0.0.1".to_owned())
        ]
    }

    proptest! {
        #[test]
        fn spoofed_forwarded_for_does_not_change_the_client_address(
            made_up in "[ -~]{0,60}",
            client in any::<IpAddr>(),
            proxies in prop::collection::vec(proxy(), 0..5),
        ) {
            let client = canonical(client);
            prop_assume!(!is_trusted(client, &trusted()));
            let written = proxies.iter().fold(client.to_string(), |list, proxy| format!("{list}, {proxy}"));
            let spoofed = format!("{made_up},{written}");
            prop_assert_eq!(client_of("127.0.0.1", &[("x-forwarded-for", &spoofed)]), client.to_string());
            // In lines of their own it is the same.
            let lines = [("x-forwarded-for", made_up.as_str()), ("x-forwarded-for", &written)];
            prop_assert_eq!(client_of("127.0.0.1", &lines), client.to_string());
        }

        #[test]
        fn spoofed_forwarded_does_not_change_the_client_address(
            made_up in "[ -~]{0,60}",
            client in any::<IpAddr>(),
        ) {
            let client = canonical(client);
            prop_assume!(!is_trusted(client, &trusted()));
            let written = if client.is_ipv4() { client.to_string() } else { format!("\"[{client}]\"") };
            let spoofed = format!("{made_up},for={written}");
            prop_assert_eq!(client_of("127.0.0.1", &[("forwarded", &spoofed)]), client.to_string());
        }

        #[test]
        fn a_peer_that_is_not_trusted_speaks_for_itself(value in "[ -~]{0,80}", peer in any::<IpAddr>()) {
            prop_assume!(!is_trusted(peer, &trusted()));
            let lines = [("x-forwarded-for", value.as_str()), ("forwarded", &value)];
            prop_assert_eq!(client_of(&peer.to_string(), &lines), canonical(peer).to_string());
        }
    }
}
