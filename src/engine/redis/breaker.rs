//! Stops asking a Redis that doesn't answer, and looks again now and then.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::Error;
use crate::random::jittered;

/// Calls that fail one after the other before the breaker opens.
const FAILURES: u32 = 5;
/// How long it is open at first; twice as long after each look in vain.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Up to so many hundredths more, so that not all processes look at once.
const JITTER: u8 = 25;
/// So much longer those don't look whose deadline says little about Redis.
const HASTE: Duration = Duration::from_secs(1);

/// Whether a [`Redis`](crate::Redis) is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Breaker {
    /// It is.
    Closed,
    /// It isn't, for so long: five calls have failed in a row. Who asks is answered by policy at once.
    Open(Duration),
    /// One call is on its way to see whether it answers again.
    Probing,
}

/// A call that was let in.
#[derive(Debug)]
#[must_use]
pub(super) struct Entry<'a> {
    /// Of the one that sees whether Redis answers again. Dropped without an outcome, it leaves that to the next.
    probes: Option<&'a Guard>,
}

#[derive(Debug, Default)]
pub(super) struct Guard {
    /// Whether there is anything to look at in the state: nearly never.
    troubled: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In a row.
    failures: u32,
    pause: Duration,
    /// Until when nobody asks, and by what the last call failed.
    open: Option<(Instant, Error)>,
    probing: bool,
}

