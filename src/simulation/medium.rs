//! What servers and connections share: the time, how long messages take, and the record of what happens.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::chance::Chance;
use super::ledger::Ledger;
use super::resp::Requests;
use crate::lock::Lock;

pub(super) struct Medium {
    began: Instant,
    delays: Lock<Delays>,
    /// Everything written on each connection.
    written: Lock<Vec<Vec<u8>>>,
    record: Lock<Trace>,
    ledger: Lock<Ledger>,
    traced: bool,
}

struct Delays {
    chance: Chance,
    /// The range, in milliseconds.
    range: (u64, u64),
}

/// A digest of all events, in order.
struct Trace {
    digest: u64,
    events: u64,
}

impl Medium {
    pub(super) fn new(chance: Chance) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            delays: Lock::new(Delays { chance, range: (0, 2) }),
            written: Lock::default(),
            record: Lock::new(Trace { digest: 0xcbf2_9ce4_8422_2325, events: 0 }),
            ledger: Lock::default(),
            traced: std::env::var_os("TOLLGATE_SIMULATE_TRACE").is_some(),
        })
    }

    /// When something sent now arrives: after everything sent before it.
    pub(super) fn arrival(&self, last: Option<Instant>) -> Instant {
        let Delays { chance, range: (first, end) } = &mut *self.delays.lock();
        // Sometimes a message is lost and sent again.
        let again = if chance.one_in(200) { 30 } else { 0 };
        let at = Instant::now() + chance.ms(*first, *end) + Duration::from_millis(again);
        last.map_or(at, |last| last.max(at))
    }

    pub(super) fn set_delay(&self, range: (u64, u64)) {
        self.delays.lock().range = range;
    }

    /// The number of a new connection.
    pub(super) fn connection(&self) -> u64 {
        let mut written = self.written.lock();
        written.push(Vec::new());
        written.len() as u64 - 1
    }

    pub(super) fn wrote(&self, connection: u64, bytes: &[u8]) {
        self.written.lock()[connection as usize].extend_from_slice(bytes);
    }

    /// Each request that was written completely, and whether none was cut off.
    pub(super) fn requests(&self) -> (Vec<Vec<Vec<u8>>>, bool) {
        let (mut all, mut whole) = (Vec::new(), true);
        for written in &*self.written.lock() {
            let mut requests = Requests::default();
            requests.push(written);
            all.extend(std::iter::from_fn(|| requests.next()));
            whole &= !requests.is_half_way();
        }
        (all, whole)
    }

    pub(super) fn ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The servers' time of day.
    pub(super) fn now_us(&self) -> u64 {
        1_700_000_000_000_000 + u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn record(&self, what: &[u64], bytes: &[u8]) {
        let now = self.began.elapsed().as_nanos() as u64;
        let mut record = self.record.lock();
        record.events += 1;
        // FNV-1a, by words.
        let mut mix = |word: u64| record.digest = (record.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        mix(now);
        what.iter().for_each(|word| mix(*word));
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
        rest.iter().for_each(|byte| mix(u64::from(*byte)));
        drop(record);
        if self.traced && !what.is_empty() {
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(160)]).replace("\r\n", " ");
            eprintln!("{:>6} {what:?} {shown}", self.ms());
        }
    }

    /// Records an event described in words.
    pub(super) fn note(&self, what: impl FnOnce() -> String) {
        let what = what();
        self.record(&[], what.as_bytes());
        if self.traced {
            eprintln!("{:>6} {what}", self.ms());
        }
    }

    /// A digest of all events so far, and their number.
    pub(super) fn digest(&self) -> (u64, u64) {
        let record = self.record.lock();
        (record.digest, record.events)
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock()
    }
}
