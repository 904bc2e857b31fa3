//! Stops asking a Redis that doesn't answer, and probes it now and then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::error::Error;
use crate::lock::Lock;
use crate::telemetry;

/// Consecutive failed attempts before the breaker opens.
const FAILURES: u32 = 5;
/// How long it is open at first.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, before jitter. Together with a connection attempt that began just before the server came back, a
/// server is used again about a second after it is back.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A probe that takes longer than this keeps no other call from probing: its future may no longer be polled.
const LONGEST_PROBE: Duration = Duration::from_secs(2);
/// After each failed probe, twice as long; longer by up to a quarter, so that processes don't all probe at once.
const PAUSES: Backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE, 25);

/// Whether calls are sent to a [`Redis`](crate::Redis).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BreakerState {
    /// Calls are sent.
    Closed,
    /// Calls aren't sent for this long, and the policy answers at once: five attempts in a row have failed, or nothing
    /// was answered for a while, not even on a new connection.
    Open(Duration),
    /// One call is testing whether Redis answers again.
    Probing,
}

/// An admitted call.
#[derive(Debug)]
#[must_use]
pub(crate) struct Admission {
    /// Set for the call that probes Redis. When it ends, the next may probe, if the breaker is still open.
    probes: Option<(Arc<CircuitBreaker>, u64)>,
}

#[derive(Debug, Default)]
pub(super) struct CircuitBreaker {
    /// Whether the state must be checked: almost never.
    troubled: AtomicBool,
    state: Lock<State>,
}

#[derive(Debug)]
struct State {
    /// Consecutive.
    failures: u32,
    pauses: Backoff,
    open: Option<Open>,
    /// The call that is probing, and since when.
    probing: Option<(u64, Instant)>,
    /// How many calls have probed so far.
    probes: u64,
    /// Whether its runtime has ended: it is no longer reported.
    ended: bool,
}

#[derive(Debug)]
struct Open {
    until: Instant,
    /// The error of calls refused until then and, as `probed`, while one call probes Redis. Made once: there may be
    /// many.
    unsent: Error,
    probed: Error,
}

impl CircuitBreaker {
    /// Admits a call, or says why not.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Admission, Error> {
        if !self.is_troubled() {
            return Ok(Admission { probes: None });
        }
        let mut state = self.state.lock();
        let now = Instant::now();
        let Some(open) = &state.open else { return Ok(Admission { probes: None }) };
        if now < open.until {
            return Err(open.unsent.clone().with_wait(open.until - now));
        }
        if state.probing.is_some_and(|(_, since)| now < since + LONGEST_PROBE) {
            return Err(open.probed.clone());
        }
        state.probes += 1;
        state.probing = Some((state.probes, now));
        Ok(Admission { probes: Some((Arc::clone(self), state.probes)) })
    }

    /// The same check for an admitted call, before it connects.
    pub(super) fn check(&self) -> Result<(), Error> {
        if !self.is_troubled() {
            return Ok(());
        }
        let (state, now) = (self.state.lock(), Instant::now());
        match &state.open {
            Some(open) if now < open.until => Err(open.unsent.clone().with_wait(open.until - now)),
            _ => Ok(()),
        }
    }

    /// Whether the next answer changes anything: calls have failed, or it is open.
    pub(super) fn is_troubled(&self) -> bool {
        self.troubled.load(Ordering::Relaxed)
    }

    /// There is a new connection: the next call may probe over it at once.
    pub(super) fn connected(&self) {
        if self.is_troubled()
            && let Some(open) = &mut self.state.lock().open
        {
            open.until = open.until.min(Instant::now());
        }
    }

    /// Redis answered.
    pub(super) fn answered(&self) {
        if self.is_troubled() {
            let before = {
                let mut state = self.state.lock();
                self.troubled.store(false, Ordering::Relaxed);
                let State { probes, ended, .. } = *state;
                std::mem::replace(&mut *state, State { probes, ended, ..State::default() })
            };
            // Outside the lock: a subscriber may ask for the breaker's state.
            if before.is_reported() {
                telemetry::breaker_closed();
            }
        }
    }

    /// One attempt failed: connecting failed, a connection broke or answered nothing, or all calls that were sent
    /// together got errors of an outage. If that opened the breaker,
    /// returns the error for calls waiting to be sent.
    pub(super) fn failed(&self, error: &Error) -> Option<Error> {
        self.open_if(error, |state| {
            state.failures = state.failures.saturating_add(1);
            match &state.open {
                // Failures of calls that were in flight when the breaker opened say nothing new.
                Some(open) => state.probing.is_some() || open.until <= Instant::now(),
                None => state.failures >= FAILURES,
            }
        })
    }

    /// Nothing is answered on any connection.
    pub(super) fn away(&self, error: &Error) -> Option<Error> {
        self.open_if(error, |state| state.open.as_ref().is_none_or(|open| open.until <= Instant::now()))
    }

    fn open_if(&self, error: &Error, counts: impl FnOnce(&mut State) -> bool) -> Option<Error> {
        let (unsent, is_new) = {
            let mut state = self.state.lock();
            self.troubled.store(true, Ordering::Relaxed);
            if !counts(&mut state) {
                return None;
            }
            let was_reported = state.is_reported();
            (state.open(error), state.is_reported() && !was_reported)
        };
        // Outside the lock, as above.
        if is_new {
            telemetry::breaker_opened(error.kind().name());
        }
        Some(unsent)
    }

    /// Its runtime has ended.
    pub(super) fn ended(&self) {
        let was_reported = {
            let mut state = self.state.lock();
            let was_reported = state.is_reported();
            state.ended = true;
            was_reported
        };
        if was_reported {
            telemetry::breaker_gone();
        }
    }

    pub(super) fn current(&self) -> BreakerState {
        let state = self.state.lock();
        match &state.open {
            None => BreakerState::Closed,
            Some(_) if state.probing.is_some() => BreakerState::Probing,
            Some(open) => BreakerState::Open(open.until.saturating_duration_since(Instant::now())),
        }
    }
}

