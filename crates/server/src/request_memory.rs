//! One budget of memory for all requests that have arrived in part: HTTP heads and bodies, RESP
//! requests, gRPC messages.
//!
//! A tenant may hold as much as it leaves free. So one slow tenant gets at most half of the budget,
//! and two get a third each: a share for the next one is always left. Clients without a known
//! credential share a quarter of the budget by the same rule, each by its address.
//!
//! A request that arrives with one read is never charged. A connection charges only before it reads
//! the rest of a request, in whole steps of [`CHARGE_BYTES`].

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_rules::canonical;

use crate::auth::TenantIndex;
use crate::metrics::MemoryLimit;

/// Bytes of an incomplete request that are not charged, as a part of the fixed cost of a
/// connection. Higher: fewer charges of ordinary clients; more memory beside the budget.
const FREE_BYTES: usize = 2 << 10;

/// Step of a charge. Higher: fewer charges while a body arrives; coarser accounting.
const CHARGE_BYTES: usize = 4 << 10;

/// The part of the budget for clients without a known credential: one in so many.
const STRANGERS_PART: usize = 4;

/// The memory for requests that have arrived in part.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    bytes_max: usize,
    used: AtomicUsize,
    /// By [`TenantIndex`].
    tenants: Box<[AtomicUsize]>,
    strangers: Mutex<Strangers>,
    refused: [AtomicU64; MemoryLimit::ALL.len()],
}

/// The charges of clients without a known credential. An address without a charge has no entry.
#[derive(Debug, Default)]
struct Strangers {
    used: usize,
    addresses: HashMap<IpAddr, usize>,
}

/// The party that a charge counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Payer {
    Address(IpAddr),
    Tenant(TenantIndex),
}

impl RequestMemory {
    /// A budget of `bytes_max` for so many tenants.
    pub(crate) fn new(bytes_max: usize, tenants: usize) -> Self {
        Self {
            bytes_max,
            used: AtomicUsize::new(0),
            tenants: (0..tenants).map(|_| AtomicUsize::new(0)).collect(),
            strangers: Mutex::default(),
            refused: Default::default(),
        }
    }

    /// The charged bytes.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The refused charges, by the limit that refused them.
    pub(crate) fn refused(&self, limit: MemoryLimit) -> u64 {
        self.refused[limit as usize].load(Ordering::Relaxed)
    }

    fn charge(&self, payer: Payer, bytes: usize) -> Result<(), MemoryLimit> {
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let charged = match self.bytes_max.checked_sub(used) {
            None => Err(MemoryLimit::Total),
            Some(free) => match payer {
                Payer::Tenant(tenant) => self.charge_tenant(tenant, bytes, free),
                Payer::Address(address) => self.charge_address(address, bytes),
            },
        };
        charged.inspect_err(|limit| {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            self.refused[*limit as usize].fetch_add(1, Ordering::Relaxed);
        })
    }

    fn charge_tenant(&self, tenant: TenantIndex, bytes: usize, free: usize) -> Result<(), MemoryLimit> {
        // Tenants are counted from the same list as principals.
        let Some(held) = self.tenants.get(tenant) else { return Err(MemoryLimit::Tenant) };
        if held.fetch_add(bytes, Ordering::Relaxed) + bytes > free {
            held.fetch_sub(bytes, Ordering::Relaxed);
            return Err(MemoryLimit::Tenant);
        }
        Ok(())
    }

    fn charge_address(&self, address: IpAddr, bytes: usize) -> Result<(), MemoryLimit> {
        let mut strangers = self.strangers();
        let Some(free) = (self.bytes_max / STRANGERS_PART).checked_sub(strangers.used + bytes) else {
            return Err(MemoryLimit::Total);
        };
        let held = strangers.addresses.get(&address).copied().unwrap_or_default() + bytes;
        if held > free {
            return Err(MemoryLimit::Address);
        }
        strangers.addresses.insert(address, held);
        strangers.used += bytes;
        Ok(())
    }

