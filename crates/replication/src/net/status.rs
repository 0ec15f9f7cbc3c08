//! Status of a replicator, for metrics and callers.

/// Status of a replicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicationStatus {
    /// Whether this node is the replicator of its region. If not, only `lag_us`, `agrees` and the
    /// counts are known.
    pub is_replicator: bool,
    /// Whether the region is connected. Otherwise it spends only its regional shares.
    pub is_connected: bool,
    /// Highest last-heard age of any region, measured here or by a peer, µs. `None` while a region
    /// has never been heard.
    pub last_heard_age_us: Option<u64>,
    /// Lag to the slowest peer, µs, as measured by the region's replicator: this node or another.
    pub lag_us: Option<u64>,
    /// Connections refused before they were identified as a peer's: missing or wrong certificate,
    /// other version, unknown region, invalid frame, too many connections.
    pub strangers: u64,
    /// Calls to the own origin that failed.
    pub origin_failures: u64,
    /// Components that were too large to be carried: other regions do not count them.
    pub oversized: u64,
    /// Rounds since the start of this node. Includes early rounds, which start when a region is
    /// heard again.
    pub rounds: u64,
    /// Value of `rounds` when the region last became connected. `None` if it was not connected in
    /// the last round.
    pub connected_since_round: Option<u64>,
    /// The other regions, in the order of the configuration.
    pub peers: Vec<PeerStatus>,
}

/// Status of a peer region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Its name.
    pub region: String,
    /// Whether there is a connection to it.
    pub has_link: bool,
    /// Measured time until the peer knows of a change here, µs: half a round trip and an interval,
    /// or more while acknowledgements are missing. `None` until the peer has acknowledged
    /// everything once.
    pub lag_us: Option<u64>,
    /// Age of the newest state known of the peer, µs. `None` if it was never heard.
    pub last_heard_age_us: Option<u64>,
    /// Whether the peer has equal settings where all regions must agree. `None` before its first
    /// greeting.
    pub agrees: Option<bool>,
    /// Counters since the start of this node.
    pub counts: PeerCounts,
}

/// Counters for one peer since the start of this node. Bytes are those of frames before encryption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Bytes sent to it, on connections that either side opened.
    pub bytes_sent: u64,
    /// Bytes received from it.
    pub bytes_received: u64,
    /// Batches that it acknowledged.
    pub batches_sent: u64,
    /// Merged batches of this peer.
    pub batches_received: u64,
    /// Components in the former.
    pub components_sent: u64,
    /// Components in the latter.
    pub components_received: u64,
    /// Connections from or to it that one side turned away: a certificate, a region or a version
    /// that was not expected, or nonsense.
    pub refused: u64,
    /// Charges under limits owned by this peer that were never acknowledged and are given up:
    /// deliveries, not units.
    pub charges_given_up: u64,
    /// Refunds given up in the same way.
    pub refunds_given_up: u64,
}
