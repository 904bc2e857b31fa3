//! One limit: an algorithm and its numbers, validated, and packed for its script.

mod calendar;
mod division;
mod text;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::numbers::{EXACT, Exact, LONGEST_RESET_US, Numbers, START};
pub use crate::algorithm::numbers::{MaxDebt, WindowStart};
use crate::algorithm::{Algorithm, Setting};
use crate::error::RuleError;
pub use calendar::CalendarUnit;
pub(crate) use calendar::{Windows, system_us};
pub(crate) use division::Shards;
pub(crate) use text::Period;

/// The largest limit of a log, whose running totals are modulo 2^40.
const LOG_LIMIT: u64 = 1 << 39;
/// The largest limit of a log that doesn't set a larger `max`.
const LOG_MAX: u64 = 10_000;
/// The most permits that can be held at once.
const MOST_PERMITS: u64 = 10_000;
/// The most shards of a limit.
const MOST_SHARDS: u64 = 1024;

/// One limit: an algorithm and its numbers.
///
/// Parsed from the one-line text form, or built:
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Algorithm, Limit};
///
/// let limit: Limit = "token-bucket 100/1m burst 200".parse()?;
/// let built = Limit::builder(Algorithm::TokenBucket, 100, Duration::from_secs(60)).capacity(200).build()?;
/// assert_eq!(limit, built);
/// assert_eq!(limit.to_string(), "token-bucket 100/1m burst 200");
/// # Ok::<(), tollgate::RuleError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    name: Option<String>,
    algorithm: Algorithm,
    rate: u64,
    period: u64,
    capacity: u64,
    max_debt: MaxDebt,
    start: WindowStart,
    max: u64,
    exact: Exact,
    packed: Arc<[u8]>,
    shards: Option<Shards>,
    windows: Option<Windows>,
}

/// Builds a [`Limit`] from numbers.
#[derive(Clone, Debug)]
pub struct LimitBuilder {
    algorithm: Algorithm,
    rate: u64,
    period: Duration,
    capacity: Option<u64>,
    max_debt: Option<MaxDebt>,
    start: Option<WindowStart>,
    max: Option<u64>,
    shards: Option<u64>,
    calendar: Option<CalendarUnit>,
    zone: Option<String>,
}

impl Limit {
    /// A limit of `rate` units per `period` (for permits: `rate` at once, each for at most a `period`), with the
    /// algorithm's defaults for everything else.
    #[must_use]
    pub fn builder(algorithm: Algorithm, rate: u64, period: Duration) -> LimitBuilder {
        LimitBuilder {
            algorithm,
            rate,
            period,
            capacity: None,
            max_debt: None,
            start: None,
            max: None,
            shards: None,
            calendar: None,
            zone: None,
        }
    }

