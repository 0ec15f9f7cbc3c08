//! Names of requests: unique, and cheap to make.

use std::cell::RefCell;
use std::fmt::Write;

use arrayvec::ArrayString;
use serde::{Serialize, Serializer};

/// Length of an id: `req_`, 16 digits of the thread, and up to 16 of the request's number on that
/// thread.
const BYTES_MAX: usize = 36;

/// The name of a request.
#[derive(Debug)]
pub(super) struct RequestId(ArrayString<BYTES_MAX>);

/// The common prefix of a thread's ids, and their number so far.
struct Series {
    prefix: ArrayString<20>,
    given: u64,
}

thread_local! {
    static SERIES: RefCell<Series> = RefCell::new(Series::new());
}

impl Series {
    #[expect(
        clippy::disallowed_methods,
        reason = "names must differ from those of other threads and servers"
    )]
    fn new() -> Self {
        let mut bytes = [0; 8];
        // A system without random bytes could not have started a server; names would only be less
        // unique.
        let _ = getrandom::fill(&mut bytes);
        let mut prefix = ArrayString::new();
        let _ = write!(prefix, "req_{:016x}", u64::from_le_bytes(bytes));
        Self { prefix, given: 0 }
    }
}

impl RequestId {
    pub(super) fn next() -> Self {
        SERIES.with_borrow_mut(|series| {
            series.given += 1;
            let mut name = ArrayString::new();
            // Both parts fit.
            let _ = name.try_push_str(&series.prefix);
            push_hex(&mut name, series.given);
            Self(name)
        })
    }
}

/// Appends at least eight digits, so that the ids of a thread sort in order for a long time.
fn push_hex(name: &mut ArrayString<BYTES_MAX>, number: u64) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let count = (64 - number.leading_zeros()).div_ceil(4).max(8);
    for at in (0..count).rev() {
        let digit = DIGITS[((number >> (4 * at)) & 0xf) as usize];
        let _ = name.try_push(char::from(digit));
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_differ_on_one_thread_and_between_threads() {
        let names = || (0..1_000).map(|_| RequestId::next().0.to_string()).collect::<Vec<_>>();
        let here = names();
        let there = std::thread::spawn(names).join().expect("no panic");
        assert!(here.iter().all(|name| name.starts_with("req_") && name.len() == 28), "{}", here[0]);
        assert_eq!(here.iter().chain(&there).collect::<HashSet<_>>().len(), 2_000);
    }

    #[test]
    fn the_largest_number_fits() {
        let mut name = ArrayString::new();
        name.push_str(&Series::new().prefix);
        push_hex(&mut name, u64::MAX);
        assert!(name.ends_with("ffffffffffffffff") && name.len() == BYTES_MAX);
    }
}
