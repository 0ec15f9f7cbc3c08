//! Authentication: a token determines the tenant and the role. Tokens are stored as hashes only.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The permissions of a caller. Each role includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Request decisions.
    #[default]
    Client,
    /// Look at rules, overrides and metrics.
    Viewer,
    /// Change overrides, and propose changes of rules.
    Operator,
    /// Approve changes that others propose.
    Approver,
    /// All permissions.
    Admin,
}

impl Role {
    /// All roles, from the least to the most.
    pub const ALL: [Self; 5] = [Self::Client, Self::Viewer, Self::Operator, Self::Approver, Self::Admin];

    /// The role of a name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == name)
    }

    /// The role as it is written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Approver => "approver",
            Self::Admin => "admin",
        }
    }
}

/// Which tenant, by its place in the server's list: 0 is the one that needs no name.
pub type TenantIndex = usize;

/// The tenant of tokens without a tenant: the operators of the server.
pub(crate) const OPERATING_TENANT: TenantIndex = 0;

/// The identity of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Principal {
    /// The tenant of the caller's keys.
    pub tenant: TenantIndex,
    /// The caller's permissions.
    pub role: Role,
}

impl Principal {
    /// Every caller of a server without tokens. Such a server listens on loopback only.
    pub const LOCAL: Self = Self { tenant: 0, role: Role::Admin };
}

/// A caller and its token. The caller's name is looked up only for requests that change something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) principal: Principal,
    /// `None` on an open server.
    token: Option<TokenHash>,
}

/// The SHA-256 of a token. Tokens are drawn at random with 256 bits, so a plain hash of one cannot
/// be guessed back.
#[derive(Clone, Copy, Debug)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of a token.
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// Returns the key of the token in the map of [`Credentials`]: the first 8 bytes of its hash.
    /// It reveals nothing of the token.
    fn bucket(&self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(bytes)
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for TokenHash {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "not sha256: and 64 hexadecimal digits, as `tidegate token new` prints it";
        let digits = text
            .strip_prefix("sha256:")
            .map(str::as_bytes)
            .filter(|digits| digits.len() == 64)
            .ok_or(WRONG)?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = 16 * hex_digit(pair[0]).ok_or(WRONG)? + hex_digit(pair[1]).ok_or(WRONG)?;
        }
        Ok(Self(bytes))
    }
}

/// Parses one hexadecimal digit. Unlike a number, a hash cannot contain a sign.
fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// Prefix of the name of a configured token. No credential of the store may have it, so none passes
/// for a configured one.
const CONFIGURED: &str = "token:";

/// Prefix of the names under which a server acts by itself.
const OURSELVES: &str = "tidegate:";

/// The name of every caller of a server without tokens.
const LOCAL_NAME: &str = "local";

/// All tokens that open the server. Without any in its configuration it is open, and listens on
/// loopback only.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    known: HashMap<u64, Vec<TokenEntry>>,
}

/// A token that opens the server.
#[derive(Clone, Debug)]
struct TokenEntry {
    hash: TokenHash,
    principal: Principal,
    /// The name for the audit and other output for people.
    name: String,
    /// When it ends, in milliseconds since the Unix epoch, if it does.
    expires_ms: Option<u64>,
}