    /// A limit of `rate` units in each day, week, month or year of the calendar, in UTC unless a [time
    /// zone](LimitBuilder::tz) is set. Each window begins full and nothing carries over: see [the
    /// guide](crate::guide::algorithms#windows-of-the-calendar).
    ///
    /// ```
    /// use tollgate::{CalendarUnit, Limit};
    ///
    /// let limit = Limit::calendar(250, CalendarUnit::Day).tz("Europe/Zurich").build()?;
    /// assert_eq!(limit.to_string(), "fixed-window 250/day tz Europe/Zurich");
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    #[must_use]
    pub fn calendar(rate: u64, window: CalendarUnit) -> LimitBuilder {
        let period = Duration::from_micros(window.longest_us());
        LimitBuilder { calendar: Some(window), ..Self::builder(Algorithm::CalendarWindow, rate, period) }
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Units per period; for permits, how many at once.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// The period; for permits, how long one lasts if it is neither renewed nor released; for calendar windows, the
    /// longest window's length without clock changes: 1, 7, 31 or 366 days.
    #[must_use]
    pub fn period(&self) -> Duration {
        Duration::from_micros(self.period)
    }

    /// The most units that can be taken at one instant.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// How far reservations may go below zero, in units.
    #[must_use]
    pub fn max_debt(&self) -> u64 {
        self.exact.max_debt
    }

    /// Where a fixed window's windows start.
    #[must_use]
    pub fn start(&self) -> WindowStart {
        self.start
    }

    /// How many shards a cluster decides it by, each with its own key: 1 if it isn't split.
    #[must_use]
    pub fn shards(&self) -> u32 {
        self.shards.as_ref().map_or(1, Shards::count)
    }

    /// The same limit without shards. The shards together never exceed it.
    #[must_use]
    pub fn whole(&self) -> Self {
        Self { shards: None, ..self.clone() }
    }

    /// The most units that one call can ever take or, in a reservation, owe.
    pub(crate) fn largest_cost(&self, reserved: bool) -> u64 {
        self.capacity + if reserved { self.max_debt() } else { 0 }
    }

    /// Its last shard, which is the smallest; itself if it has no shards.
    pub(crate) fn smallest_shard(&self) -> &Self {
        self.shards.as_ref().map_or(self, Shards::smallest)
    }

    /// The most units that a key can have taken or owe.
    pub(crate) fn most_counted(&self) -> u64 {
        (self.algorithm.row().most_counted)(&self.exact)
    }

    /// Its parts, if it has shards.
    pub(crate) fn shard_limits(&self) -> Option<&Shards> {
        self.shards.as_ref()
    }

    /// The clock step of this limit: a microsecond, or the finest that keeps its arithmetic exact.
    #[must_use]
    pub fn tick(&self) -> Duration {
        Duration::from_micros(self.exact.tick)
    }

    /// The unit of its calendar windows, if it has any: day, week, month or year.
    #[must_use]
    pub fn window(&self) -> Option<CalendarUnit> {
        self.windows.as_ref().map(Windows::unit)
    }

    /// The time zone of its calendar windows, if it has any, as the time zone database spells it.
    #[must_use]
    pub fn tz(&self) -> Option<&str> {
        self.windows.as_ref().map(Windows::zone)
    }

    /// Its calendar windows, if it has any.
    pub(crate) fn windows(&self) -> Option<&Windows> {
        self.windows.as_ref()
    }

    /// The longest time in which a key goes from fully used, or fully in debt, to as if never used; for calendar
    /// windows, a day more than the [period](Self::period), since clocks may be set back.
    #[must_use]
    pub fn longest_reset(&self) -> Duration {
        Duration::from_micros(self.exact.longest_reset)
    }

    /// The same limit under a name, which keeps its state even when its period changes. The algorithm is part of its
    /// keys: with another algorithm it is a new limit, which starts unused.
    ///
    /// # Errors
    ///
    /// A name that isn't 1 to 64 letters, digits, `-`, `_` or `.`.
    pub fn named(mut self, name: &str) -> Result<Self, RuleError> {
        self.name = Some(crate::key::checked_name(name)?.to_owned());
        Ok(self)
    }

    /// The name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Identifies this limit in a key, so that its state is found even after its numbers change: its name and algorithm
    /// (algorithms can't read each other's states) or, without a name, its algorithm and period.
    pub(crate) fn end_of_key(&self) -> String {
        match &self.name {
            Some(name) => format!("{name}/{}", self.algorithm),
            None => self.label(),
        }
    }

    /// Identifies this limit among those of its rule: its name, otherwise algorithm and period.
    pub(crate) fn label(&self) -> String {
        match &self.name {
            Some(name) => name.clone(),
            None if self.algorithm.holds() => self.algorithm.to_string(),
            None => match &self.windows {
                None => format!("{}-{}", self.algorithm, text::Period(self.period)),
                // The zone is left out, as the start of other windows is: when it changes, what was used stays used.
                Some(windows) => format!("{}-{}", Algorithm::FixedWindow, windows.unit()),
            },
        }
    }

    /// Its numbers as scripts take them, to decide at this time or, without one, at the time of the server, whose clock
    /// is this far ahead of this machine's, as far as known. Those of [spread](Self::spread) windows lack their start.
    pub(crate) fn packed(&self, now_us: Option<u64>, ahead_us: i64) -> Cow<'_, Arc<[u8]>> {
        match &self.windows {
            Some(windows) => Cow::Owned(Arc::clone(&windows.at(now_us, ahead_us).packed)),
            None => Cow::Borrowed(&self.packed),
        }
    }

    /// For windows with a per-key start: the numbers with this start.
    pub(crate) fn packed_with_start(&self, start: u64) -> Arc<[u8]> {
        let (mut packed, at) = (self.packed.to_vec(), self.algorithm.row().place_of(START));
        packed[at..at + 7].copy_from_slice(&start.to_le_bytes()[..7]);
        packed.into()
    }

