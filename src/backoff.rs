//! Pauses between tries that fail.

use std::time::Duration;

use crate::random::jittered;

/// Pauses that double with each failure in a row, up to a maximum. Each is lengthened randomly, so that callers that
/// failed together don't retry together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    /// By how many percent a pause may be longer.
    jitter: u8,
    last: Option<Duration>,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, longest: Duration, jitter: u8) -> Self {
        Self { first, longest, jitter, last: None }
    }

    /// The pause after another failure.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.last.map_or(self.first, |last| (last * 2).min(self.longest));
        self.last = Some(pause);
        jittered(pause, self.jitter)
    }

    /// After a success.
    pub(crate) fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_a_success() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(200), ms(1500), 0);
        let mut pauses = |count: usize| (0..count).map(|_| backoff.pause()).collect::<Vec<_>>();
        assert_eq!(pauses(5), [200, 400, 800, 1500, 1500].map(ms));
        backoff.reset();
        assert_eq!(backoff.pause(), ms(200));
        let mut backoff = Backoff::new(ms(200), ms(1500), 50);
        assert!((ms(200)..=ms(300)).contains(&backoff.pause()));
    }
}
