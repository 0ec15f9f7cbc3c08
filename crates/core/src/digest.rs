//! Keys as digests: 128 bits, keyed, over an encoding that no two different keys share.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::sip::Sip13;
use crate::table::ShareId;

/// The secret that keeps digests unpredictable: without it, an attacker cannot find keys that
/// collide.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

impl Secret {
    /// A secret from random bytes. Each process may draw its own: digests never leave it.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The digest of a key within its key space. One half picks the line, the other is the tag stored
/// in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    pub(crate) place: u64,
    pub(crate) tag: u64,
}

/// The keys of one limit of one tenant. Equal keys of different spaces are unrelated: each space
/// hashes under a secret of its own, derived from its name.
#[derive(Clone, Copy)]
pub struct KeySpace {
    /// For keys of a single part, which need no encoding.
    single: Sip13,
    /// For keys of several parts.
    joined: Secret,
    share: ShareId,
    spill: Digest,
}

impl fmt::Debug for KeySpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySpace").field("share", &self.share).finish_non_exhaustive()
    }
}

impl KeySpace {
    /// The space called `name` inside `share`.
    pub fn new(root: &Secret, share: ShareId, name: &str) -> Self {
        let derive = |purpose: &[u8]| derive(root, &[&share.0.to_le_bytes(), name.as_bytes(), purpose]);
        let (single, joined) = (derive(b"single"), derive(b"joined"));
        // No key has zero parts, so no key has the digest of the overflow meter.
        Self { single: Sip13::new(single.0), joined, share, spill: hash(&joined, &[]) }
    }

    /// The digest of a key made of one part or several. (`a-b`, `c`) and (`a`, `b-c`) are different
    /// keys.
    #[inline]
    pub fn digest(&self, parts: &[&[u8]]) -> Digest {
        match parts {
            [key] => {
                let (place, tag) = self.single.hash(key);
                Digest { place, tag }
            }
            _ => hash(&self.joined, parts),
        }
    }

    /// The share of the table that this space's meters live in.
    #[inline]
    pub fn share(&self) -> ShareId {
        self.share
    }

    /// Where keys that cannot be held are decided together.
    #[inline]
    pub(crate) fn spill(&self) -> Digest {
        self.spill
    }
}

fn derive(root: &Secret, parts: &[&[u8]]) -> Secret {
    let derived = hash(root, parts);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&derived.place.to_le_bytes());
    bytes[8..].copy_from_slice(&derived.tag.to_le_bytes());
    Secret(bytes)
}

/// Hashes the parts. Each part is followed by its length, so a stream read from the end has only
/// one decomposition.
fn hash(secret: &Secret, parts: &[&[u8]]) -> Digest {
    let mut hasher = SipHasher13::new_with_key(&secret.0);
    for part in parts {
        hasher.write(part);
        hasher.write(&(part.len() as u64).to_le_bytes());
    }
    let digest = hasher.finish128();
    Digest { place: digest.h1, tag: digest.h2 }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn space(share: u32, name: &str) -> KeySpace {
        KeySpace::new(&Secret::from_bytes([3; 16]), ShareId(share), name)
    }

    fn digest_of(space: &KeySpace, parts: &[Vec<u8>]) -> Digest {
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        space.digest(&parts)
    }

    #[test]
    fn joined_parts_do_not_collide() {
        let space = space(0, "limit");
        let keys: [&[&[u8]]; 6] =
            [&[b"a-b", b"c"], &[b"a", b"b-c"], &[b"a-b-c"], &[b"a", b"b", b"c"], &[b""], &[b"", b""]];
        let mut seen = HashMap::new();
        for key in keys {
            assert_eq!(seen.insert(space.digest(key), key), None, "{key:?}");
        }
    }

    #[test]
    fn tenants_and_limits_are_spaces_of_their_own() {
        let digests = [space(0, "a"), space(1, "a"), space(0, "b")].map(|s| s.digest(&[b"key"]));
        assert!(digests[0] != digests[1] && digests[0] != digests[2] && digests[1] != digests[2]);
    }

    #[test]
    fn the_secret_is_not_printed() {
        assert_eq!(format!("{:?}", Secret::from_bytes([65; 16])), "Secret(..)");
    }

    proptest! {
        #[test]
        fn the_encoding_is_injective(
            a in prop::collection::vec(prop::collection::vec(0u8..3, 0..10), 0..4),
            b in prop::collection::vec(prop::collection::vec(0u8..3, 0..10), 0..4),
        ) {
            let space = space(0, "limit");
            prop_assert_eq!(a == b, digest_of(&space, &a) == digest_of(&space, &b));
        }
    }
}