impl Default for State {
    fn default() -> Self {
        Self { failures: 0, pauses: PAUSES, open: None, probing: None, probes: 0, ended: false }
    }
}

impl State {
    /// Whether it counts as an open breaker.
    fn is_reported(&self) -> bool {
        self.open.is_some() && !self.ended
    }

    /// Opens it; for twice as long as before, if it was open.
    fn open(&mut self, error: &Error) -> Error {
        if self.open.is_none() {
            self.pauses.reset();
        }
        let pause = self.pauses.pause();
        let unsent = error.for_unsent(pause);
        self.open = Some(Open { until: Instant::now() + pause, unsent: unsent.clone(), probed: error.while_probed() });
        self.probing = None;
        unsent
    }
}

impl Drop for CircuitBreaker {
    fn drop(&mut self) {
        if self.state.get_mut().is_reported() {
            telemetry::breaker_gone();
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if let Some((breaker, number)) = &self.probes {
            breaker.state.lock().probing.take_if(|(probing, _)| probing == number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn outage() -> Error {
        Error::new(Kind::Unreachable, "no connection")
    }

    fn fail(breaker: &CircuitBreaker, times: u32) {
        (0..times).for_each(|_| _ = breaker.failed(&outage()));
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_after_failures_in_a_row_and_lets_one_look() {
        let breaker = Arc::new(CircuitBreaker::default());
        fail(&breaker, FAILURES - 1);
        breaker.answered();
        fail(&breaker, FAILURES - 1);
        assert!(breaker.enter().is_ok() && breaker.current() == BreakerState::Closed);
        fail(&breaker, 1);
        let error = breaker.enter().unwrap_err();
        assert!(error.is_unreachable() && error.to_string().ends_with("last error: no connection"), "{error}");
        assert!(
            matches!(breaker.current(), BreakerState::Open(pause) if (FIRST_PAUSE..FIRST_PAUSE * 5 / 4).contains(&pause))
        );
        tokio::time::advance(FIRST_PAUSE * 5 / 4).await;
        let looks = breaker.enter().unwrap();
        assert!(breaker.enter().is_err() && breaker.current() == BreakerState::Probing);
        breaker.answered();
        drop(looks);
        assert!(breaker.enter().is_ok() && breaker.current() == BreakerState::Closed);
    }

    /// A subscriber may run code that looks at the limiter.
    #[cfg(feature = "tracing")]
    #[test]
    fn whoever_hears_that_it_opens_or_closes_may_look_at_it() {
        struct Looks(Arc<CircuitBreaker>, Arc<Lock<Vec<bool>>>);
        impl tracing::Subscriber for Looks {
            fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
                true
            }
            fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
                tracing::span::Id::from_u64(1)
            }
            fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
            fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
            fn event(&self, _: &tracing::Event<'_>) {
                self.1.lock().push(self.0.current() == BreakerState::Closed);
            }
            fn enter(&self, _: &tracing::span::Id) {}
            fn exit(&self, _: &tracing::span::Id) {}
        }
        // tracing caches whether anybody is interested in an event when the event first happens, perhaps just now in
        // another test, on a thread without a subscriber. So both events happen here first; a subscriber that is
        // installed later is then asked again.
        let before = CircuitBreaker::default();
        fail(&before, FAILURES);
        before.answered();
        let (breaker, seen) = (Arc::new(CircuitBreaker::default()), Arc::<Lock<Vec<_>>>::default());
        tracing::subscriber::with_default(Looks(Arc::clone(&breaker), Arc::clone(&seen)), || {
            fail(&breaker, FAILURES);
            breaker.answered();
        });
        assert_eq!(*seen.lock(), [false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn each_look_in_vain_doubles_the_pause_up_to_its_longest() {
        let breaker = Arc::new(CircuitBreaker::default());
        fail(&breaker, FAILURES);
        let mut expected = FIRST_PAUSE;
        for _ in 0..8 {
            let BreakerState::Open(pause) = breaker.current() else { panic!("{:?}", breaker.current()) };
            assert!((expected..=expected * 5 / 4).contains(&pause), "{pause:?}, expected {expected:?}");
            tokio::time::advance(pause).await;
            let _looks = breaker.enter().unwrap();
            fail(&breaker, 1);
            expected = (expected * 2).min(LONGEST_PAUSE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_on_its_way_as_it_opened_changes_nothing() {
        let breaker = Arc::new(CircuitBreaker::default());
        fail(&breaker, 1000);
        assert!(matches!(breaker.current(), BreakerState::Open(pause) if pause <= FIRST_PAUSE * 5 / 4));
        tokio::time::advance(FIRST_PAUSE * 5 / 4).await;
        drop(breaker.enter().expect("one may look"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_ends_the_pause_but_only_an_answer_closes_it() {
        let breaker = Arc::new(CircuitBreaker::default());
        fail(&breaker, FAILURES);
        breaker.enter().unwrap_err();
        breaker.connected();
        let looks = breaker.enter().expect("one may look");
        assert!(breaker.enter().is_err() && breaker.current() == BreakerState::Probing);
        drop(looks);
        fail(&breaker, 1);
        assert!(matches!(breaker.current(), BreakerState::Open(pause) if pause >= FIRST_PAUSE * 2));
    }

    #[tokio::test(start_paused = true)]
    async fn silence_opens_it_at_once_and_again_once_its_pause_is_over() {
        let breaker = Arc::new(CircuitBreaker::default());
        assert!(breaker.away(&outage()).is_some());
        assert!(breaker.enter().is_err() && breaker.away(&outage()).is_none());
        tokio::time::advance(FIRST_PAUSE * 5 / 4).await;
        drop(breaker.enter().expect("one may look"));
        assert!(breaker.away(&outage()).is_some());
        assert!(matches!(breaker.current(), BreakerState::Open(pause) if pause >= FIRST_PAUSE * 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_is_given_up_is_taken_up_by_another() {
        let breaker = Arc::new(CircuitBreaker::default());
        fail(&breaker, FAILURES);
        tokio::time::advance(LONGEST_PAUSE).await;
        let looks = breaker.enter().unwrap();
        breaker.enter().unwrap_err();
        drop(looks);
        assert!(breaker.enter().is_ok());
    }
}
