//! What this process has cost so far, as Linux counts it.

use std::fs::read_to_string;
use std::time::Duration;

/// Ticks of a second in /proc, and bytes of a page: both are fixed where Linux runs on x86-64 and on most of ARM.
const TICKS: u64 = 100;
const PAGE: u64 = 4096;

/// Processor time of all threads, to a hundredth of a second.
///
/// # Panics
/// Where there is no /proc.
#[must_use]
pub fn processor_time() -> Duration {
    let stat = read_to_string("/proc/self/stat").expect("Linux's /proc");
    // The program's name comes before, in brackets; user and system time are the 14th and 15th fields.
    let fields = stat.rsplit_once(')').expect("a name in brackets").1;
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).map(number).sum();
    Duration::from_millis(ticks * 1000 / TICKS)
}

/// Memory in use that isn't swapped.
///
/// # Panics
/// Where there is no /proc.
#[must_use]
pub fn resident_bytes() -> u64 {
    let pages = read_to_string("/proc/self/statm").expect("Linux's /proc");
    pages.split_whitespace().nth(1).map(number).unwrap_or_default() * PAGE
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}