    fn release(&self, payer: Payer, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        match payer {
            Payer::Tenant(tenant) => {
                if let Some(held) = self.tenants.get(tenant) {
                    held.fetch_sub(bytes, Ordering::Relaxed);
                }
            }
            Payer::Address(address) => {
                let mut strangers = self.strangers();
                strangers.used -= bytes;
                let left = strangers.addresses.get(&address).map_or(0, |held| held - bytes);
                if left == 0 {
                    strangers.addresses.remove(&address);
                } else {
                    strangers.addresses.insert(address, left);
                }
            }
        }
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        // The lock is held for a few additions, which do not panic.
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the address that a client counts by. One client of IPv6 has a whole /64.
fn network_of(address: IpAddr) -> IpAddr {
    match canonical(address) {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// The reason why the rest of a request is not awaited any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFailure {
    /// Its memory would exceed a limit.
    Memory(MemoryLimit),
    /// It took longer than `request_timeout`.
    TimedOut,
}

impl fmt::Display for ReadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory(MemoryLimit::Tenant) => {
                "request_memory: incomplete requests of this tenant already hold as much as is free; \
                 send requests at once, or raise it"
            }
            Self::Memory(MemoryLimit::Address) => {
                "request_memory: incomplete requests from this address already hold as much as is free \
                 before authentication; send requests at once, or raise it"
            }
            Self::Memory(MemoryLimit::Total) => {
                "request_memory: incomplete requests of all clients fill it; retry later"
            }
            Self::TimedOut => "request_timeout: the request did not arrive completely in time",
        })
    }
}

impl std::error::Error for ReadFailure {}

/// The bytes of one connection, or of one call, that wait for the rest of their request.
#[derive(Debug)]
pub(crate) struct PartialRequest {
    memory: Arc<RequestMemory>,
    address: IpAddr,
    /// The tenant that pays; without one, the address pays.
    tenant: Cell<Option<TenantIndex>>,
    held: Cell<usize>,
    charged: Cell<usize>,
    /// Whether a surface waits for the rest, even if no byte is held.
    is_awaited: Cell<bool>,
    failure: Cell<Option<ReadFailure>>,
}

impl PartialRequest {
    pub(crate) fn new(memory: &Arc<RequestMemory>, address: IpAddr) -> Self {
        Self {
            memory: Arc::clone(memory),
            address: network_of(address),
            tenant: Cell::new(None),
            held: Cell::new(0),
            charged: Cell::new(0),
            is_awaited: Cell::new(false),
            failure: Cell::new(None),
        }
    }

    /// Another one of the same address, for a call of its connection.
    pub(crate) fn of_same_address(&self) -> Self {
        Self::new(&self.memory, self.address)
    }

    /// Whether a request has begun to arrive, and its rest is awaited.
    #[inline]
    pub(crate) fn is_begun(&self) -> bool {
        self.held.get() > 0 || self.is_awaited.get()
    }

    /// Sets whether a surface waits for the rest. Bytes that arrived before a `100 Continue` no
    /// longer show it.
    #[inline]
    pub(crate) fn await_rest(&self, is_awaited: bool) {
        self.is_awaited.set(is_awaited);
    }

    /// Adds bytes. They are charged before the rest is read.
    #[inline]
    pub(crate) fn add(&self, bytes: usize) {
        self.held.set(self.held.get() + bytes);
    }

    /// Sets the bytes that wait. Releases the charge of others.
    #[inline]
    pub(crate) fn set(&self, bytes: usize) {
        self.held.set(bytes);
        if bytes == 0 {
            self.release();
            self.tenant.set(None);
        } else if self.charged.get() > 0 {
            self.release_above(self.owed());
        }
    }

    /// Lets a tenant pay, also for the bytes that its address has paid for.
    pub(crate) fn belongs_to(&self, tenant: TenantIndex) {
        if self.tenant.get() != Some(tenant) {
            // Charged again before the next wait.
            self.release();
            self.tenant.set(Some(tenant));
        }
    }

    /// Charges the bytes that wait.
    #[inline]
    pub(crate) fn charge(&self) -> Result<(), ReadFailure> {
        if self.held.get() > FREE_BYTES { self.charge_steps() } else { Ok(()) }
    }

    /// Returns the charge for the bytes that wait.
    fn owed(&self) -> usize {
        let held = self.held.get();
        if held > FREE_BYTES { held.next_multiple_of(CHARGE_BYTES) } else { 0 }
    }

    fn charge_steps(&self) -> Result<(), ReadFailure> {
        let (owed, charged) = (self.owed(), self.charged.get());
        if owed > charged {
            let more = self.memory.charge(self.payer(), owed - charged);
            more.map_err(|limit| self.fail(ReadFailure::Memory(limit)))?;
            self.charged.set(owed);
        }
        Ok(())
    }

    /// Notes why the rest is not awaited, for the surface that answers.
    pub(crate) fn fail(&self, failure: ReadFailure) -> ReadFailure {
        self.failure.set(Some(failure));
        failure
    }