    /// What distinguishes two limits of one algorithm to its script, whatever the time.
    pub(crate) fn numbers(&self) -> impl std::hash::Hash + '_ {
        (&self.packed, &self.windows)
    }

    /// For windows with a per-key start: the period that starts are spread over.
    pub(crate) fn spread(&self) -> Option<u64> {
        (self.start == WindowStart::Spread).then_some(self.period)
    }
}

impl LimitBuilder {
    /// The most units that can be taken at one instant, also called burst. Default: the rate.
    #[must_use]
    pub fn capacity(mut self, units: u64) -> Self {
        self.capacity = Some(units);
        self
    }

    /// How far reservations may go below zero. Default: not at all.
    #[must_use]
    pub fn max_debt(mut self, debt: MaxDebt) -> Self {
        self.max_debt = Some(debt);
        self
    }

    /// Where the windows start. Default: at multiples of the period since the epoch.
    #[must_use]
    pub fn start(mut self, start: WindowStart) -> Self {
        self.start = Some(start);
        self
    }

    /// The largest rate allowed for a log, which remembers each request: 1 to 2^39. Default: 10,000.
    #[must_use]
    pub fn max(mut self, units: u64) -> Self {
        self.max = Some(units);
        self
    }

    /// Splits the limit on a [cluster](crate::Cluster) into 1 to 1024 shards, each with its share of the rate, the
    /// capacity and the debt, and with its own key and slot; remainders go to the first shards. Together they never
    /// exceed the limit. A call takes from one shard, so a cost above the smallest share is denied with "never", and a
    /// call may be denied while other shards still have units: [the guide](crate::guide::load#shards) says how often.
    /// On one server the limit is decided as if it had no shards. Default: 1.
    ///
    /// ```
    /// use tollgate::Limit;
    ///
    /// let limit: Limit = "token-bucket 100000/1s burst 1000 shards 8".parse()?;
    /// assert_eq!((limit.shards(), limit.rate(), limit.capacity()), (8, 100_000, 1000));
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    #[must_use]
    pub fn shards(mut self, count: u32) -> Self {
        self.shards = Some(count.into());
        self
    }

    /// The time zone of calendar windows, by its name in the IANA time zone database, such as `Europe/Zurich`, in any
    /// case. The database is this build's, not the machine's. Default: `UTC`.
    #[must_use]
    pub fn tz(mut self, zone: &str) -> Self {
        self.zone = Some(zone.to_owned());
        self
    }

