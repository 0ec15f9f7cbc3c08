//! Dimensions of a request: names and values, such as user, endpoint or ip.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::network::{canonical, is_within, shared_prefix};
use crate::secrets::{SecretHeaders, digest, is_digest};

/// The most dimensions of one request. Higher: more to compare for each rule.
pub const DIMENSIONS_MAX: usize = 32;
/// The longest name of a dimension.
pub const NAME_BYTES_MAX: usize = 64;
/// The longest value of a dimension. Higher: more to hash for each check.
pub const VALUE_BYTES_MAX: usize = 1_024;
/// The dimension that holds an address: conditions on it may be networks.
pub const ADDRESS: &str = "ip";

/// Name prefix of a dimension that holds a header field, as in `header.x-api-key`.
pub const HEADER_PREFIX: &str = "header.";

/// The dimensions of one request. Names are unique.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dimensions<'a> {
    /// Header fields with credentials; `None` for the usual ones only.
    secrets: Option<&'a SecretHeaders>,
    entries: Vec<Dimension<'a>>,
    /// Value of [`ADDRESS`], if it is an address or a network. Parsed once for all rules.
    address: Option<IpNet>,
}

/// A name and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Dimension<'a> {
    name: Cow<'a, str>,
    value: DimensionValue<'a>,
}

/// A value, and the form in which it leaves the request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DimensionValue<'a> {
    Plain(Cow<'a, str>),
    /// A credential. Conditions and patterns see both forms; meters and records only the digest.
    Secret {
        /// `None` if it looks like a digest: nothing but the digest of another credential may
        /// compare as equal to that.
        clear: Option<Cow<'a, str>>,
        digest: Box<str>,
    },
}

impl DimensionValue<'_> {
    /// The form in which the value leaves the request.
    fn public(&self) -> &str {
        match self {
            Self::Plain(value) => value,
            Self::Secret { digest, .. } => digest,
        }
    }

    fn clear(&self) -> Option<&str> {
        match self {
            Self::Plain(_) => None,
            Self::Secret { clear, .. } => clear.as_deref(),
        }
    }
}

/// Why a request's dimensions make no sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DimensionsError {
    /// More than [`DIMENSIONS_MAX`].
    TooMany(usize),
    /// A name that is empty, too long, or has other characters than letters, digits, `_`, `-` and
    /// `.`.
    Name(String),
    /// A value longer than [`VALUE_BYTES_MAX`].
    Value {
        /// The dimension.
        name: String,
        /// The length of its value.
        bytes: usize,
    },
    /// The same name twice.
    Twice(String),
}

impl fmt::Display for DimensionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany(count) => write!(f, "dimensions: {count} is outside 0 to {DIMENSIONS_MAX}"),
            Self::Name(name) => write!(
                f,
                "dimensions: the name {name:?} is not 1 to {NAME_BYTES_MAX} of the characters a-z, A-Z, 0-9, \
                 _, - and ."
            ),
            Self::Value { name, bytes } => {
                write!(f, "dimensions.{name}: {bytes} bytes is outside 0 to {VALUE_BYTES_MAX}")
            }
            Self::Twice(name) => write!(f, "dimensions.{name}: given twice"),
        }
    }
}

impl std::error::Error for DimensionsError {}

impl<'a> Dimensions<'a> {
    /// The dimensions of a request, checked.
    pub fn new<N, V>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Self, DimensionsError>
    where
        N: Into<Cow<'a, str>>,
        V: Into<Cow<'a, str>>,
    {
        let mut dimensions = Self::default();
        for (name, value) in pairs {
            dimensions.add(name.into(), value.into())?;
        }
        Ok(dimensions)
    }

    /// The dimensions of a decision record. It has digests in place of credentials, so all its
    /// values stay as they are.
    pub fn from_record(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, DimensionsError> {
        let mut dimensions = Self::default();
        for (name, value) in pairs {
            dimensions.check(name, value)?;
            dimensions.push(name.into(), DimensionValue::Plain(value.into()));
        }
        Ok(dimensions)
    }

    /// No dimensions yet, of a server with secret header fields of its own.
    pub fn keeping_secret(secrets: &'a SecretHeaders) -> Self {
        Self { secrets: Some(secrets), ..Self::default() }
    }

    /// Adds one dimension. Of a credential, only its digest leaves the request.
    pub fn add(&mut self, name: Cow<'a, str>, value: Cow<'a, str>) -> Result<(), DimensionsError> {
        self.check(&name, &value)?;
        let value = if self.is_secret(&name) {
            let digest = digest(&name, &value).into();
            DimensionValue::Secret { clear: (!is_digest(&value)).then_some(value), digest }
        } else {
            DimensionValue::Plain(value)
        };
        self.push(name, value);
        Ok(())
    }

    fn check(&self, name: &str, value: &str) -> Result<(), DimensionsError> {
        if !is_name(name) {
            return Err(DimensionsError::Name(name.chars().take(NAME_BYTES_MAX).collect()));
        }
        if value.len() > VALUE_BYTES_MAX {
            return Err(DimensionsError::Value { name: name.to_owned(), bytes: value.len() });
        }
        if self.get(name).is_some() {
            return Err(DimensionsError::Twice(name.to_owned()));
        }
        if self.entries.len() == DIMENSIONS_MAX {
            return Err(DimensionsError::TooMany(DIMENSIONS_MAX + 1));
        }
        Ok(())
    }

    fn push(&mut self, name: Cow<'a, str>, value: DimensionValue<'a>) {
        if name == ADDRESS
            && let DimensionValue::Plain(value) = &value
        {
            self.address = address_of(value);
        }
        self.entries.push(Dimension { name, value });
    }

    fn is_secret(&self, name: &str) -> bool {
        self.secrets.map_or_else(|| SecretHeaders::default().is_secret(name), |all| all.is_secret(name))
    }

    /// Adds a client's address as [`ADDRESS`]. It is counted by the network that one client
    /// commonly has to itself: IPv4 by the address, IPv6 by its /64, such as `2001:db8:1:2::/64`.
    /// Networks of rules are compared with all of it.
    pub fn add_address(&mut self, address: IpAddr) -> Result<(), DimensionsError> {
        self.add(Cow::Borrowed(ADDRESS), Cow::Owned(counted_as(address)))?;
        self.address = Some(IpNet::from(canonical(address)));
        Ok(())
    }

    /// Whether the request's address lies in `network`.
    pub(crate) fn is_within(&self, network: &IpNet) -> bool {
        self.address.as_ref().is_some_and(|address| is_within(address, network))
    }

    /// All names and values that conditions compare: of a credential, both its forms.
    pub(crate) fn compared(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().flat_map(|Dimension { name, value }| {
            [Some(value.public()), value.clear()].into_iter().flatten().map(move |value| (&**name, value))
        })
    }

    /// The value of a dimension, if the request has it; of a credential, its digest.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.value(name).map(DimensionValue::public)
    }

