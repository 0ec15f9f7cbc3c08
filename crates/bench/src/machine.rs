//! Readings of the machine: time, CPU time of a thread, resident memory, huge pages, cores.

use std::fs;
use std::num::NonZeroUsize;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

pub(crate) use tidegate_load::now;

/// CPU time that the calling thread has used so far.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time that all threads of this process have used so far.
pub(crate) fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Resident memory of this process.
pub(crate) fn resident_bytes() -> Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm").context("/proc/self/statm")?;
    let pages: u64 = statm.split_whitespace().nth(1).context("statm has no resident pages")?.parse()?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Memory of this process that sits on huge pages.
pub(crate) fn huge_page_bytes() -> Result<u64> {
    kib_field("/proc/self/smaps_rollup", "AnonHugePages:")
}

/// Memory that the machine could still give.
pub(crate) fn available_bytes() -> Result<u64> {
    kib_field("/proc/meminfo", "MemAvailable:")
}

pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// Makes this process the first choice of the kernel's OOM killer, before any neighbour.
pub(crate) fn offer_to_oom_killer() {
    // Fails only in unusual sandboxes. The kernel then makes its usual choice.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
}

/// A number of a file in which each line has a name and so many KiB.
pub(crate) fn kib_field(path: &str, field: &str) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    let kib: u64 = number.with_context(|| format!("{path} has no {field}"))?.parse()?;
    Ok(kib * 1024)
}
