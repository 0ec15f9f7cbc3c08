//! Networks, and the part of an address that identifies one client.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::pattern::Pattern;
use crate::rule::Condition;

/// Bits of an IPv6 address that identify one client: the owner of one address in such a network has
/// all 2^64 of them.
const CLIENT_BITS_V6: u8 = 64;
/// Bits before an IPv4 address that is written as an IPv6 one (`::ffff:192.0.2.7`).
const MAPPED_BITS: u8 = 96;

/// An IPv4 address that came as an IPv6 one, as it does on sockets that take both, is an IPv4
/// address.
pub fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// A network such as `10.0.0.0/8` or `2001:db8::/32`, or one address.
pub fn parse_network(text: &str) -> Result<IpNet, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(IpNet::from(canonical(address)));
    }
    let network: IpNet = text
        .parse()
        .map_err(|_| format!("{text:?} is neither an address nor a network such as \"10.0.0.0/8\""))?;
    if network.trunc() != network {
        // Either the address or the prefix length is a mistake, and the parser cannot know which.
        return Err(format!("{text:?} has bits behind its prefix; the network is \"{}\"", network.trunc()));
    }
    Ok(unmapped(network))
}

fn unmapped(network: IpNet) -> IpNet {
    let IpNet::V6(mapped) = network else { return network };
    let plain = mapped.addr().to_ipv4_mapped().zip(mapped.prefix_len().checked_sub(MAPPED_BITS));
    let plain = plain.and_then(|(address, bits)| Ipv4Net::new(address, bits).ok());
    plain.map_or(network, IpNet::V4)
}

/// The network by which a client is counted.
pub(crate) fn shared_prefix(address: IpAddr) -> IpNet {
    match address {
        IpAddr::V4(address) => Ipv4Net::from(address).into(),
        IpAddr::V6(address) => {
            // 64 bits are never too many.
            Ipv6Net::new(address, CLIENT_BITS_V6).unwrap_or_else(|_| address.into()).trunc().into()
        }
    }
}

/// Whether all of `address` lies in `network`.
pub(crate) fn is_within(address: &IpNet, network: &IpNet) -> bool {
    network.contains(address)
}

/// The addresses of several networks together, each counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressCover(Vec<IpNet>);

impl AddressCover {
    /// Adds the addresses of a network.
    pub fn add(&mut self, network: IpNet) {
        self.0.push(unmapped(network));
    }

    /// Adds the addresses whose text a pattern may match: at least those, because only the whole
    /// parts before its first `*` count.
    pub fn add_pattern(&mut self, pattern: &Pattern) {
        if !pattern.is_wild() {
            return self.0.extend(parse_network(pattern.as_str()).ok());
        }
        let begin = pattern.beginning();
        if !begin.contains(':') {
            self.0.extend(begin_v4(begin));
        }
        if !begin.contains('.') {
            self.0.extend(begin_v6(begin));
        }
    }

    /// Adds the addresses that meet a condition.
    pub fn add_condition(&mut self, condition: &Condition) {
        self.0.extend(condition.networks.iter().copied());
        condition.any_of.iter().for_each(|pattern| self.add_pattern(pattern));
    }

    /// Adds the addresses of another cover.
    pub fn extend(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    /// Whether it has no address.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of IPv4 addresses.
    pub fn v4_addresses(&self) -> u64 {
        let networks =
            self.0.iter().filter_map(|network| if let IpNet::V4(v4) = network { Some(*v4) } else { None });
        let apart = Ipv4Net::aggregate(&networks.collect());
        apart.iter().map(|network| 1_u64 << (Ipv4Addr::BITS - u32::from(network.prefix_len()))).sum()
    }

    /// Returns the number of IPv6 networks that identify a client.
    pub fn v6_clients(&self) -> u128 {
        let networks =
            self.0.iter().filter_map(|network| if let IpNet::V6(v6) = network { Some(*v6) } else { None });
        let clients =
            networks.map(|v6| Ipv6Net::new(v6.addr(), v6.prefix_len().min(CLIENT_BITS_V6)).unwrap_or(v6));
        let apart = Ipv6Net::aggregate(&clients.map(|network| network.trunc()).collect());
        apart
            .iter()
            .map(|network| 1_u128 << (CLIENT_BITS_V6 - network.prefix_len().min(CLIENT_BITS_V6)))
            .sum()
    }
}

/// The IPv4 addresses whose text begins like this.
fn begin_v4(begin: &str) -> Option<IpNet> {
    if !begin.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return None;
    }
    let parts = whole_parts(begin, '.').map(|part| part.parse::<u8>().ok());
    let parts: Vec<u8> = parts.collect::<Option<_>>()?;
    let mut octets = [0; 4];
    octets.get_mut(..parts.len())?.copy_from_slice(&parts);
    let bits = u8::try_from(8 * parts.len()).ok()?;
    Ipv4Net::new(octets.into(), bits).ok().map(IpNet::V4)
}