    /// The value of a dimension that is a credential, as the client sent it. It must not outlive
    /// the request.
    pub(crate) fn clear(&self, name: &str) -> Option<&str> {
        self.value(name)?.clear()
    }

    /// The forms of a value that conditions compare: as [`Self::get`] and [`Self::clear`] give it.
    #[inline]
    pub(crate) fn forms(&self, name: &str) -> Option<(&str, Option<&str>)> {
        self.value(name).map(|value| (value.public(), value.clear()))
    }

    fn value(&self, name: &str) -> Option<&DimensionValue<'a>> {
        self.entries.iter().find(|known| known.name == name).map(|known| &known.value)
    }
}

/// Returns the value under which a client with this address is counted.
pub(crate) fn counted_as(address: IpAddr) -> String {
    match shared_prefix(canonical(address)) {
        IpNet::V4(network) => network.addr().to_string(),
        IpNet::V6(network) => network.to_string(),
    }
}

fn address_of(value: &str) -> Option<IpNet> {
    let address = value.parse::<IpAddr>().map(|address| IpNet::from(canonical(address)));
    address.ok().or_else(|| value.parse().ok())
}

/// Whether `name` can name a dimension.
pub(crate) fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_dimensions_are_named() {
        let long = "v".repeat(VALUE_BYTES_MAX + 1);
        let cases = [
            (Dimensions::new([("", "x")]), "dimensions: the name \"\" is not 1 to 64 of the characters"),
            (Dimensions::new([("us er", "x")]), "dimensions: the name \"us er\" is not 1 to 64"),
            (Dimensions::new([("user", long.as_str())]), "dimensions.user: 1025 bytes is outside 0 to 1024"),
            (Dimensions::new([("user", "a"), ("user", "b")]), "dimensions.user: given twice"),
            (Dimensions::new((0..33).map(|at| (format!("d{at}"), "x"))), "dimensions: 33 is outside 0 to 32"),
        ];
        for (got, message) in cases {
            let error = got.expect_err(message).to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
    #[test]
    fn credentials_leave_a_request_as_digests_only() {
        let own = SecretHeaders::new(["x-session"]).expect("a name");
        let mut request = Dimensions::keeping_secret(&own);
        for name in ["header.authorization", "header.x-session", "header.x-other"] {
            request.add(name.into(), "t0ken".into()).expect("good");
        }
        let of = |name| digest(name, "t0ken");
        assert_eq!(request.get("header.authorization"), Some(of("header.authorization").as_str()));
        assert_eq!(request.get("header.x-session"), Some(of("header.x-session").as_str()));
        assert_eq!(request.get("header.x-other"), Some("t0ken"));
        for (name, clear) in [("header.x-session", Some("t0ken")), ("header.x-other", None)] {
            assert_eq!(request.clear(name), clear);
        }
        let (session, clear) = (of("header.x-session"), Some("t0ken"));
        assert_eq!(request.forms("header.x-session"), Some((session.as_str(), clear)));
        let forms = request.compared().filter(|(name, _)| *name == "header.x-session");
        assert_eq!(forms.count(), 2);
    }

    #[test]
    fn a_record_has_the_dimensions_of_its_request() {
        let request = Dimensions::new([("cookie", "t0ken"), ("ip", "192.0.2.1")]).expect("good");
        let digest = digest("cookie", "t0ken");
        let record = Dimensions::from_record([("cookie", digest.as_str()), ("ip", "192.0.2.1")]);
        let record = record.expect("good");
        assert_eq!((record.forms("cookie"), record.address), (Some((&*digest, None)), request.address));
        assert!(Dimensions::from_record([("a", "1"), ("a", "2")]).is_err());
    }

    #[test]
    fn the_digest_of_another_credential_is_no_credential() {
        let stolen = digest("header.x-api-key", "t0ken");
        let request = Dimensions::new([("header.x-api-key", stolen.as_str())]).expect("good");
        let (public, clear) = request.forms("header.x-api-key").expect("there");
        assert_eq!((public == stolen, clear), (false, None));
    }
}
