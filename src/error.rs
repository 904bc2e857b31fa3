//! What can go wrong.
//!
//! ```text
//! RuleError            a rule that can't be built: its text or its numbers
//! Denied               a denial, for callers who want it as an error (Decision::into_result)
//! Error                a decision that could not be made
//!   not charged        input, connecting, version, authentication, permission, unreadable state, an unknown id, a
//!                      server that refused, a server that runs no script now, windows of another time
//!   charged            units were taken and could not be given back, or too few replicas have them
//!   unknown            no answer in time, the connection broke while waiting for it, the answer isn't a script's, or a
//!                      right is missing on one of several nodes
//! ```

mod kind;

use std::any::Any;
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use kind::ErrorKind;
pub(crate) use kind::Kind;

/// A rule that can't be built. The message is one line that names the value and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError(String);

/// The most bytes of a message: it repeats what was given, whoever gave it.
const LONGEST: usize = 4096;

impl RuleError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > LONGEST {
            message.truncate((0..=LONGEST).rfind(|at| message.is_char_boundary(*at)).unwrap_or_default());
            message.push_str("... (cut off)");
        }
        Self(message)
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RuleError {}

/// A decision that could not be made: something broke. A denial isn't an error, see [`Decision`](crate::Decision).
///
/// The message is one line and never shows a password. It contains no number that changes from call to call, so that
/// logs can be grouped by it: [`missed_deadline`](Error::missed_deadline) and [`retry_in`](Error::retry_in) have those.
///
/// The message is complete: it includes what Redis, the system or a script said. [`source`](std::error::Error::source)
/// is another error only if that says more than the message does, so printing both repeats nothing. It never shows a
/// password either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: Kind,
    /// Shared, since thousands of callers may get the same error.
    message: Arc<str>,
    charged: Charged,
    /// Whether Redis, or the connection to it, is what failed: another call would likely fail too.
    is_outage: bool,
    /// Not even tried, because earlier calls had failed.
    is_unsent: bool,
    /// The deadline that passed, or how long Redis won't be asked.
    time: Option<Duration>,
    /// Boxed, since few errors have any, and every pending decision has room for an error.
    attached: Option<Box<Attached>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Attached {
    cause: Option<Cause>,
    note: Option<Note>,
}

