//! Many decisions in one call.

use futures_util::future::{join, join_all};
use futures_util::stream::{self, StreamExt};
use tokio::time::Instant;

use super::cached_denials::Recalled;
use super::call::Call;
use super::counted::counted;
use super::decide::garbled;
use super::handle::Limiter;
use crate::call::{Ask, Reply};
use crate::decision::{DecidedBy, Decision};
use crate::denial_cache::Sighting;
use crate::engine::AcquiringAll;
use crate::engine::deadline::Deadline;
use crate::error::Error;
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::Rule;

/// How many requests are prepared before the first of them are sent.
const STEP: usize = 4096;
/// How many of them this process decides at once, before other tasks get their turn.
const STEP_HERE: usize = 128;

/// How one of many requests is decided.
enum Plan {
    Recalled(Box<Decision>),
    /// By this shard, if the limit is split.
    Asked(Option<u32>, Option<Box<Sighting>>),
    /// With an error, such as that its deadline had passed before it was prepared.
    Refused(Error),
    /// By parts, since its keys are in several slots.
    InParts,
}

impl Limiter {
    /// Acquires for each of these requests independently, but sends them together: in as few script calls as possible,
    /// at one round trip for each 1,024 keys, with two such batches in flight at a time. Requests that cost Redis more
    /// share a round trip with fewer others: 512 under a rule that counts or blocks denials, 256 by a rule of two
    /// limits, 170 with an id by a rule of one. The decisions are in the requests' order. Of several requests with the
    /// same key and cost, the first ones are allowed, as many as there is room for, and all see the levels after the
    /// last of them in their batch: `remaining` is what all of these left.
    ///
    /// On a cluster, requests whose limits have keys in several slots are sent by themselves, all at the same time.
    ///
    /// Calendar windows that the server's clock has left take one more round trip for each 1,024 keys.
    ///
    /// Each request ends by its deadline, counted from the call. Redis decides some 300,000 keys a second, so with more
    /// than 100,000 keys some aren't sent within 500 ms: each of those returns an error that says so, and nothing is
    /// charged for it. Under the policy `local`, what Redis hasn't answered by then is decided in this
    /// process after that, one request after another, in some 10 µs each (optimised). Dropping the future charges at most for the keys in
    /// flight.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = Rule::new("mail", "token-bucket 100/1s")?;
    /// let users = vec!["user:1".to_owned(), "user:2".to_owned()];
    ///
    /// let decisions = limiter.acquire_many(&rule, &users).await;
    /// for (user, decision) in users.iter().zip(decisions) {
    ///     assert!(decision?.allowed, "{user}");
    /// }
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub async fn acquire_many<'a, R: Into<Request<'a>>>(
        &self,
        rule: &Rule,
        requests: impl IntoIterator<Item = R>,
    ) -> Vec<Result<Decision, Error>> {
        let began = Instant::now();
        let requests: Vec<Request<'a>> = requests.into_iter().map(Into::into).collect();
        let step = if self.engine.by() == DecidedBy::Redis { STEP } else { STEP_HERE };
        let mut ways = Vec::with_capacity(requests.len());
        let mut steps = Vec::with_capacity(requests.len().div_ceil(step));
        for step in requests.chunks(step) {
            if !steps.is_empty() {
                // Lets what is already prepared be sent while the rest is being prepared.
                tokio::task::yield_now().await;
            }
            let asks = step.iter().filter_map(|request| {
                let until = self.until(request, began);
                if until.check().is_err() {
                    ways.push(Plan::Refused(Error::deadline(request.deadline_or(self.deadline), false)));
                    return None;
                }
                let (way, ask) = self.way(rule, request).unwrap_or_else(|error| (Plan::Refused(error), None));
                ways.push(way);
                Some((ask?, until))
            });
            let mut asked = self.engine.acquire_all(asks);
            asked.begin().await;
            steps.push(asked);
        }
        let in_parts = ways.iter().enumerate().filter(|(_, way)| matches!(way, Plan::InParts)).map(|(at, _)| at);
        let in_parts: Vec<usize> = in_parts.collect();
        let ended = join_all(steps.iter_mut().map(AcquiringAll::ended));
        let (_, in_parts) = join(ended, self.acquire_in_parts(rule, &requests, in_parts, began)).await;
        let mut steps = steps.into_iter();
        let mut together = steps.next();
        let mut decisions: Vec<Result<Decision, Error>> = Vec::with_capacity(requests.len());
        let mut again = Vec::new();
        for (request, way) in requests.iter().zip(ways) {
            let decided = match way {
                Plan::Asked(shard, sighting) => {
                    let reply = loop {
                        let Some(step) = &mut together else { break Err(garbled()) };
                        match step.next().await {
                            Some(reply) => break reply,
                            None => together = steps.next(),
                        }
                    };
                    match reply {
                        Err(refused) if Self::is_asked_again_after(&refused) => {
                            again.push((decisions.len(), shard, sighting, refused.clone()));
                            decisions.push(Err(refused));
                            continue;
                        }
                        reply => reply.and_then(|reply| self.decided_together(rule, shard, request, &reply, sighting)),
                    }
                }
                Plan::Recalled(denial) => {
                    // As for a single call, which the caller may also repeat at once.
                    tokio::task::consume_budget().await;
                    Ok(*denial)
                }
                Plan::InParts => {
                    decisions.push(Err(garbled()));
                    continue;
                }
                Plan::Refused(error) => Err(error),
            };
            if decided.is_err() {
                // A call that is refused at once yields to other tasks as one that waits for Redis does.
                tokio::task::consume_budget().await;
            }
            decisions.push(self.or_instead(rule, request, decided).await);
        }
        if !again.is_empty() {
            let again = again.into_iter().map(async |(at, shard, sighting, refused)| {
                let request = &requests[at];
                let ask = |server_us| self.ask_to_acquire(rule, shard, request, server_us);
                let decided = self.ask_again(ask, refused, self.until(request, began)).await;
                let decided = decided.and_then(|reply| self.decided_together(rule, shard, request, &reply, sighting));
                (at, self.or_instead(rule, request, decided).await)
            });
            let mut again = Box::pin(stream::iter(again).buffer_unordered(STEP));
            while let Some((at, decided)) = again.next().await {
                decisions[at] = decided;
            }
        }
        for (at, decided) in in_parts {
            counted(rule, decided.as_ref());
            decisions[at] = decided;
        }
        decisions
    }