impl Credentials {
    /// Adds a configured token. Tokens of one name count as one person.
    pub fn add(
        &mut self,
        hash: TokenHash,
        name: &str,
        tenant: TenantIndex,
        role: Role,
    ) -> Result<(), &'static str> {
        let name = format!("{CONFIGURED}{name}");
        let principal = Principal { tenant, role };
        self.put(TokenEntry { hash, principal, name, expires_ms: None })
    }

    /// Adds a token of the store, which may expire.
    pub(crate) fn add_stored(
        &mut self,
        hash: TokenHash,
        principal: Principal,
        name: &str,
        expires_ms: Option<u64>,
    ) -> Result<(), &'static str> {
        if !is_free_name(name) {
            return Err("its name is reserved for the server");
        }
        self.put(TokenEntry { hash, principal, name: name.to_owned(), expires_ms })
    }

    /// Returns the configured tokens alone.
    pub(crate) fn configured(&self) -> Self {
        let mut known = self.known.clone();
        for bucket in known.values_mut() {
            bucket.retain(|entry| entry.name.starts_with(CONFIGURED));
        }
        known.retain(|_, bucket| !bucket.is_empty());
        Self { known }
    }

    fn put(&mut self, new: TokenEntry) -> Result<(), &'static str> {
        let hash = new.hash;
        let bucket = self.known.entry(hash.bucket()).or_default();
        if bucket.iter().any(|known| bool::from(known.hash.0.ct_eq(&hash.0))) {
            return Err("given twice");
        }
        bucket.push(new);
        Ok(())
    }

    /// Whether the server is open to every caller, because its configuration has no tokens.
    pub fn is_open(&self) -> bool {
        self.known.is_empty()
    }

    /// Returns the principal of `token`; on an open server, that of any caller. The duration
    /// reveals nothing about the known tokens: the lookup uses a hash, and hashes are compared in
    /// constant time. `now_ms` is called only for a token that expires.
    pub fn principal(&self, token: Option<&[u8]>, now_ms: impl FnOnce() -> u64) -> Option<Principal> {
        self.caller(token, now_ms).map(|caller| caller.principal)
    }

    fn caller(&self, token: Option<&[u8]>, now_ms: impl FnOnce() -> u64) -> Option<Caller> {
        if self.is_open() {
            return Some(Caller { principal: Principal::LOCAL, token: None });
        }
        let hash = TokenHash::of(token?);
        let (principal, expires_ms) = self.holder(Some(&hash))?;
        lasts(expires_ms, now_ms).then_some(Caller { principal, token: Some(hash) })
    }

    /// Returns the principal of the token with a hash, and its expiry, if any; on an open server,
    /// that of any caller.
    pub(crate) fn holder(&self, hash: Option<&TokenHash>) -> Option<(Principal, Option<u64>)> {
        if self.is_open() {
            return Some((Principal::LOCAL, None));
        }
        let known = self.find(hash?)?;
        Some((known.principal, known.expires_ms))
    }

    fn find(&self, hash: &TokenHash) -> Option<&TokenEntry> {
        let bucket = self.known.get(&hash.bucket())?;
        bucket.iter().find(|known| bool::from(known.hash.0.ct_eq(&hash.0)))
    }

    /// Returns the name of a caller for the audit, if its token still has the same tenant and role
    /// as at authentication. The token may have been revoked while a body arrived or a change was
    /// measured. Then the caller must not act, and above all not under the name of another one.
    pub(crate) fn actor(&self, caller: &Caller, now_ms: impl FnOnce() -> u64) -> Option<String> {
        let Some(token) = &caller.token else { return self.is_open().then(|| LOCAL_NAME.to_owned()) };
        let known = self.find(token).filter(|known| known.principal == caller.principal)?;
        lasts(known.expires_ms, now_ms).then(|| known.name.clone())
    }

    /// Whether the tenant has a credential that may approve changes, of another name than these:
    /// the author, and those that the store does not accept as approvers of the author.
    pub(crate) fn has_approver_beside(
        &self,
        names: &HashSet<String>,
        tenant: TenantIndex,
        now_ms: u64,
    ) -> bool {
        let may = |known: &TokenEntry| {
            let Principal { tenant: of, role } = known.principal;
            of == tenant && role >= Role::Approver && lasts(known.expires_ms, || now_ms)
        };
        self.known.values().flatten().any(|known| may(known) && !names.contains(&known.name))
    }

    /// The principal of an `Authorization` value: `Bearer` and the token.
    pub fn of_authorization(&self, value: Option<&[u8]>, now_ms: impl FnOnce() -> u64) -> Option<Principal> {
        self.principal(value.and_then(bearer), now_ms)
    }

    /// Returns the same with the token, for requests that need the caller's name later.
    pub(crate) fn caller_of(&self, value: Option<&[u8]>, now_ms: impl FnOnce() -> u64) -> Option<Caller> {
        self.caller(value.and_then(bearer), now_ms)
    }
}

