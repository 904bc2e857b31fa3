//! A call whose limits' keys are in several slots of a cluster, perhaps on several nodes. Each slot decides its part by
//! a script call of its own, all of them at the same time. If one denies, or gives no answer, what the others took is
//! given back: for a plain acquire by the receipts that they answered, otherwise by an id that this process made for
//! the call. However often that is tried, nothing is given back twice.

mod receipts;

use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::Limiter;
use super::call::Call;
use super::decide::garbled;
use super::prepare::{Targets, holder};
use crate::algorithm::numbers::EXACT;
use crate::decision::Decision;
use crate::engine::cluster::slot_of;
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error, Kind};
use crate::operation::Operation;
use crate::random::unique_id;
use crate::request::Request;
use crate::rule::{Rule, Target};
use crate::runtime::{self, LONGEST_WAIT};

/// How long a caller waits for what its call gives back. After that it continues without the caller.
const PATIENCE: Duration = Duration::from_millis(100);

/// For how long after three deadlines, at least, the nodes know what a call took: longer than giving it back is tried,
/// which may take two deadlines and the time for which failures are tried again.
const REMEMBERED: Duration = Duration::from_secs(30);

/// How long the nodes know what a call with this deadline took. Calls that are remembered for one time share a script
/// call, so deadlines that are nearly alike count as one.
fn remembered_for(deadline: Duration) -> Duration {
    REMEMBERED + Duration::from_millis(millis(deadline.min(LONGEST_WAIT) * 3).next_power_of_two())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The limits of a call whose keys share a slot.
pub(super) struct Part<'r> {
    slot: u16,
    targets: Targets<'r>,
    /// Where they are among all limits of the call.
    places: SmallVec<[usize; 2]>,
}

/// What the parts of a call answered, in their order.
type Answers = Vec<Result<Decision, Error>>;

/// What a part took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Took {
    Nothing,
    Units,
    /// There is no answer, or a meaningless one.
    Perhaps,
}

impl Took {
    fn by(answer: &Result<Decision, Error>) -> Self {
        match answer.as_ref().map_err(Error::charged) {
            Ok(decision) if decision.allowed => Self::Units,
            Ok(_) | Err(Charged::No) => Self::Nothing,
            Err(Charged::Yes) => Self::Units,
            Err(Charged::Unknown) => Self::Perhaps,
        }
    }
}

/// A call that may have taken some of its parts. Unless it is over, they are given back when it is dropped.
struct Taking<'a> {
    limiter: &'a Limiter,
    rule: &'a Rule,
    request: Request<'a>,
    runtime: Handle,
    is_over: bool,
}

impl Limiter {
    /// Whether the keys of a call of this rule may be in several slots of a cluster.
    pub(super) fn may_need_parts(&self, rule: &Rule) -> bool {
        self.engine.is_cluster() && rule.counts_several_keys()
    }