/// The underlying error. Two are equal if they print alike.
#[derive(Clone, Debug)]
pub(crate) struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl Cause {
    /// This cause, unless the message that it would stand under repeats it.
    pub(crate) fn under(message: &str, cause: impl std::error::Error + Send + Sync + 'static) -> Option<Self> {
        (!message.contains(&cause.to_string())).then(|| Self(Arc::new(cause)))
    }

    pub(crate) fn error(&self) -> &(dyn std::error::Error + 'static) {
        &*self.0
    }
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Cause {}

/// What the engine that reports an error notes for itself. It makes no difference between two errors.
#[derive(Clone, Debug)]
struct Note(Arc<dyn Any + Send + Sync>);

impl PartialEq for Note {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Note {}

/// Whether a decision that ended in an error took its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Charged {
    /// Nothing was taken.
    No,
    /// The units were taken.
    Yes,
    /// Unknown: the call was sent, but no answer came, or a meaningless one; or one of several steps failed.
    Unknown,
}

impl Error {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        let mut message: String = message.into();
        if message.contains(char::is_control) {
            message = message.replace(char::is_control, " ");
        }
        let charged = match kind {
            Kind::Deadline { sent: true } | Kind::Disconnected | Kind::Garbled => Charged::Unknown,
            Kind::Unconfirmed => Charged::Yes,
            _ => Charged::No,
        };
        let is_outage = kind == Kind::Authentication || kind.is_away();
        let (message, is_unsent) = (message.into(), false);
        Self { kind, message, charged, is_outage, is_unsent, time: None, attached: None }
    }

    /// The same from a server that has answered and named another that would decide, which the note says.
    pub(crate) fn redirected(mut self, note: impl Any + Send + Sync) -> Self {
        self.is_outage = false;
        self.attached.get_or_insert_default().note = Some(Note(Arc::new(note)));
        self
    }

    /// The note of this type, if the error has one.
    pub(crate) fn note<T: Any>(&self) -> Option<&T> {
        self.attached.as_ref()?.note.as_ref()?.0.downcast_ref()
    }

    /// The same with its cause, unless the message repeats that. Without secrets.
    pub(crate) fn caused_by(mut self, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        if let Some(cause) = Cause::under(&self.message, cause) {
            self.attached.get_or_insert_default().cause = Some(cause);
        }
        self
    }

    pub(crate) fn unconfirmed(why: &str) -> Self {
        Self::new(Kind::Unconfirmed, format!("units were taken, but {why}"))
    }

    /// For a script's BADID error, given its message without the code and the script's name.
    pub(crate) fn unknown_id(message: &str) -> Self {
        Self::new(Kind::UnknownId, message.split_once(": ").map_or(message, |(_, said)| said))
    }

    /// For a script's STALE error at this server time, in microseconds since the epoch.
    pub(crate) fn stale(now_us: u64) -> Self {
        let what = "the server's time is outside this call's calendar windows: check its clock";
        Self::new(Kind::Stale { now_us }, what)
    }

    /// The same, from the script's message, which ends with that time.
    pub(crate) fn stale_from_message(message: &str) -> Self {
        let now_us = message
            .rsplit_once("now_us=")
            .and_then(|(_, rest)| rest.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok());
        now_us.map_or_else(|| Self::new(Kind::Garbled, message), Self::stale)
    }

    /// The server's time, in microseconds since the epoch, if it had left the call's windows.
    pub(crate) fn stale_at(&self) -> Option<u64> {
        match self.kind {
            Kind::Stale { now_us } => Some(now_us),
            _ => None,
        }
    }

    pub(crate) fn deadline(after: Duration, sent: bool) -> Self {
        // Made once each: thousands of deadlines may pass together.
        static MISSED: LazyLock<[Error; 2]> = LazyLock::new(|| {
            let missed = |sent, what| Error::new(Kind::Deadline { sent }, format!("{what} within the deadline"));
            [missed(false, "the call to redis was not sent"), missed(true, "no answer from redis")]
        });
        Self { time: Some(after), ..MISSED[usize::from(sent)].clone() }
    }

    /// The same from connecting: every other attempt would meet it too.
    pub(crate) fn at_connecting(mut self) -> Self {
        self.is_outage |= matches!(self.kind, Kind::Permission | Kind::Unsupported) && !self.is_unsent;
        self
    }

    /// The same after some of several steps may have been done.
    pub(crate) fn half_way(mut self) -> Self {
        self.charged = Charged::Unknown;
        self
    }

    /// The same once all that was taken has been given back.
    pub(crate) fn given_back(mut self) -> Self {
        self.charged = Charged::No;
        self
    }

    pub(crate) fn is_garbled(&self) -> bool {
        self.kind == Kind::Garbled
    }

    pub(crate) fn is_unsent(&self) -> bool {
        self.is_unsent
    }

    /// The same after the units had been taken and were to be given back.
    pub(crate) fn after_charging(mut self) -> Self {
        if self.charged == Charged::No {
            self.charged = Charged::Yes;
        }
        self
    }

    /// The same for a call that isn't sent, because earlier calls failed with this.
    pub(crate) fn for_unsent(&self, wait: Duration) -> Self {
        self.unsent("the breaker is open: redis isn't called for a while").with_wait(wait)
    }

    /// The same while Redis won't be asked for this long.
    pub(crate) fn with_wait(self, wait: Duration) -> Self {
        Self { time: Some(wait), ..self }
    }

    /// The same while another call probes Redis.
    pub(crate) fn while_probed(&self) -> Self {
        self.unsent("the breaker is open while another call probes redis")
    }

    fn unsent(&self, why: &str) -> Self {
        let kind = match self.kind {
            Kind::Deadline { .. } | Kind::Disconnected | Kind::Garbled => Kind::Unreachable,
            kind => kind,
        };
        let cause = self.attached.as_ref().and_then(|attached| attached.cause.clone());
        let attached = cause.map(|cause| Box::new(Attached { cause: Some(cause), note: None }));
        Self { is_unsent: true, attached, ..Self::new(kind, format!("{why}; last error: {self}")) }
    }

    /// Whether the units were taken.
    #[must_use]
    pub fn charged(&self) -> Charged {
        self.charged
    }

    /// The deadline that passed, if that is what [went wrong](ErrorKind::Deadline): the time that was left when this
    /// call was made.
    #[must_use]
    pub fn missed_deadline(&self) -> Option<Duration> {
        self.time.filter(|_| self.kind() == ErrorKind::Deadline)
    }

    /// How long Redis won't be asked, because earlier calls failed; see [`Redis::breaker`](crate::Redis::breaker). None
    /// if it was asked, or another call is probing it.
    #[must_use]
    pub fn retry_in(&self) -> Option<Duration> {
        self.time.filter(|_| self.is_unsent())
    }

    /// Whether Redis, or the connection to it, is what failed: another call would likely fail too.
    pub(crate) fn is_outage(&self) -> bool {
        self.is_outage
    }

    /// The same, with more to say.
    #[allow(dead_code, reason = "said of a share, for which the engine in this process is needed")]
    pub(crate) fn and(self, note: impl fmt::Display) -> Self {
        Self { message: format!("{}; {note}", self.message).into(), ..self }
    }

    /// Whether a rule's [policy](crate::OnError) answers in place of this error. Misuse and permission errors bypass
    /// the policy.
    pub(crate) fn goes_to_policy(&self) -> bool {
        self.kind.is_away()
            || matches!(self.kind, Kind::Refused | Kind::Unreadable | Kind::Unconfirmed | Kind::Stale { .. })
    }

    /// Whether the server refuses this user or this command, which others can change. No policy answers in its place.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self.kind, Kind::Permission | Kind::Authentication | Kind::Unsupported)
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self.kind {
            Kind::Input | Kind::EmptyKey => ErrorKind::Input,
            Kind::Unreachable => ErrorKind::Unreachable,
            Kind::Authentication => ErrorKind::Authentication,
            Kind::Permission => ErrorKind::Permission,
            Kind::Unsupported => ErrorKind::Unsupported,
            Kind::Deadline { .. } => ErrorKind::Deadline,
            Kind::Disconnected => ErrorKind::Disconnected,
            Kind::Unreadable => ErrorKind::UnreadableState,
            Kind::UnknownId => ErrorKind::UnknownId,
            Kind::Refused => ErrorKind::Refused,
            Kind::Stale { .. } => ErrorKind::StaleWindows,
            Kind::NotNow => ErrorKind::NotNow,
            Kind::Garbled => ErrorKind::Garbled,
            Kind::Unconfirmed => ErrorKind::Unconfirmed,
        }
    }

    /// The caller's own input can't be used: an empty key, a time out of range, a malformed address, a rule without a
    /// name. The middleware answers these errors with status 500 (400 for an empty key), and all others with 503.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self.kind, Kind::Input | Kind::EmptyKey)
    }

    #[allow(dead_code, reason = "asked by the middleware, which is a feature")]
    pub(crate) fn is_empty_key(&self) -> bool {
        self.kind == Kind::EmptyKey
    }

    /// Redis could not be asked: no connection could be made, or the deadline passed before the call was sent. The kind
    /// of the latter is [`Deadline`](ErrorKind::Deadline). A Redis that is away has other errors too: calls that it was
    /// sent miss their deadline, or their connection breaks.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self.kind, Kind::Unreachable | Kind::Deadline { sent: false })
    }

    /// Nothing is remembered for the id that was to be settled or cancelled, or no permit is held by the id that was to
    /// be renewed: it was never taken, or its time to live has passed.
    #[must_use]
    pub fn is_unknown_id(&self) -> bool {
        self.kind == Kind::UnknownId
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.attached.as_ref()?.cause.as_ref()?.error())
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn what_could_not_be_given_back_is_charged_unless_it_may_have_been() {
        let refused = Error::new(Kind::Permission, "no").after_charging();
        let late = Error::deadline(Duration::from_millis(5), true).after_charging();
        let half = Error::new(Kind::Permission, "no").half_way().after_charging();
        assert_eq!([&refused, &late, &half].map(Error::charged), [Charged::Yes, Charged::Unknown, Charged::Unknown]);
    }

    #[test]
    fn a_source_is_what_the_message_leaves_out() {
        let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let without = Error::new(Kind::Unreachable, "no connection").caused_by(refused());
        assert!(without.source().is_some_and(|source| source.is::<std::io::Error>()));
        let repeated = Error::new(Kind::Unreachable, format!("no connection: {}", refused())).caused_by(refused());
        assert!(repeated.source().is_none());

        let unsent = without.clone().redirected("elsewhere").for_unsent(Duration::ZERO);
        assert_eq!(unsent.source().map(ToString::to_string), Some(refused().to_string()));
        assert!(unsent.note::<&str>().is_none());
        assert_eq!(without, without.clone());
        assert_ne!(without, Error::new(Kind::Unreachable, "no connection"));
    }

    #[test]
    fn an_error_is_no_larger_than_a_cache_line() {
        assert!(size_of::<Error>() <= 64, "{}", size_of::<Error>());
    }
}
