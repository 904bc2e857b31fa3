//! One call: rule + key + cost -> decision.

mod all;
mod asking;
mod background;
mod builder;
mod cached_denials;
pub(crate) mod call;
mod counted;
mod decide;
mod deciding;
mod fallback;
mod follow_up;
mod handle;
pub(crate) mod hold;
pub(crate) mod lease;
#[cfg(feature = "embedded")]
mod local;
#[cfg(feature = "embedded")]
mod local_engine;
mod maintenance;
mod many;
mod operations;
mod prepare;
mod releases;
mod releasing;
mod reservations;
mod server_clock;
mod several_slots;
mod sharded;
#[cfg(all(test, feature = "embedded"))]
mod together;
mod tries;
mod turns;
pub(crate) mod wait;

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::decision::{Balance, Decision};
use crate::error::Error;
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::Rule;

#[cfg(feature = "http")]
pub(crate) use background::persist_until;
pub use builder::LimiterBuilder;
pub(crate) use counted::counted;
pub use deciding::Deciding;
pub use handle::Limiter;
pub use maintenance::{KeyState, ResetProgress};

/// The operations.
impl Limiter {
    /// Makes a call of this operation. The methods below describe the operations, and are shorter to write. For one
    /// that only gives back, extends, blocks or forgets, `allowed` is true; its method returns a [`Balance`] instead.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Embedded, Limiter, Operation, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = Rule::new("api", "token-bucket 10/1m")?;
    /// for operation in ["acquire", "refund", "peek"] {
    ///     let decision = limiter.call(operation.parse()?, &rule, "user:42").await?;
    ///     println!("{operation}: {} left", decision.remaining);
    /// }
    /// # assert_eq!(limiter.call(Operation::Peek, &rule, "user:42").await?.remaining, 10);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the operation's method. A block without the [time](Request::block_for) that it lasts.
    pub async fn call<'a>(
        &self,
        operation: Operation,
        rule: &Rule,
        request: impl Into<Request<'a>>,
    ) -> Result<Decision, Error> {
        self.make(operation, rule, request.into()).await
    }

    /// Takes the cost now, or denies and takes nothing.
    ///
    /// # Errors
    ///
    /// No decision could be made, and the rule's [policy](Rule::on_error) is closed; see [`Error`]. A rule without a
    /// name. Permits of a `concurrency` limit without an [id](Request::id) to release them by; [`hold`](Self::hold)
    /// makes one.
    pub fn acquire<'a, 'r: 'a>(&'a self, rule: &'a Rule, request: impl Into<Request<'r>>) -> Deciding<'a> {
        self.decide(rule, request.into(), Operation::Acquire)
    }

    /// The same as [`acquire`](Self::acquire), as a future that owns all it needs, for `tokio::spawn` or a field.
    /// Copies the request, and allocates.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = Rule::new("api", "token-bucket 10/1m")?;
    /// let decided = tokio::spawn(limiter.acquire_owned(&rule, "user:42"));
    /// assert!(decided.await??.allowed);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    ///
    /// The same as [`acquire`](Self::acquire).
    pub fn acquire_owned<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
    ) -> BoxFuture<'static, Result<Decision, Error>> {
        let request = request.into();
        // Checked now: once the costs are owned, they can't be told from those of a set of rules, of which some unknown
        // names are accepted.
        let checked = request.plain().check_costs(rule);
        let (limiter, rule, request) = (self.clone(), rule.clone(), request.into_owned());
        Box::pin(async move {
            checked.inspect_err(|error| counted(&rule, Err(error)))?;
            limiter.acquire(&rule, &request).await
        })
    }

    /// What [`acquire`](Self::acquire) would answer, without taking anything. `remaining` and `reset_after` describe
    /// the untouched key, and so does the wait if an acquire would [block](Rule::block_for) the key.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`].
    pub async fn peek<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.make(Operation::Peek, rule, request.into()).await
    }

    /// Takes the cost now, for later: the call is allowed with a wait, after which the work may run. Up to the rule's
    /// `max-debt` may be owed beyond its capacity; later callers see that debt. [`acquire_wait`](Self::acquire_wait)
    /// does the waiting too. A call that repeats an [id](Request::id) gets the first call's answer, whose wait began then.
    ///
    /// Where a reservation is [cancelled](Self::cancel) before its turn, those behind it keep their waits, and whoever
    /// reserves next may go at the same time as the last of them: [the guide](crate::guide::blocks#what-comes-back)
    /// says what to do.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`]. A rule with a limit that can't reserve: anything but a token bucket or
    /// a fixed window that isn't a calendar window. (One without a `max-debt` can, and owes nothing.)
    pub async fn reserve<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.make(Operation::Reserve, rule, request.into()).await
    }

    /// Takes what is available, up to the cost: [`Decision::granted`] says how much. Denied if nothing is.
    ///
    /// # Errors
    ///
    /// Limits with different costs; no decision could be made, see [`Error`].
    pub async fn at_most<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.make(Operation::AtMost, rule, request.into()).await
    }

    /// Gives the cost back, never above full. In windows and logs the newest units go first, and expired units give
    /// nothing back. Redis doesn't know whose units they were: a unit that has already refilled is given back a second
    /// time, so refund soon, and say [after which decision](Request::after).
    ///
    /// Under a policy that is open or local, an unreachable Redis is no error: [`Balance::by`] says that it failed.
    ///
    /// # Errors
    ///
    /// A rule with permits beside other limits; permits without the [id](Request::id) that holds them; no answer, see
    /// [`Error`].
    pub async fn refund<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.make(Operation::Refund, rule, request.into()).await.map(Balance::of)
    }

    /// Takes the cost whether or not it is available, as far as the rule's arithmetic stays exact; `granted` is never
    /// more than that. [`refund`](Self::refund) forgives it; in a calendar window, the end of the window does too.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn penalty<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.make(Operation::Penalty, rule, request.into()).await
    }

    /// Denies every call on the key for this long from now, in place of a block that is in force, also a longer one;
    /// refunds, penalties and releases still count. In a rule of several limits, those that count the request's key are
    /// blocked. A call that is remembered by its id still gets its answer. [`unblock`](Self::unblock) and
    /// [`reset`](Self::reset) lift the block.
    ///
    /// # Errors
    ///
    /// A block of more than 71 years. A rule with no limit that counts the key. No answer; see [`Error`].
    pub async fn block<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
        time: Duration,
    ) -> Result<Balance, Error> {
        self.make(Operation::Block, rule, request.into().block_for(time)).await.map(Balance::of)
    }

    /// Lifts a [block](Self::block).
    ///
    /// # Errors
    ///
    /// The same as [`block`](Self::block).
    pub async fn unblock<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.block(rule, request, Duration::ZERO).await
    }

    /// Extends the permits held by this [id](Request::id) to a whole ttl from now.
    ///
    /// # Errors
    ///
    /// A request without an id; [`Error::is_unknown_id`] if it holds none, since they were released or have expired; no
    /// answer, see [`Error`].
    pub async fn renew<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.make(Operation::Renew, rule, request.into()).await.map(Balance::of)
    }

    /// Gives back the permits held by this [id](Request::id), if any are left, and forgets the id.
    ///
    /// Under a policy that is open or local, an unreachable Redis is no error: [`Balance::by`] says that it failed.
    ///
    /// # Errors
    ///
    /// A request without an id; no answer, see [`Error`].
    pub async fn release<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.make(Operation::Release, rule, request.into()).await.map(Balance::of)
    }

    /// Replaces the cost taken by the call of this [id](Request::id) with this one, once. More is charged, available or
    /// not (as far as the arithmetic stays exact); less is given back. A repeated settlement changes nothing and
    /// answers as the first did, so one without an answer can be sent again; nothing sends it again by itself.
    ///
    /// Under a policy that is open or local, an unreachable Redis is no error: [`Balance::by`] says that it failed.
    ///
    /// # Errors
    ///
    /// A request without an id; a rule of permits alone; [`Error::is_unknown_id`] if nothing is remembered of the id;
    /// no answer, see [`Error`].
    pub async fn settle<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.make(Operation::Settle, rule, request.into()).await.map(Balance::of)
    }

    /// Gives back what the call of this [id](Request::id) took, as far as it is still owed, and forgets the id. If
    /// others have reserved behind it, two may then go at the same time: [the
    /// guide](crate::guide::blocks#what-comes-back) says what to do.
    ///
    /// Under a policy that is open or local, an unreachable Redis is no error: [`Balance::by`] says that it failed.
    ///
    /// # Errors
    ///
    /// A request without an id; a rule of permits alone; [`Error::is_unknown_id`] if nothing is remembered of the id;
    /// no answer, see [`Error`].
    pub async fn cancel<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.make(Operation::Cancel, rule, request.into()).await.map(Balance::of)
    }

    /// Forgets what each limit of the rule counts for this request, and the request's id if it has one. A limit that
    /// counts a [part](Request::parts), such as an organisation, is forgotten for everyone who shares that part; a
    /// limit that must outlast a reset needs a rule of its own. Repairs state that can't be read.
    ///
    /// Under a policy that is open or local, an unreachable Redis is no error: [`Balance::by`] says that it failed.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn reset<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Balance, Error> {
        self.make(Operation::Reset, rule, request.into()).await.map(Balance::of)
    }
}