    /// The parts of a call on these limits. None if their keys share a slot, or one server has them all.
    pub(super) fn parts<'r>(
        &self,
        rule: &Rule,
        targets: &[Target<'r>],
        request: &Request<'_>,
    ) -> Result<Option<Vec<Part<'r>>>, Error> {
        if targets.len() < 2 || !self.may_need_parts(rule) {
            return Ok(None);
        }
        let mut parts: Vec<Part<'r>> = Vec::new();
        for (place, target) in targets.iter().enumerate() {
            let slot = slot_of(&self.state_key(rule, *target, request.plain())?);
            let found = parts.iter().position(|part| part.slot == slot);
            let at = found.unwrap_or_else(|| {
                parts.push(Part { slot, targets: Targets::new(), places: SmallVec::new() });
                parts.len() - 1
            });
            parts[at].targets.push(*target);
            parts[at].places.push(place);
        }
        Ok(Some(parts).filter(|parts| parts.len() > 1))
    }

    /// Decides by all of these parts.
    pub(super) async fn decide_by_parts(&self, call: Call<'_>, parts: &[Part<'_>]) -> Result<Decision, Error> {
        let Call { request, operation, .. } = call;
        for part in parts {
            // Without the id that permits need, no part is asked.
            holder(&part.targets, request, operation)?;
        }
        let until = Deadline::after(request.deadline_or(self.deadline));
        match operation {
            Operation::Acquire | Operation::Reserve | Operation::AtMost => self.take_parts(call, parts, until).await,
            Operation::Peek => self.peek_at_parts(call, parts).await,
            _ => {
                let mut answers = self.ask_parts(call, parts).await;
                if operation == Operation::Cancel {
                    self.look_at_unknown(call, parts, &mut answers, until).await;
                }
                self.whole(parts.iter().zip(of_all(answers)?))
            }
        }
    }

    /// Takes all parts or none.
    async fn take_parts(&self, call: Call<'_>, parts: &[Part<'_>], until: Deadline) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        if request.has_id() && !request.has_own_id() {
            let names: Vec<_> = rule.each().iter().filter_map(Rule::name).collect();
            let why = "its limits count by different keys, which may be on several nodes";
            let missing = format!("on a cluster, a call with an id needs a tag, since {why}");
            return Err(Error::new(Kind::Input, format!("rule {}: {missing}", names.join(" + "))));
        }
        // A cost that could never be admitted takes nothing from any part.
        if operation != Operation::AtMost && !self.may_fit(call) {
            return self.peek_at_parts(call, parts).await;
        }
        if operation == Operation::Acquire && !request.has_id() {
            return self.take_by_receipts(call, parts, until).await;
        }
        let own = unique_id("part");
        let remembered = remembered_for(request.deadline_or(self.deadline));
        let asked = if request.has_id() { *request } else { request.own_id(&own).id_ttl(remembered) };
        let asked = if asked.id_ttl_ms()? < millis(remembered) { asked.id_ttl(remembered) } else { asked };
        // No limit has more than this, the largest cost of a call with an id.
        let asked = if asked.units(rule).most() > EXACT { asked.cost_of_all(EXACT) } else { asked };
        let runtime = runtime::with_timers()?;
        let mut taking = Taking { limiter: self, rule, request: asked, runtime, is_over: false };
        let answers = self.ask_parts(Call { request: &asked, ..call }, parts).await;
        let took: Vec<_> = answers.iter().map(Took::by).collect();
        let all_allow = answers.iter().all(|answer| answer.as_ref().is_ok_and(|decision| decision.allowed));
        taking.is_over = all_allow || took.iter().all(|took| *took == Took::Nothing);
        if all_allow {
            let decision = self.whole(parts.iter().zip(answers.into_iter().flatten()))?;
            return match operation {
                Operation::AtMost => self.evened(taking, parts, decision, until).await,
                _ => Ok(decision),
            };
        }
        let given_back = match taking.is_over {
            true => vec![None; parts.len()],
            false => taking.give_back(parts, &took, until).await,
        };
        self.denied(call, parts, answers, given_back, taking.is_over)
    }

    /// The decision where not all parts allow. `given_back`: the state of each part after it was given back; `is_over`:
    /// whether all were.
    fn denied(
        &self,
        call: Call<'_>,
        parts: &[Part<'_>],
        answers: Answers,
        given_back: Vec<Option<Decision>>,
        is_over: bool,
    ) -> Result<Decision, Error> {
        if let Some(error) = gravest(&answers) {
            return Err(if is_over { error.given_back() } else { error.half_way() });
        }
        let mut decided = Vec::with_capacity(parts.len());
        let at = answers.iter().flatten().filter(|decision| !decision.allowed).map(Decision::decided_at).max();
        for (decision, given_back) in answers.into_iter().flatten().zip(given_back) {
            decided.push(match given_back {
                Some(state) if decision.allowed => state,
                None if decision.allowed => decision.not_taken(call.operation == Operation::Reserve),
                _ => decision,
            });
        }
        let decision = self.whole(parts.iter().zip(decided))?;
        // The waits are counted from the denial.
        Ok(match at {
            Some(at) => decision.made_at(at),
            None => decision,
        })
    }

    /// After a cancel whose id only some parts knew, peeks at the others.
    async fn look_at_unknown(&self, call: Call<'_>, parts: &[Part<'_>], answers: &mut Answers, until: Deadline) {
        if !answers.iter().any(Result::is_ok) {
            return;
        }
        let peek = call.request.cost_of_all(0).deadline(until.left());
        let peek = Call { request: &peek, operation: Operation::Peek, ..call };
        let looked = parts.iter().zip(answers).map(async |(part, answer)| {
            if answer.as_ref().is_err_and(Error::is_unknown_id) {
                let now = self.decide_in_one_slot(peek, &part.targets).await;
                *answer = now.map_err(Error::half_way);
            }
        });
        join_all(looked).await;
    }

    /// What each limit has; takes nothing.
    async fn peek_at_parts(&self, call: Call<'_>, parts: &[Part<'_>]) -> Result<Decision, Error> {
        let answers = self.ask_parts(Call { operation: Operation::Peek, ..call }, parts).await;
        match gravest(&answers) {
            Some(error) => Err(error.given_back()),
            None => self.whole(parts.iter().zip(answers.into_iter().flatten())),
        }
    }

    /// Takes from each limit what the scarcest had, where others had more.
    async fn evened(
        &self,
        mut taking: Taking<'_>,
        parts: &[Part<'_>],
        mut decision: Decision,
        until: Deadline,
    ) -> Result<Decision, Error> {
        taking.is_over = false;
        let least = decision.limits.iter().map(|limit| limit.granted).min().unwrap_or_default();
        if decision.limits.iter().any(|limit| limit.granted > least) {
            taking.request = taking.request.cost_of_all(least);
            let settled = self.ask_parts(taking.call(Operation::Settle), parts);
            let settled = runtime::timeout_at(Instant::now() + until.left().min(PATIENCE), settled).await;
            match settled.map(|answers| answers.into_iter().collect::<Result<Vec<Decision>, Error>>()) {
                Some(Ok(settled)) => decision = self.whole(parts.iter().zip(settled))?,
                _ => {
                    taking.is_over = true;
                    taking.later(Operation::Settle);
                    decision = decision.granting(least);
                }
            }
        }
        taking.is_over = true;
        Ok(decision)
    }

    /// Asks all parts at the same time.
    async fn ask_parts(&self, call: Call<'_>, parts: &[Part<'_>]) -> Answers {
        join_all(parts.iter().map(|part| self.decide_in_one_slot(call, &part.targets))).await
    }

    /// The decision of all parts, in the order of their limits.
    fn whole<'p, 'r: 'p>(
        &self,
        decided: impl IntoIterator<Item = (&'p Part<'r>, Decision)>,
    ) -> Result<Decision, Error> {
        let (mut at, mut limits) = (SystemTime::UNIX_EPOCH, Vec::new());
        for (part, decision) in decided {
            at = at.max(decision.decided_at());
            limits.extend(part.places.iter().copied().zip(decision.limits.iter().cloned()));
        }
        limits.sort_unstable_by_key(|(place, _)| *place);
        let limits = limits.into_iter().map(|(_, limit)| limit).collect();
        Decision::of(limits, self.engine.by(), at).ok_or_else(garbled)
    }
}

