//! Wire format of messages between replicators: frames of a length, a kind and a body.
//!
//! The connecting node sends [`Hello`] and waits for [`Welcome`]. Then it sends batches, each of
//! which is acknowledged, or forwarded checks, each of which gets a reply. Several may be in
//! flight. On an error, the other side sends [`Refusal`] and closes the connection. A byte carries
//! seven bits of a number, because most numbers are small.

mod bytes;
mod component;
pub(crate) mod forward;

use std::fmt;
use std::sync::Arc;

use bytes::{NUMBER_BYTES_MAX, Reader, number_len, put_number, put_optional, put_text};

use crate::forward::{ForwardReply, ForwardRequest};
use crate::message::{Ack, Batch, BatchFreshness, BatchId, ComponentGroup};
use crate::rounds::{BATCH_COMPONENTS_MAX, GATHER_MAX};

pub use component::{COMPONENT_BYTES_MAX, component_len};

/// Version of the protocol. A peer with another version is refused.
pub const VERSION: u16 = 6;

/// Bytes of the length in front of a frame.
pub const PREFIX_BYTES: usize = 4;

/// The largest frame, without its prefix. Higher: longer keys can be carried; more memory for each
/// connection.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Maximum bytes of a frame before the sender is identified.
pub const GREETING_BYTES_MAX: usize = 1 << 10;

/// The longest name of a region: it has to be a label in the name of a certificate.
pub const NAME_BYTES_MAX: usize = 63;

/// Maximum bytes of a frame besides its components: numbers of the batch and of each group.
pub(crate) const HEAD_BYTES_MAX: usize = (9 + 2 * BATCH_COMPONENTS_MAX) * NUMBER_BYTES_MAX;

const KIND_HELLO: u8 = 1;
const KIND_WELCOME: u8 = 2;
const KIND_BATCH: u8 = 3;
const KIND_ACK: u8 = 4;
const KIND_REFUSED: u8 = 5;
const KIND_FORWARD: u8 = 6;
const KIND_FORWARD_REPLY: u8 = 7;

/// A message on a connection.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// Identity of the connecting node.
    Hello(Hello),
    /// Accepts the connection.
    Welcome(Welcome),
    /// Changed components.
    Batch(Batch),
    /// Confirms the merge of a batch.
    Ack(Ack),
    /// Forwarded checks, and the deadline of their caller on the receiver's clock, µs.
    Forward(ForwardRequest, u64),
    /// Their reply, and the clock of the replying node, µs.
    Forwarded(ForwardReply, u64),
    /// Refuses a connection or a message, with the reason. The connection ends.
    Refused(Refusal),
}

/// Identity of the connecting node, and the region it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The region that connects.
    pub from: String,
    /// The region that it wants to reach.
    pub to: String,
    /// The replicator.
    pub incarnation: u64,
    /// Hash of the settings that must be the same in every region.
    pub agreement: u64,
}

/// Identity of the accepting node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Region of the accepting node.
    pub region: String,
    /// Its clock: to be given back with the first batch.
    pub clock_us: u64,
    /// Whether this process is its replicator, and takes batches.
    pub is_replicator: bool,
    /// Hash of the settings that must be the same in every region.
    pub agreement: u64,
}

/// Reason to refuse a connection or a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It speaks another version.
    Version,
    /// It looks for another region.
    WrongRegion,
    /// Its region is not a peer of this one.
    UnknownRegion,
    /// Its certificate is not for the region that it claims.
    Certificate,
    /// Another process of the region is the replicator now.
    NotReplicator,
    /// The origin here did not take the batch.
    NotMerged,
    /// It sent an invalid message.
    Nonsense,
    /// The region has the maximum number of connections already.
    Full,
}

