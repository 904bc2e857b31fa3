//! This process's resource usage so far, as Linux counts it.

use std::fs::read_to_string;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Page size of Linux on x86-64 and most ARM machines.
const PAGE: u64 = 4096;

/// Processor time of all threads.
///
/// # Panics
/// If the clock returns a negative time.
#[must_use]
pub fn processor_time() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().expect("a time that isn't negative")
}

/// Processor time of this thread.
///
/// # Panics
/// If the clock returns a negative time.
#[must_use]
pub fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a time that isn't negative")
}

/// Memory in use that isn't swapped.
///
/// # Panics
/// If there is no /proc.
#[must_use]
pub fn resident_bytes() -> u64 {
    let pages = read_to_string("/proc/self/statm").expect("Linux's /proc");
    let resident: u64 = pages.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    resident * PAGE
}
