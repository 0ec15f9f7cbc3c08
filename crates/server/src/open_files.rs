//! Room for connections: each is an open file, and the system gives a process only so many.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Open files besides connections and those of workers: standard streams, listening sockets, the
/// store, watched files, health checks, and connections that are accepted only to be refused.
const OTHER_FILES: u64 = 64;

/// Connections that a full admin listener accepts for health checks; one more evicts the oldest.
/// Higher: health checks get through more attempts to keep them out; more of [`OTHER_FILES`].
pub(crate) const HEALTH_CONNECTIONS_MAX: usize = 16;

/// Largest number of connections of the admin listener, which has few clients. Higher: more of them
/// at once; fewer for other clients if the system allows few files.
pub(crate) const ADMIN_CONNECTIONS_MAX: usize = 256;

/// Open files of a worker's runtime.
const FILES_PER_WORKER: u64 = 4;

/// The open files that a server may come to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenFiles {
    listeners: u64,
    connections_max: u64,
    others: u64,
}

impl OpenFiles {
    /// Of a server with so many listeners beside the admin's, of so many connections each.
    pub(crate) fn new(listeners: usize, connections_max: usize, workers: usize) -> Self {
        let [listeners, connections_max, workers] =
            [listeners, connections_max, workers].map(|count| u64::try_from(count).unwrap_or(u64::MAX));
        let others = OTHER_FILES.saturating_add(workers.saturating_mul(FILES_PER_WORKER));
        Self { listeners, connections_max, others }
    }

    /// Makes the system's limit as high as needed, or as is allowed. Gives the connections that
    /// each listener may have then: a connection beyond the limit could not even be refused.
    pub(crate) fn make_room(self) -> usize {
        let limit = getrlimit(Resource::Nofile);
        let allowed = self.raised(limit).map_or(u64::MAX, |to| match raise(limit, to) {
            Ok(()) => to,
            Err(error) => {
                tracing::warn!(%error, "the limit of open files could not be raised");
                limit.current.unwrap_or(u64::MAX)
            }
        });
        let connections_max = self.connections_within(allowed);
        if connections_max < self.connections_max {
            tracing::warn!(
                needed = self.needed(),
                allowed,
                connections_max,
                "the system allows fewer open files than connections_max needs, so each listener takes fewer \
                 connections: raise the hard limit of open files (ulimit -Hn, LimitNOFILE), or lower connections_max"
            );
        }
        usize::try_from(connections_max).unwrap_or(usize::MAX)
    }

    fn needed(self) -> u64 {
        let admin = self.connections_max.min(ADMIN_CONNECTIONS_MAX as u64);
        self.listeners.saturating_mul(self.connections_max).saturating_add(admin).saturating_add(self.others)
    }

    /// Returns the new limit, if it must be raised: the files needed, or the most that is allowed.
    fn raised(self, limit: Rlimit) -> Option<u64> {
        let needed = self.needed();
        let is_enough = limit.current.is_none_or(|now| now >= needed);
        (!is_enough).then(|| limit.maximum.map_or(needed, |most| most.min(needed)))
    }

    /// The connections that each listener may have with so many open files; at least one.
    fn connections_within(self, allowed: u64) -> u64 {
        let free = allowed.saturating_sub(self.others);
        let beside_admin = free.saturating_sub(ADMIN_CONNECTIONS_MAX as u64) / self.listeners.max(1);
        // Where there are so few that the admin's would be the most, all have the same.
        let each = beside_admin.max((free / (self.listeners + 1)).min(ADMIN_CONNECTIONS_MAX as u64));
        each.clamp(1, self.connections_max)
    }
}

fn raise(limit: Rlimit, to: u64) -> rustix::io::Result<()> {
    setrlimit(Resource::Nofile, Rlimit { current: Some(to), ..limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: OpenFiles = OpenFiles { listeners: 3, connections_max: 100, others: 50 };

    fn raised(current: Option<u64>, maximum: Option<u64>) -> Option<u64> {
        FILES.raised(Rlimit { current, maximum })
    }

    #[test]
    fn file_limit_is_raised_to_the_needed_or_allowed_number() {
        assert_eq!(FILES.needed(), 450);
        assert_eq!(raised(None, None), None);
        assert_eq!(raised(Some(450), Some(450)), None);
        assert_eq!(raised(Some(449), Some(1_000)), Some(450));
        assert_eq!(raised(Some(1), None), Some(450));
        assert_eq!(raised(Some(256), Some(300)), Some(300));
        assert_eq!(raised(Some(300), Some(300)), Some(300));
    }

    #[test]
    fn connections_stay_within_the_file_limit() {
        let within = |allowed| FILES.connections_within(allowed);
        assert_eq!((within(u64::MAX), within(450), within(449), within(250)), (100, 100, 99, 50));
        assert_eq!((within(51), within(0)), (1, 1), "a server that takes no connection is none");
        let many = OpenFiles { connections_max: 20_000, ..FILES };
        assert_eq!(many.needed(), 60_306);
        assert_eq!((many.connections_within(60_306), many.connections_within(20_000)), (20_000, 6_564));
    }
}