/// The IPv6 addresses whose text begins like this.
fn begin_v6(begin: &str) -> Option<IpNet> {
    // `::` stands for any number of parts: only those before it are certain.
    let certain = begin.split_once("::").map_or_else(|| begin.to_owned(), |(before, _)| format!("{before}:"));
    let parts = whole_parts(&certain, ':').map(|part| u16::from_str_radix(part, 16).ok());
    let parts: Vec<u16> = parts.collect::<Option<_>>()?;
    let mut segments = [0; 8];
    segments.get_mut(..parts.len())?.copy_from_slice(&parts);
    let bits = u8::try_from(16 * parts.len()).ok()?;
    Ipv6Net::new(segments.into(), bits).ok().map(IpNet::V6)
}

/// The parts of a text that a separator ends.
fn whole_parts(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let ended = text.rsplit_once(separator).map_or("", |(ended, _)| ended);
    ended.split(separator).filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dimensions;

    fn cover(networks: &[&str]) -> AddressCover {
        let mut cover = AddressCover::default();
        for text in networks {
            cover.add_pattern(&Pattern::new(*text));
        }
        cover
    }

    #[test]
    fn addresses_of_networks_count_once() {
        for (networks, v4, v6) in [
            (&["0.0.0.0/1", "128.0.0.0/1"][..], 1 << 32, 0),
            (&["10.0.0.0/8", "10.1.0.0/16", "10.0.0.7"], 1 << 24, 0),
            (&["10.0.0.0/9", "11.0.0.0/9"], 1 << 24, 0),
            (&["::ffff:10.0.0.0/104"], 1 << 24, 0),
            (&["2001:db8::/32"], 0, 1 << 32),
            (&["2001:db8::1", "2001:db8::2", "2001:db8:0:1::/64"], 0, 2),
            (&["::/0", "0.0.0.0/0"], 1 << 32, 1 << 64),
            (&[], 0, 0),
        ] {
            let cover = cover(networks);
            assert_eq!((cover.v4_addresses(), cover.v6_clients()), (v4, v6), "{networks:?}");
        }
    }

    #[test]
    fn pattern_covers_at_least_the_addresses_that_it_matches() {
        for (pattern, v4, v6) in [
            ("10.*", 1 << 24, 0),
            ("10.2*", 1 << 24, 0),
            ("10.20.*", 1 << 16, 0),
            ("10.20.30.*", 1 << 8, 0),
            ("*.7", 1 << 32, 1 << 64),
            ("1*", 1 << 32, 1 << 64),
            ("2001:db8:*", 0, 1 << 32),
            ("2001:db8::*", 0, 1 << 32),
            ("2001:*", 0, 1 << 48),
            ("fe*", 0, 1 << 64),
        ] {
            let cover = cover(&[pattern]);
            assert_eq!((cover.v4_addresses(), cover.v6_clients()), (v4, v6), "{pattern}");
        }
    }

    #[test]
    fn networks_and_addresses_are_read() {
        let cases = [
            ("10.0.0.0/8", Ok("10.0.0.0/8")),
            ("192.0.2.7", Ok("192.0.2.7/32")),
            ("0.0.0.0/0", Ok("0.0.0.0/0")),
            ("2001:db8::/32", Ok("2001:db8::/32")),
            ("::1", Ok("::1/128")),
            ("::ffff:10.0.0.1", Ok("10.0.0.1/32")),
            ("::ffff:10.0.0.0/104", Ok("10.0.0.0/8")),
            ("::/0", Ok("::/0")),
            ("10.1.2.3/8", Err("\"10.1.2.3/8\" has bits behind its prefix; the network is \"10.0.0.0/8\"")),
            (
                "10.0.0.0/33",
                Err("\"10.0.0.0/33\" is neither an address nor a network such as \"10.0.0.0/8\""),
            ),
            ("010.0.0.1", Err("\"010.0.0.1\" is neither an address nor a network such as \"10.0.0.0/8\"")),
            ("localhost", Err("\"localhost\" is neither an address nor a network such as \"10.0.0.0/8\"")),
            ("", Err("\"\" is neither an address nor a network such as \"10.0.0.0/8\"")),
        ];
        for (text, expected) in cases {
            let got = parse_network(text).map(|network| network.to_string());
            assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{text}");
        }
    }

    #[test]
    fn a_client_is_counted_by_the_network_it_has_to_itself() {
        let cases = [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("2001:db8:1:2::", "2001:db8:1:2::/64"),
            ("::1", "::/64"),
        ];
        for (address, counted) in cases {
            let mut dimensions = Dimensions::default();
            dimensions.add_address(address.parse().expect("an address")).expect("the first");
            assert_eq!(dimensions.get("ip"), Some(counted), "{address}");
        }
    }
}
