//! This machine's time of day.

use std::time::SystemTime;

pub(crate) fn now() -> SystemTime {
    #[cfg(all(test, feature = "embedded"))]
    if let Some(time) = simulated::now() {
        return time;
    }
    SystemTime::now()
}

/// Virtual time for a thread that simulates, so that a seed repeats its run.
#[cfg(all(test, feature = "embedded"))]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::SystemTime;

    /// Tells the time, if it knows.
    type Clock = fn() -> Option<SystemTime>;

    thread_local! {
        static CLOCK: Cell<Option<Clock>> = const { Cell::new(None) };
    }

    /// Sets this thread's clock; none restores the machine's.
    pub(crate) fn set(clock: Option<Clock>) {
        CLOCK.set(clock);
    }

    pub(super) fn now() -> Option<SystemTime> {
        CLOCK.get()?()
    }
}