    /// Returns the reason for which the last read failed, once.
    pub(crate) fn take_failure(&self) -> Option<ReadFailure> {
        self.failure.take()
    }

    fn payer(&self) -> Payer {
        self.tenant.get().map_or(Payer::Address(self.address), Payer::Tenant)
    }

    fn release_above(&self, owed: usize) {
        let charged = self.charged.get();
        if charged > owed {
            self.charged.set(owed);
            self.memory.release(self.payer(), charged - owed);
        }
    }

    #[inline]
    fn release(&self) {
        let charged = self.charged.take();
        if charged > 0 {
            self.memory.release(self.payer(), charged);
        }
    }
}

impl Drop for PartialRequest {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const ONE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

    /// Charges steps until one is refused. Returns the requests, and the limit that refused.
    fn fill(
        memory: &Arc<RequestMemory>,
        address: IpAddr,
        tenant: Option<TenantIndex>,
    ) -> (Vec<PartialRequest>, ReadFailure) {
        let mut requests = Vec::new();
        loop {
            let request = PartialRequest::new(memory, address);
            if let Some(tenant) = tenant {
                request.belongs_to(tenant);
            }
            request.add(CHARGE_BYTES);
            match request.charge() {
                Ok(()) => requests.push(request),
                Err(failure) => return (requests, failure),
            }
        }
    }

    #[test]
    fn each_tenant_leaves_a_share_for_the_next() {
        let memory = Arc::new(RequestMemory::new(120 * CHARGE_BYTES, 3));
        let (first, failure) = fill(&memory, ONE, Some(0));
        assert_eq!((first.len(), failure), (60, ReadFailure::Memory(MemoryLimit::Tenant)));
        let (second, _) = fill(&memory, ONE, Some(1));
        let (third, _) = fill(&memory, ONE, Some(2));
        assert_eq!((second.len(), third.len()), (30, 15));
        assert_eq!(memory.used(), 105 * CHARGE_BYTES);
        assert_eq!(memory.refused(MemoryLimit::Tenant), 3);
        drop((first, second, third));
        assert_eq!(memory.used(), 0);
        assert_eq!(fill(&memory, ONE, Some(2)).0.len(), 60);
    }

    #[test]
    fn addresses_share_a_quarter_before_authentication() {
        let memory = Arc::new(RequestMemory::new(160 * CHARGE_BYTES, 1));
        let (first, failure) = fill(&memory, ONE, None);
        assert_eq!((first.len(), failure), (20, ReadFailure::Memory(MemoryLimit::Address)));
        let (other, _) = fill(&memory, OTHER, None);
        assert_eq!(other.len(), 10);
        first[0].belongs_to(0);
        assert_eq!(first[0].charge(), Ok(()), "the tenant pays now");
        assert_eq!(fill(&memory, ONE, None).0.len(), 0, "29 of 40 are held, 19 of them by this address");
        drop((first, other));
        assert_eq!(memory.used(), 0);
        assert!(memory.strangers().addresses.is_empty());
    }

    #[test]
    fn a_charge_shrinks_with_the_bytes_that_wait() {
        let memory = Arc::new(RequestMemory::new(100 * CHARGE_BYTES, 1));
        let request = PartialRequest::new(&memory, ONE);
        for (bytes, steps) in [(10 * CHARGE_BYTES, 10), (CHARGE_BYTES + 1, 2), (FREE_BYTES, 0), (1, 0)] {
            request.set(bytes);
            assert_eq!((request.charge(), memory.used()), (Ok(()), steps * CHARGE_BYTES), "{bytes}");
        }
    }

    #[test]
    fn small_or_whole_requests_are_not_charged() {
        let memory = Arc::new(RequestMemory::new(CHARGE_BYTES, 1));
        let request = PartialRequest::new(&memory, ONE);
        request.add(FREE_BYTES);
        assert_eq!((request.charge(), memory.used()), (Ok(()), 0));
        request.add(1 << 20);
        request.set(0);
        assert_eq!((request.charge(), memory.used()), (Ok(()), 0));
        request.add(1 << 20);
        let failure = ReadFailure::Memory(MemoryLimit::Total);
        assert_eq!(request.charge(), Err(failure));
        assert_eq!((request.take_failure(), request.take_failure()), (Some(failure), None));
        assert_eq!((memory.used(), memory.refused(MemoryLimit::Total)), (0, 1));
    }
}