/// Each refusal with its byte on the wire.
const REFUSALS: [(Refusal, u8); 8] = [
    (Refusal::Version, 1),
    (Refusal::WrongRegion, 2),
    (Refusal::UnknownRegion, 3),
    (Refusal::Certificate, 4),
    (Refusal::NotReplicator, 5),
    (Refusal::NotMerged, 6),
    (Refusal::Nonsense, 7),
    (Refusal::Full, 8),
];

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "the protocol versions differ: run the same release in all regions",
            Self::WrongRegion => "the connection is meant for another region: correct the configured address",
            Self::UnknownRegion => "the connecting region is not a configured peer of the receiver",
            Self::Certificate => "the certificate is not for the region that the connecting node states",
            Self::NotReplicator => "the receiver is not the replicator of its region",
            Self::NotMerged => "the origin of the receiver did not merge the batch",
            Self::Nonsense => "the receiver got an invalid or unexpected frame",
            Self::Full => "the region has reached its maximum of connections",
        })
    }
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// There are fewer of them than there should be.
    Short,
    /// There are more.
    Long,
    /// A number in an invalid encoding.
    Number,
    /// An unknown kind of frame, or of an element in it.
    Kind(u8),
    /// An unsupported version.
    Version(u64),
    /// The name of a region that cannot be one.
    Name,
    /// A number that is too high.
    Range {
        /// Name of the number.
        field: &'static str,
        /// The received value.
        given: u64,
        /// The most that may be given.
        most: u64,
    },
    /// Terms that no limit has.
    Terms,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => f.write_str("the frame is truncated"),
            Self::Long => f.write_str("the frame has trailing bytes"),
            Self::Number => f.write_str("a number in the frame has an invalid encoding"),
            Self::Kind(kind) => write!(f, "unknown frame kind {kind}"),
            Self::Version(given) => write!(f, "protocol version {given} is not supported, only {VERSION}"),
            Self::Name => {
                write!(f, "a region name is not 1 to {NAME_BYTES_MAX} of the characters a-z, 0-9 and -")
            }
            Self::Range { field, given, most } => write!(f, "{field}: {given} is outside 0 to {most}"),
            Self::Terms => f.write_str("the terms are not those of a valid limit"),
        }
    }
}

impl std::error::Error for WireError {}

/// Whether a text can name a region: it has to be a label of a host's name, for it is one in the
/// region's certificate.
pub fn is_region_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_allowed)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// How many bytes a group takes.
pub(crate) fn group_len(group: &ComponentGroup) -> usize {
    let head = number_len(u64::from(group.partition)) + number_len(group.components.len() as u64);
    head + group.components.iter().map(component_len).sum::<usize>()
}

impl Frame {
    /// The frame with its length in front of it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; PREFIX_BYTES];
        match self {
            Self::Hello(hello) => put_hello(&mut bytes, hello),
            Self::Welcome(welcome) => {
                bytes.push(KIND_WELCOME);
                put_text(&mut bytes, welcome.region.as_bytes());
                put_number(&mut bytes, welcome.clock_us);
                put_number(&mut bytes, u64::from(welcome.is_replicator));
                put_number(&mut bytes, welcome.agreement);
            }
            Self::Batch(batch) => put_batch(&mut bytes, batch),
            Self::Ack(ack) => {
                bytes.push(KIND_ACK);
                put_id(&mut bytes, ack.id);
                put_number(&mut bytes, ack.clock_us);
            }
            Self::Forward(forward, until_us) => {
                bytes.push(KIND_FORWARD);
                put_number(&mut bytes, *until_us);
                forward::put(&mut bytes, forward);
            }
            Self::Forwarded(forwarded, clock_us) => {
                bytes.push(KIND_FORWARD_REPLY);
                put_number(&mut bytes, *clock_us);
                forward::put_answer(&mut bytes, forwarded);
            }
            Self::Refused(refusal) => {
                bytes.push(KIND_REFUSED);
                bytes.extend(REFUSALS.iter().find(|(known, _)| known == refusal).map(|(_, byte)| *byte));
            }
        }
        // Frames that are sent stay far below FRAME_BYTES_MAX.
        let len = u32::try_from(bytes.len() - PREFIX_BYTES).unwrap_or(u32::MAX);
        bytes[..PREFIX_BYTES].copy_from_slice(&len.to_be_bytes());
        bytes
    }

    /// Reads a frame without the length in front of it.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        let frame = match reader.byte()? {
            KIND_HELLO => Self::Hello(hello(&mut reader)?),
            KIND_WELCOME => Self::Welcome(Welcome {
                region: name(&mut reader)?,
                clock_us: reader.number()?,
                is_replicator: reader.bounded("replicator", 1)? == 1,
                agreement: reader.number()?,
            }),
            KIND_BATCH => Self::Batch(batch(&mut reader)?),
            KIND_ACK => Self::Ack(Ack { id: id(&mut reader)?, clock_us: reader.number()? }),
            KIND_FORWARD => {
                let until_us = reader.number()?;
                Self::Forward(forward::get(&mut reader)?, until_us)
            }
            KIND_FORWARD_REPLY => {
                let clock_us = reader.number()?;
                Self::Forwarded(forward::get_answer(&mut reader)?, clock_us)
            }
            KIND_REFUSED => Self::Refused(refusal(reader.byte()?)?),
            kind => return Err(WireError::Kind(kind)),
        };
        reader.end()?;
        Ok(frame)
    }
}

