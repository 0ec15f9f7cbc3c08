//! How a replicator stands, for metrics and for whoever asks.

/// How a replicator stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicationStatus {
    /// Whether this process is the replicator of its region. One that is not knows nothing of what follows but counts.
    pub is_replicator: bool,
    /// Whether the region acts as a part of the whole; otherwise it spends from its standing parts.
    pub is_connected: bool,
    /// For how long the most silent region has been silent, by our own ears or by those of a peer, µs. Nothing while one was
    /// never heard of.
    pub last_heard_age_us: Option<u64>,
    /// How late the slowest of the other regions hears of this one, µs, as the region's replicator measures it: this process, or the
    /// one that is.
    pub lag_us: Option<u64>,
    /// Connections that were turned away without being known as a peer's: no certificate or a wrong one, another version, a
    /// region that is none of the peers, nonsense, too many.
    pub strangers: u64,
    /// Calls to the own origin that failed.
    pub origin_failures: u64,
    /// Components that were too large to be carried: other regions do not count them.
    pub oversized: u64,
    /// Rounds since the process started, with those that did not wait for their time because a region was heard of again.
    pub rounds: u64,
    /// After how many of them the region last became a part of the whole; nothing while it is not.
    pub connected_since_round: Option<u64>,
    /// The other regions, in the order of the configuration.
    pub peers: Vec<PeerStatus>,
}

/// How it stands with another region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Its name.
    pub region: String,
    /// Whether there is a connection to it.
    pub has_link: bool,
    /// What a change here takes to be known there, µs, measured: half a round trip and an interval, or more while nothing is
    /// acknowledged. Nothing before it has acknowledged everything once.
    pub lag_us: Option<u64>,
    /// For how long nothing was heard of it, µs. Nothing if it never was.
    pub last_heard_age_us: Option<u64>,
    /// Whether it was told the same of what has to be the same in every region. Nothing before it was heard of.
    pub agrees: Option<bool>,
    /// What was done since the process started.
    pub counts: PeerCounts,
}

/// What was done with another region since the process started. Bytes are those of frames, before they are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Bytes said to it, in both directions of connecting.
    pub bytes_sent: u64,
    /// Bytes heard from it.
    pub bytes_received: u64,
    /// Batches that it acknowledged.
    pub batches_sent: u64,
    /// Batches of it that were merged.
    pub batches_received: u64,
    /// Components in the former.
    pub components_sent: u64,
    /// Components in the latter.
    pub components_received: u64,
    /// Connections from or to it that one side turned away: a certificate, a region or a version that was not expected, or
    /// nonsense.
    pub refused: u64,
    /// What was spent here under limits that it decides, and that it was not told of in the end: for how often, not how much.
    pub charges_given_up: u64,
    /// The same of what was to be given back.
    pub refunds_given_up: u64,
}