    /// The limit, or why these numbers don't make one.
    ///
    /// # Errors
    ///
    /// A rate of zero, or above 2^53 (2^53 - 1 in a calendar window, 10,000 permits, [`max`](Self::max) in a log); a
    /// period other than whole microseconds from 1 µs to 71 years; a burst above 2^53, or of zero without a debt; a
    /// start that isn't below the period; a key that would take more than 71 years to reset; an option that the
    /// algorithm doesn't have; an unknown time zone; numbers that fit at no useful tick; shards that would not each
    /// have a unit; shards of windows that start at the first hit, since each shard would have its own.
    pub fn build(self) -> Result<Limit, RuleError> {
        // All fields are named, so that a new option can't be forgotten.
        let Self { algorithm, rate, period: every, capacity, max_debt, start, max, shards, calendar, zone } = self;
        let row = algorithm.row();
        for (given, option) in [
            (capacity.is_some(), Setting::Burst),
            (max_debt.is_some(), Setting::MaxDebt),
            (start.is_some(), Setting::Start),
            (max.is_some(), Setting::Max),
            (shards.is_some(), Setting::Shards),
            (zone.is_some(), Setting::Tz),
        ] {
            if given && !row.options.contains(&option) {
                return Err(RuleError::new(format!(
                    "{option}: not an option of {algorithm}, which has {}",
                    row.options()
                )));
            }
        }
        if algorithm == Algorithm::CalendarWindow && calendar.is_none() {
            let why = "expected a day, week, month or year (Limit::calendar)";
            return Err(RuleError::new(format!("{algorithm}: {why}, got {every:?}")));
        }
        let (units, time, most) = match algorithm {
            Algorithm::Concurrency => ("permits", "ttl", MOST_PERMITS),
            // What is used must differ from a cost above all limits.
            Algorithm::CalendarWindow => ("rate", "period", EXACT - 1),
            Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog => {
                ("rate", "period", EXACT)
            }
        };
        within(units, rate, 1, most)?;
        let sub_microsecond = every.subsec_nanos() % 1000 != 0;
        let period = u64::try_from(every.as_micros()).unwrap_or(u64::MAX);
        if period == 0 || sub_microsecond || period > LONGEST_RESET_US {
            let got = if sub_microsecond { format!("{every:?}") } else { text::Period(period).to_string() };
            return Err(RuleError::new(format!(
                "{time}: expected whole microseconds, from 1us to 71 years, got {got}"
            )));
        }
        let capacity = capacity.unwrap_or(rate);
        let max_debt = max_debt.unwrap_or(MaxDebt::Units(0));
        if capacity == 0 && max_debt == MaxDebt::Units(0) {
            return Err(RuleError::new("burst: expected at least 1, or a max-debt beside it, got 0"));
        }
        within("burst", capacity, 0, EXACT)?;
        if let MaxDebt::Units(units) = max_debt {
            within("max-debt", units, 0, EXACT)?;
        }
        let start = start.unwrap_or(WindowStart::At(Duration::ZERO));
        if let WindowStart::At(offset) = start
            && (offset.subsec_nanos() % 1000 != 0 || offset.as_micros() >= u128::from(period))
        {
            let (period, got) =
                (text::Period(period), text::Period(u64::try_from(offset.as_micros()).unwrap_or(u64::MAX)));
            return Err(RuleError::new(format!(
                "start: expected whole microseconds below the period of {period}, got {got}"
            )));
        }
        let max = max.unwrap_or(LOG_MAX);
        if algorithm == Algorithm::SlidingLog {
            within("max", max, 1, LOG_LIMIT)?;
            if rate > max {
                let why = "which remembers every request (the option max raises this)";
                return Err(RuleError::new(format!("rate: expected at most {max} for a log, {why}, got {rate}")));
            }
        }

        let mut limit = Limit {
            name: None,
            algorithm,
            rate,
            period,
            capacity,
            max_debt,
            start,
            max,
            exact: Exact { rate, period, tick: 1, max_debt: 0, longest_reset: 0 },
            packed: Arc::default(),
            shards: None,
            windows: None,
        };
        if let Some(unit) = calendar {
            let zone = zone.as_deref().unwrap_or(calendar::UTC);
            limit.windows = Some(Windows::of(rate, unit, zone)?);
        }
        let shards = shards.unwrap_or(1);
        within("shards", shards, 1, MOST_SHARDS)?;
        let numbers = Numbers { rate, period, capacity, max_debt, start };
        limit.exact = (row.fit)(&numbers).map_err(|why| RuleError::new(format!("{limit}: {why}")))?;
        if capacity == 0 && limit.exact.max_debt == 0 {
            return Err(RuleError::new(format!(
                "{limit}: expected a burst of at least 1, since its max-debt comes to 0 units, got 0"
            )));
        }
        if limit.exact.longest_reset > LONGEST_RESET_US {
            let days = limit.exact.longest_reset.div_ceil(86_400_000_000);
            let why = format!("expected a key to reset within 26062 days (71 years), got {days} days");
            return Err(RuleError::new(format!("{limit}: {why}; raise the rate or lower burst and max-debt")));
        }
        let arguments = (row.arguments)(&numbers, &limit.exact);
        limit.packed = row.packed(&arguments).into();
        if shards > 1 {
            if start == WindowStart::FirstHit {
                let why = "expected windows that all shards share (start at an offset, or spread)";
                return Err(RuleError::new(format!("shards: {why}, got start first-hit")));
            }
            limit.shards = Some(limit.in_shards(shards)?);
        }
        Ok(limit)
    }
}

fn within(name: &str, value: u64, least: u64, most: u64) -> Result<(), RuleError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let most = match most {
        EXACT => "2^53".to_owned(),
        most if most == EXACT - 1 => "2^53 - 1".to_owned(),
        most => most.to_string(),
    };
    Err(RuleError::new(format!("{name}: expected a whole number from {least} to {most}, got {value}")))
}
