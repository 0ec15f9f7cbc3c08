//! Networks, and the part of an address that identifies one client.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dimensions;

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
