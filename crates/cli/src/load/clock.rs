//! One clock for the whole run, and how far the engine's clock may be from it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tollgate::{Algorithm, Limit, Limiter, Rule};

use crate::output::micros;

/// The time of day during a run: read once, then advanced by a monotonic clock.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    began: Instant,
    began_us: u64,
    /// The name of the rule that the clock is read with: the run's own, so that its keys are removed with the run's.
    name: String,
}

/// The most attempts to read this machine's clocks at the same instant.
const TRIES: usize = 50;
/// How long an engine's clock is read at most, as on a busy machine, to find whether it is near.
const PATIENCE: Duration = Duration::from_secs(15);
/// How many readings in a row show that a clock is far off.
const SAME: u32 = 5;
/// How many keys are used to find clocks: each node of a small cluster likely has one of them.
const KEYS: usize = 24;

impl Timeline {
    pub(super) fn now(name: &str) -> Self {
        // Two clocks can't be read at the same instant: of several pairs of readings, the closest is used.
        let readings = (0..TRIES).map(|_| {
            let (began, time) = (Instant::now(), SystemTime::now());
            (began.elapsed(), began, time)
        });
        let fallback = (Duration::ZERO, Instant::now(), SystemTime::now());
        let (_, began, time) = readings.min_by_key(|(apart, ..)| *apart).unwrap_or(fallback);
        let began_us = micros(time.duration_since(UNIX_EPOCH).unwrap_or_default());
        Self { began, began_us, name: name.to_owned() }
    }

    /// The time at an instant, in microseconds since the epoch.
    pub(super) fn at(&self, instant: Instant) -> u64 {
        self.began_us + micros(instant.saturating_duration_since(self.began))
    }

    /// The most that the engine's clock may be off from this one; in a cluster, that of the furthest node. Searches no
    /// further once the offset is known to be less than `enough`, or a node is found whose offset isn't.
    ///
    /// A decision stores the time at which it was made, which lies between its request and its reply.
    pub(super) async fn offset(&self, limiter: &Limiter, enough: Duration) -> Result<Duration, String> {
        let rule = self.rule()?;
        let mut offsets = Vec::with_capacity(KEYS);
        for key in keys() {
            offsets.push(self.offset_by(limiter, &rule, &key, enough).await);
            if offsets.last().is_some_and(|offset| offset.as_ref().is_ok_and(|offset| *offset >= enough)) {
                break;
            }
        }
        // A node that is gone makes no more decisions.
        match offsets.iter().flatten().max() {
            Some(offset) => Ok(*offset),
            None => offsets.pop().unwrap_or_else(|| Err("no key to read it with".to_owned())),
        }
    }

    /// Whether every clock can be read.
    pub(super) async fn is_told(&self, limiter: &Limiter) -> bool {
        let Ok(rule) = self.rule() else { return false };
        for key in keys() {
            if limiter.acquire(&rule, &key).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Each decision bounds the engine's clock from both sides. A delayed request or reply widens only one bound, so
    /// the closest of all bounds count: a busy machine needs more decisions, but no quiet moment.
    async fn offset_by(&self, limiter: &Limiter, rule: &Rule, key: &str, enough: Duration) -> Result<Duration, String> {
        let (mut ahead, mut behind, mut far) = (i64::MAX, i64::MAX, 0);
        let began = Instant::now();
        loop {
            let sent = self.at(Instant::now());
            limiter.acquire(rule, key).await.map_err(|error| error.to_string())?;
            let answered = self.at(Instant::now());
            let states = limiter.inspect(rule, key).await.map_err(|error| error.to_string())?;
            let fields = states.iter().flat_map(|state| &state.fields);
            let decided = fields.filter(|(name, _)| *name == "time_us").map(|(_, time)| *time).next();
            let decided = decided.unwrap_or_default();
            let after_sent = decided.saturating_sub_unsigned(sent);
            let before_answer = 0_i64.saturating_add_unsigned(answered).saturating_sub(decided);
            let is_late = began.elapsed() > PATIENCE;
            // A clock that is far off stays so. A single such reading may be of the state of another decision, after a
            // server lost its keys, or of a policy in its place.
            let is_far = after_sent.min(before_answer) <= -i64::try_from(micros(enough)).unwrap_or(i64::MAX);
            far = if is_far { far + 1 } else { 0 };
            if is_far && far < SAME && !is_late {
                continue;
            }
            (ahead, behind) = (ahead.min(after_sent), behind.min(before_answer));
            let most = ahead.unsigned_abs().max(behind.unsigned_abs());
            if most < micros(enough) || is_far || is_late {
                return Ok(Duration::from_micros(most));
            }
        }
    }

    fn rule(&self) -> Result<Rule, String> {
        let limit = Limit::builder(Algorithm::TokenBucket, 1_000_000, Duration::from_secs(1)).build();
        limit.and_then(|limit| Rule::new(&self.name, limit)).map_err(|error| error.to_string())
    }
}

fn keys() -> impl Iterator<Item = String> {
    (0..KEYS).map(|key| format!("clock {key}"))
}
