//! Searches for overrides with a `*`, which are the longest work of a request, in turns.
//!
//! A worker alternates between its sockets and the requests that are ready. In each such round, a
//! tenant may search [`SEARCHES_PER_ROUND`] times. Further searches of that tenant wait for the
//! next round. So requests of other tenants wait for a few searches, however many identifiers and
//! connections one tenant has. Nothing is late then, so its requests are not shed either.

use std::cell::{Cell, RefCell};

use tokio::task::yield_now;

use crate::auth::TenantIndex;

/// Searches of a tenant between two looks at the sockets. A search takes at most some 0.3 ms.
/// Higher: a request with many identifiers takes fewer rounds; others wait longer for theirs.
pub(crate) const SEARCHES_PER_ROUND: u32 = 4;

thread_local! {
    /// The number of the worker's round, as far as it matters: it rises after a tenant has waited.
    static ROUND: Cell<u64> = const { Cell::new(0) };
    /// By [`TenantIndex`].
    static SEARCHES: RefCell<Vec<TenantSearches>> = const { RefCell::new(Vec::new()) };
}

/// The searches of a tenant in one round.
#[derive(Clone, Copy, Debug, Default)]
struct TenantSearches {
    round: u64,
    count: u32,
}

/// Takes a search of the present round, if the tenant has one left.
pub(crate) fn take(tenant: TenantIndex) -> bool {
    SEARCHES.with_borrow_mut(|all| {
        if all.len() <= tenant {
            // There are as many tenants as the configuration has.
            all.resize(tenant + 1, TenantSearches::default());
        }
        let Some(searches) = all.get_mut(tenant) else { return false };
        if searches.round != ROUND.get() {
            *searches = TenantSearches { round: ROUND.get(), count: 0 };
        }
        let has_one = searches.count < SEARCHES_PER_ROUND;
        searches.count += u32::from(has_one);
        has_one
    })
}

/// Waits for the next round. The worker looks at its sockets first.
pub(crate) async fn next_round() {
    let round = ROUND.get();
    yield_now().await;
    // The first request that goes on begins the round for all that waited with it.
    if ROUND.get() == round {
        ROUND.set(round + 1);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use tokio::task::LocalSet;

    use super::*;

    /// Searches as often as a request with so many identifiers, and notes the tenant each time.
    async fn search(tenant: TenantIndex, count: usize, log: Rc<RefCell<Vec<TenantIndex>>>) {
        for _ in 0..count {
            while !take(tenant) {
                next_round().await;
            }
            log.borrow_mut().push(tenant);
        }
    }

    #[test]
    fn a_tenant_with_many_requests_delays_another_by_one_turn() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let log = Rc::new(RefCell::new(Vec::new()));
        let tasks = LocalSet::new();
        // Fewer than a worker polls between two looks at its sockets.
        (0..32).for_each(|_| drop(tasks.spawn_local(search(0, 100, Rc::clone(&log)))));
        drop(tasks.spawn_local(search(1, 12, Rc::clone(&log))));
        runtime.block_on(tasks);
        let log = log.take();
        assert_eq!(log.len(), 3_212);
        // The other tenant is done after three rounds, in each of which both have their turn.
        let last = log.iter().rposition(|tenant| *tenant == 1);
        assert!(last < Some(2 * 3 * SEARCHES_PER_ROUND as usize), "{last:?}");
    }
}