/// Whether a token has not expired. The clock is read only for a token that expires.
fn lasts(expires_ms: Option<u64>, now_ms: impl FnOnce() -> u64) -> bool {
    expires_ms.is_none_or(|expires_ms| now_ms() < expires_ms)
}

/// Whether a credential may have this name. It must not look like a configured token, the local
/// caller or the server itself.
pub(crate) fn is_free_name(name: &str) -> bool {
    name != LOCAL_NAME && ![CONFIGURED, OURSELVES].iter().any(|taken| name.starts_with(taken))
}

/// The scheme is case-insensitive.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// A new token: `tg_` and 256 random bits in hexadecimal digits.
#[expect(clippy::disallowed_methods, reason = "a token must not be repeatable")]
pub fn new_token() -> Result<String, String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| format!("the system gave no random bytes: {error}"))?;
    Ok(bytes.iter().fold("tg_".to_owned(), |token, byte| format!("{token}{byte:02x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_tenant_and_role() {
        let mut credentials = Credentials::default();
        assert_eq!(credentials.principal(None, || 0), Some(Principal::LOCAL));
        let token = new_token().expect("random bytes");
        let hash: TokenHash =
            TokenHash::of(token.as_bytes()).to_string().parse().expect("reads what it writes");
        credentials.add(hash, "a", 3, Role::Viewer).expect("new");
        assert_eq!(credentials.add(hash, "b", 4, Role::Admin), Err("given twice"));

        let header = format!("bearer {token}");
        let viewer = Principal { tenant: 3, role: Role::Viewer };
        assert_eq!(credentials.of_authorization(Some(header.as_bytes()), || 0), Some(viewer));
        for wrong in [None, Some(&b"Bearer "[..]), Some(b"Basic abc"), Some(b"Bearer tg_00"), Some(b"")] {
            assert_eq!(credentials.of_authorization(wrong, || 0), None);
        }
    }

    fn names(names: &[&str]) -> HashSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_token_may_end() {
        let mut credentials = Credentials::default();
        let viewer = Principal { tenant: 0, role: Role::Viewer };
        credentials.add_stored(TokenHash::of(b"a"), viewer, "ada", Some(10)).expect("new");
        assert_eq!(credentials.principal(Some(b"a"), || 9), Some(viewer));
        assert_eq!(credentials.principal(Some(b"a"), || 10), None);
        assert!(!credentials.is_open(), "it is not as if there never was one");
    }

    #[test]
    fn actor_name_is_reserved_for_its_credential() {
        let mut credentials = Credentials::default();
        let actor = |credentials: &Credentials, value: &[u8]| {
            let caller = credentials.caller_of(Some(value), || 0).expect("known");
            credentials.actor(&caller, || 0)
        };
        assert_eq!(actor(&credentials, b"Bearer b").as_deref(), Some("local"));
        credentials.add(TokenHash::of(b"b"), "bob", 0, Role::Admin).expect("new");
        let viewer = Principal { tenant: 0, role: Role::Viewer };
        credentials.add_stored(TokenHash::of(b"a"), viewer, "ada", None).expect("new");
        assert_eq!(actor(&credentials, b"Bearer a").as_deref(), Some("ada"));
        assert_eq!(actor(&credentials, b"Bearer b").as_deref(), Some("token:bob"));
        let taken = ["local", "token:bob", "tidegate: automatic"];
        let mut store = |name| credentials.add_stored(TokenHash::of(b"c"), viewer, name, None);
        assert!(taken.iter().all(|name| store(name).is_err()), "a row of the store by another hand");
        assert!(taken.iter().all(|name| !is_free_name(name)) && is_free_name("ada"));
    }

    #[test]
    fn changed_or_ended_credential_has_no_actor_name() {
        let of = |role, expires_ms| {
            let mut credentials = Credentials::default();
            credentials.add(TokenHash::of(b"b"), "bob", 0, Role::Admin).expect("new");
            let principal = Principal { tenant: 0, role };
            credentials.add_stored(TokenHash::of(b"a"), principal, "ada", expires_ms).expect("new");
            credentials
        };
        let caller = of(Role::Approver, None).caller_of(Some(b"Bearer a"), || 0).expect("known");
        assert_eq!(of(Role::Approver, Some(10)).actor(&caller, || 9).as_deref(), Some("ada"));
        assert_eq!(of(Role::Approver, Some(10)).actor(&caller, || 10), None, "ended");
        assert_eq!(of(Role::Viewer, None).actor(&caller, || 0), None, "in another role");
        let mut revoked = Credentials::default();
        revoked.add(TokenHash::of(b"b"), "bob", 0, Role::Admin).expect("new");
        assert_eq!(revoked.actor(&caller, || 0), None, "revoked, and not `local`");
    }

    #[test]
    fn author_is_not_their_own_approver() {
        let of = |tenant, role, name: &str| {
            let mut credentials = Credentials::default();
            credentials.add_stored(
                TokenHash::of(b"a"),
                Principal { tenant: 0, role: Role::Admin },
                "ada",
                None,
            )?;
            credentials.add_stored(TokenHash::of(b"b"), Principal { tenant, role }, name, Some(10))?;
            Ok::<_, &str>([9, 10].map(|now_ms| credentials.has_approver_beside(&names(&["ada"]), 0, now_ms)))
        };
        assert_eq!(of(0, Role::Approver, "bob"), Ok([true, false]), "until it ends");
        assert_eq!(of(0, Role::Admin, "bob"), Ok([true, false]));
        assert_eq!(of(0, Role::Operator, "bob"), Ok([false; 2]));
        assert_eq!(of(1, Role::Admin, "bob"), Ok([false; 2]), "a tenant's");
        assert_eq!(of(0, Role::Admin, "ada"), Ok([false; 2]), "another token of hers");
        assert!(!Credentials::default().has_approver_beside(&names(&["local"]), 0, 0));
        let mut credentials = Credentials::default();
        let approver = Principal { tenant: 0, role: Role::Approver };
        credentials.add_stored(TokenHash::of(b"b"), approver, "bob", None).expect("new");
        assert!(credentials.has_approver_beside(&names(&["ada"]), 0, 0));
        assert!(!credentials.has_approver_beside(&names(&["ada", "bob"]), 0, 0), "ada made it");
    }

    #[test]
    fn roles_include_the_ones_before() {
        assert!(Role::ALL.is_sorted_by(|a, b| a < b));
        assert!(Role::ALL.into_iter().all(|role| Role::of_name(role.as_str()) == Some(role)));
        assert_eq!(Role::of_name("owner"), None);
    }

    #[test]
    fn only_hashes_are_hashes() {
        for wrong in [
            "",
            "sha256:",
            "sha256:zz",
            "md5:00",
            &format!("sha256:{}", "g".repeat(64)),
            &format!("sha256:{}", "ä".repeat(32)),
            &format!("sha256:{}", "+f".repeat(32)),
            &format!("sha256:{}", "-0".repeat(32)),
            &format!("sha256: {}", "0".repeat(63)),
        ] {
            assert!(wrong.parse::<TokenHash>().is_err(), "{wrong}");
        }
        let (lower, upper) = ("0123456789abcdef".repeat(4), "0123456789ABCDEF".repeat(4));
        for digits in [&lower, &upper] {
            let hash: TokenHash = format!("sha256:{digits}").parse().expect("both ways to write it");
            assert_eq!(hash.to_string(), format!("sha256:{lower}"));
        }
    }
}