    /// Decides those of these requests whose keys are in several slots of a cluster, each by itself.
    async fn acquire_in_parts(
        &self,
        rule: &Rule,
        requests: &[Request<'_>],
        those: Vec<usize>,
        began: Instant,
    ) -> Vec<(usize, Result<Decision, Error>)> {
        if those.is_empty() {
            return Vec::new();
        }
        let decided = those.into_iter().map(async |at| {
            let request = requests[at].deadline(self.until(&requests[at], began).left());
            (at, self.decide(rule, request, Operation::Acquire).uncounted().await)
        });
        Box::pin(stream::iter(decided).buffer_unordered(STEP).collect()).await
    }

    /// The deadline of a request whose call began at this time.
    fn until(&self, request: &Request<'_>, began: Instant) -> Deadline {
        Deadline::counted_from(began, request.deadline_or(self.deadline))
    }

    /// The decision, or the answer of the rule's policy in its place.
    async fn or_instead(
        &self,
        rule: &Rule,
        request: &Request<'_>,
        decided: Result<Decision, Error>,
    ) -> Result<Decision, Error> {
        let decided = match decided {
            Err(error) if self.may_answer_instead(&error, rule) => {
                Box::pin(self.answer_instead(error, Call::acquire(rule, request))).await
            }
            decided => decided,
        };
        counted(rule, decided.as_ref());
        decided.map(|decision| decision.jittered(request.wait_jitter()))
    }

    fn decided_together(
        &self,
        rule: &Rule,
        shard: Option<u32>,
        request: &Request<'_>,
        reply: &Reply,
        sighting: Option<Box<Sighting>>,
    ) -> Result<Decision, Error> {
        let targets = self.targets_of_acquire(rule, shard);
        let decision = self.decision(Call::acquire(rule, request), &targets, reply)?;
        self.remember(sighting, &request.units(rule), &decision);
        Ok(decision)
    }

    /// How this request is decided, and its ask if it is asked for.
    fn way<'r>(&self, rule: &'r Rule, request: &Request<'_>) -> Result<(Plan, Option<Ask<'r>>), Error> {
        let shard = self.shard_of_acquire(rule, request);
        if self.parts(rule, &self.targets_of_acquire(rule, shard), request)?.is_some() {
            return Ok((Plan::InParts, None));
        }
        let ask = self.ask_to_acquire(rule, shard, request, None)?;
        Ok(match self.recall(Call::acquire(rule, request))? {
            Recalled::Denial(denial) => (Plan::Recalled(denial), None),
            Recalled::Nothing(sighting) => (Plan::Asked(shard, sighting), Some(ask)),
        })
    }
}