impl Taking<'_> {
    fn call(&self, operation: Operation) -> Call<'_> {
        Call { rule: self.rule, request: &self.request, operation }
    }

    /// Gives back these parts, and waits for the answers for a while.
    async fn give_back(&mut self, parts: &[Part<'_>], took: &[Took], until: Deadline) -> Vec<Option<Decision>> {
        let operation = self.gives_back_by();
        // What this process gives back ends the denials that it remembers of these keys.
        let given_back = parts.iter().zip(took).filter(|(_, took)| **took != Took::Nothing);
        let changed = given_back.flat_map(|(part, _)| part.targets.iter().copied());
        let changing = self.limiter.changing_those(self.rule, &self.request, changed).ok().flatten();
        let each = parts.iter().zip(took).map(async |(part, took)| match took {
            Took::Nothing => None,
            _ => Some(self.limiter.decide_in_one_slot(self.call(operation), &part.targets).await),
        });
        let given = runtime::timeout_at(Instant::now() + until.left().min(PATIENCE), join_all(each)).await;
        let given = given.unwrap_or_else(|| vec![None; parts.len()]);
        let is_done = |(given, took): (&Option<Result<Decision, Error>>, &Took)| match (given, took) {
            (_, Took::Nothing) => true,
            // A late call could still take, unless what it took was found.
            (Some(Ok(_)), Took::Perhaps) => operation == Operation::Cancel,
            (Some(Ok(_)), Took::Units) => true,
            (Some(Err(error)), Took::Units) => error.is_unknown_id(),
            _ => false,
        };
        self.is_over = given.iter().zip(took).all(is_done);
        if let Some(changing) = changing.filter(|_| self.is_over) {
            changing.done();
        }
        given.into_iter().map(|given| given.and_then(Result::ok)).collect()
    }

    /// Permits alone are released; whatever else was taken is cancelled.
    fn gives_back_by(&self) -> Operation {
        let permits_alone = self.rule.limits().all(|limit| limit.algorithm().holds());
        if permits_alone { Operation::Release } else { Operation::Cancel }
    }

    /// Does this to all parts in the background, each repeatedly while its node is away, for some seconds.
    fn later(&self, operation: Operation) {
        self.limiter.call_later(&self.runtime, self.call(operation), None);
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.later(self.gives_back_by());
        }
    }
}

/// Why a part gave no answer. Errors that no policy answers, such as a missing permission, come before others: nobody
/// may be admitted by accident.
fn gravest(answers: &Answers) -> Option<Error> {
    let errors = answers.iter().filter_map(|answer| answer.as_ref().err());
    errors.min_by_key(|error| error.goes_to_policy()).cloned()
}

/// The answers of all parts, or why there is none. Of several errors the first that isn't about the call's id, which
/// may mean that it was given back before; and temporary ones first, since they are retried.
pub(super) fn of_all(answers: Answers) -> Result<Vec<Decision>, Error> {
    let may_be_done = |answer: &Result<Decision, Error>| match answer {
        Ok(_) => true,
        Err(error) => error.is_unknown_id() || error.charged() != Charged::No,
    };
    let some_done = answers.iter().any(may_be_done);
    let mut errors: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
    errors.sort_by_key(|error| (error.is_unknown_id(), !error.goes_to_policy()));
    match errors.first() {
        Some(error) if error.is_unknown_id() && !answers.iter().any(Result::is_ok) => Err(Error::clone(error)),
        Some(error) if some_done => Err(Error::clone(error).half_way()),
        Some(error) => Err(Error::clone(error)),
        None => answers.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_part_may_yet_charge_is_not_hidden_by_another_that_charged_nothing() {
        let refused = || Err(Error::deadline(PATIENCE, false));
        let unknown = || Err(Error::deadline(PATIENCE, true));
        for answers in [vec![refused(), unknown()], vec![unknown(), refused()]] {
            assert_eq!(of_all(answers).expect_err("no answer").charged(), Charged::Unknown);
        }
        assert_eq!(of_all(vec![refused(), refused()]).expect_err("no answer").charged(), Charged::No);
    }
}
