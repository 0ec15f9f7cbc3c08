//! The settings of an engine.

use crate::origin::CROSS_REGION_LIFE_US_MAX;

/// Times and sizes of an engine. Every time is in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// Interval between reports of usage. Shorter: fresher counts; more calls.
    pub flush_us: u64,
    /// Life of a grant. Longer: a node continues longer without the origin; the grant of a dead
    /// node is lost for longer.
    pub life_us: u64,
    /// The same for a key that was recently denied.
    pub strict_life_us: u64,
    /// Upper bound of both lives for a limit that several regions count together. Shorter: fewer
    /// units pass before the regions know of each other's usage; more calls.
    pub cross_region_life_us: u64,
    /// How long after a denial a key counts as recently denied.
    pub strict_us: u64,
    /// Time that a request waits for the origin. Longer: fewer decisions without the origin; slower
    /// answers when it is slow.
    pub deadline_us: u64,
    /// Time after which a call that requests wait for is hedged; at most one call in ten, and 20 in
    /// a second. Shorter: a shorter tail; more calls.
    pub hedge_us: u64,
    /// Time after which a call without a reply is sent again; doubled each time up to
    /// `retry_us_max`.
    pub retry_us: u64,
    /// The longest time between two attempts.
    pub retry_us_max: u64,
    /// Meter updates per second, where a call counts as three. Beyond, intervals and lives are
    /// stretched, up to five times as long. Higher: fresher counts; more work for the origin. A
    /// Redis does 20,000 to 40,000 per second, for all nodes together.
    pub updates_per_s_max: u64,
    /// Calls that may be in flight and not late. More: distant partitions wait less for each other;
    /// a longer queue at an overloaded store, where no call can leave it any more.
    pub calls_max: usize,
    /// Meters that the engine tracks. Beyond this, the origin decides requests one by one; refunds,
    /// and units admitted without the origin, are dropped and counted. Higher: more memory.
    pub tracked_max: usize,
    /// Requests that may wait for the origin. Beyond, their class decides at once. Higher: the
    /// origin decides more of a sudden crowd; more memory, about a kilobyte for each.
    pub waiting_max: usize,
    /// Smallest number of nodes for a node share, used before this node knows of the others.
    pub processes: u32,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            flush_us: 100_000,
            life_us: 1_000_000,
            strict_life_us: 300_000,
            cross_region_life_us: CROSS_REGION_LIFE_US_MAX,
            strict_us: 5_000_000,
            deadline_us: 20_000,
            hedge_us: 3_000,
            retry_us: 100_000,
            retry_us_max: 1_000_000,
            updates_per_s_max: 5_000,
            calls_max: 16,
            tracked_max: 1 << 18,
            waiting_max: 1 << 15,
            processes: 1,
        }
    }
}