fn put_hello(bytes: &mut Vec<u8>, hello: &Hello) {
    bytes.push(KIND_HELLO);
    // First in every version, because the rest may differ.
    put_number(bytes, u64::from(VERSION));
    put_text(bytes, hello.from.as_bytes());
    put_text(bytes, hello.to.as_bytes());
    put_number(bytes, hello.incarnation);
    put_number(bytes, hello.agreement);
}

fn hello(reader: &mut Reader<'_>) -> Result<Hello, WireError> {
    let version = reader.number()?;
    if version != u64::from(VERSION) {
        return Err(WireError::Version(version));
    }
    let (from, to) = (name(reader)?, name(reader)?);
    Ok(Hello { from, to, incarnation: reader.number()?, agreement: reader.number()? })
}

fn name(reader: &mut Reader<'_>) -> Result<String, WireError> {
    let text = reader.text("region", NAME_BYTES_MAX)?;
    let name = std::str::from_utf8(text).map_err(|_| WireError::Name)?;
    if is_region_name(name) { Ok(name.to_owned()) } else { Err(WireError::Name) }
}

fn put_id(bytes: &mut Vec<u8>, id: BatchId) {
    put_number(bytes, id.incarnation);
    put_number(bytes, id.sequence);
}

fn id(reader: &mut Reader<'_>) -> Result<BatchId, WireError> {
    Ok(BatchId { incarnation: reader.number()?, sequence: reader.number()? })
}

fn put_batch(bytes: &mut Vec<u8>, batch: &Batch) {
    bytes.push(KIND_BATCH);
    put_id(bytes, batch.id);
    put_number(bytes, batch.freshness.after);
    put_number(bytes, batch.freshness.echo_us);
    put_optional(bytes, batch.freshness.age_us);
    put_optional(bytes, batch.freshness.settled_age_us);
    put_optional(bytes, batch.freshness.last_heard_age_us);
    put_number(bytes, batch.groups.len() as u64);
    for group in &batch.groups {
        put_number(bytes, u64::from(group.partition));
        put_number(bytes, group.components.len() as u64);
        group.components.iter().for_each(|component| component::put(bytes, component));
    }
}

fn batch(reader: &mut Reader<'_>) -> Result<Batch, WireError> {
    let id = id(reader)?;
    let freshness = BatchFreshness {
        after: reader.number()?,
        echo_us: reader.number()?,
        age_us: reader.optional()?,
        settled_age_us: reader.optional()?,
        last_heard_age_us: reader.optional()?,
    };
    let groups = reader.many("groups", BATCH_COMPONENTS_MAX, |reader| group(reader).map(Arc::new))?;
    let batch = Batch { id, freshness, groups };
    let (given, most) = (batch.components() as u64, BATCH_COMPONENTS_MAX as u64);
    if given <= most { Ok(batch) } else { Err(WireError::Range { field: "components", given, most }) }
}

fn group(reader: &mut Reader<'_>) -> Result<ComponentGroup, WireError> {
    let partition = reader.bounded("partition", u64::from(u16::MAX))?;
    let partition = u16::try_from(partition).map_err(|_| WireError::Number)?;
    let components = reader.many("components", usize::from(GATHER_MAX), component::get)?;
    Ok(ComponentGroup { partition, components })
}

fn refusal(byte: u8) -> Result<Refusal, WireError> {
    let known = REFUSALS.iter().find(|(_, known)| *known == byte);
    known.map(|(refusal, _)| *refusal).ok_or(WireError::Kind(byte))
}

#[cfg(test)]
mod tests;