impl Guard {
    /// Whether to ask, or why not to. Whoever is hasty is the last to look.
    pub(super) fn enter(&self, hasty: bool) -> Result<Entry<'_>, Error> {
        if !self.troubled.load(Ordering::Relaxed) {
            return Ok(Entry { probes: None });
        }
        let mut state = self.state();
        let now = Instant::now();
        let Some((until, error)) = &state.open else { return Ok(Entry { probes: None }) };
        let until = if hasty { *until + HASTE } else { *until };
        if now < until {
            return Err(error.for_unsent(until - now));
        }
        if state.probing {
            return Err(error.while_probed());
        }
        state.probing = true;
        Ok(Entry { probes: Some(self) })
    }

    /// The same for who was let in, before it connects.
    pub(super) fn check(&self) -> Result<(), Error> {
        if !self.troubled.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (state, now) = (self.state(), Instant::now());
        match &state.open {
            Some((until, error)) if now < *until => Err(error.for_unsent(*until - now)),
            _ => Ok(()),
        }
    }

    /// What became of a call that was let in. Whether the breaker opened by it.
    pub(super) fn told<T>(&self, outcome: &Result<T, Error>, mut entry: Entry<'_>) -> bool {
        match outcome {
            Err(error) if error.is_unsent() => false,
            Err(error) if error.is_outage() => self.failed(error, entry.probes.take().is_some()),
            _ => {
                entry.probes = None;
                if self.troubled.load(Ordering::Relaxed) {
                    self.recovered();
                }
                false
            }
        }
    }

    fn failed(&self, error: &Error, probed: bool) -> bool {
        let mut state = self.state();
        self.troubled.store(true, Ordering::Relaxed);
        state.failures = state.failures.saturating_add(1);
        if state.failures < FAILURES {
            return false;
        }
        let now = Instant::now();
        match &state.open {
            None => state.pause = FIRST_PAUSE,
            Some(_) if probed => state.pause = (state.pause * 2).min(LONGEST_PAUSE),
            // It was on its way as the breaker opened.
            Some(_) => return false,
        }
        state.open = Some((now + jittered(state.pause, JITTER), error.clone()));
        state.probing = false;
        true
    }

    fn recovered(&self) {
        let mut state = self.state();
        *state = State::default();
        self.troubled.store(false, Ordering::Relaxed);
    }

    pub(super) fn look(&self) -> Breaker {
        let state = self.state();
        match &state.open {
            None => Breaker::Closed,
            Some(_) if state.probing => Breaker::Probing,
            Some((until, _)) => Breaker::Open(until.saturating_duration_since(Instant::now())),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        if let Some(guard) = self.probes {
            guard.state().probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn outage() -> Result<(), Error> {
        Err(Error::new(Kind::Unreachable, "no connection"))
    }

    const FREE: Entry<'_> = Entry { probes: None };

    fn fail(guard: &Guard, times: u32) {
        (0..times).for_each(|_| _ = guard.told(&outage(), FREE));
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_after_failures_in_a_row_and_lets_one_look() {
        let guard = Guard::default();
        fail(&guard, FAILURES - 1);
        guard.told(&Ok(()), FREE);
        fail(&guard, FAILURES - 1);
        assert!(guard.enter(false).is_ok() && guard.look() == Breaker::Closed);
        fail(&guard, 1);
        let error = guard.enter(false).unwrap_err();
        assert!(error.is_unreachable() && error.to_string().ends_with("after: no connection"), "{error}");
        assert!(matches!(guard.look(), Breaker::Open(pause) if (FIRST_PAUSE..FIRST_PAUSE * 5 / 4).contains(&pause)));
        tokio::time::advance(FIRST_PAUSE * 5 / 4).await;
        let looks = guard.enter(false).expect("one may look");
        assert_eq!(guard.look(), Breaker::Probing);
        assert!(guard.enter(false).is_err(), "and nobody else");
        guard.told(&Ok(()), looks);
        assert_eq!(guard.look(), Breaker::Closed);
        assert!(guard.enter(false).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn each_look_in_vain_doubles_the_pause_up_to_its_longest() {
        let guard = Guard::default();
        fail(&guard, FAILURES);
        let mut expected = FIRST_PAUSE;
        for _ in 0..8 {
            let Breaker::Open(pause) = guard.look() else { panic!("{:?}", guard.look()) };
            assert!((expected..=expected * 5 / 4).contains(&pause), "{pause:?}, expected {expected:?}");
            tokio::time::advance(pause).await;
            let entry = guard.enter(false).unwrap();
            guard.told(&outage(), entry);
            expected = (expected * 2).min(LONGEST_PAUSE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_were_on_their_way_as_it_opened_change_nothing() {
        let guard = Guard::default();
        fail(&guard, 1000);
        assert!(matches!(guard.look(), Breaker::Open(pause) if pause <= FIRST_PAUSE * 5 / 4));
        let unsent = guard.check().map(|()| 0);
        tokio::time::advance(FIRST_PAUSE * 5 / 4).await;
        fail(&guard, 1000);
        let looks = guard.enter(false).expect("one may look");
        guard.told(&Ok(()), looks);
        (0..2 * FAILURES).for_each(|_| _ = guard.told(&unsent, FREE));
        assert_eq!(guard.look(), Breaker::Closed, "who wasn't sent saw nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_is_given_up_is_taken_up_by_another() {
        let guard = Guard::default();
        fail(&guard, FAILURES);
        tokio::time::advance(LONGEST_PAUSE).await;
        let looks = guard.enter(false).unwrap();
        guard.enter(false).unwrap_err();
        drop(looks);
        assert!(guard.enter(false).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_hasty_looks_only_if_nobody_else_does() {
        let guard = Guard::default();
        fail(&guard, FAILURES);
        tokio::time::advance(FIRST_PAUSE * 5 / 4).await;
        guard.enter(true).unwrap_err();
        tokio::time::advance(HASTE).await;
        drop(guard.enter(true).unwrap());
        assert!(guard.enter(false).is_ok());
    }

    #[test]
    fn what_redis_says_of_one_call_alone_is_no_outage() {
        let guard = Guard::default();
        for kind in [Kind::Refused, Kind::Unreadable, Kind::Permission, Kind::UnknownId, Kind::Input] {
            (0..2 * FAILURES).for_each(|_| _ = guard.told(&Err::<(), _>(Error::new(kind, "no")), FREE));
            assert_eq!(guard.look(), Breaker::Closed, "{kind:?}");
        }
        let old = Error::new(Kind::Unsupported, "too old").at_connecting();
        (0..FAILURES).for_each(|_| _ = guard.told(&Err::<(), _>(old.clone()), FREE));
        assert!(guard.enter(false).unwrap_err().is_unsupported(), "nobody connects to it again and again");
    }
}
