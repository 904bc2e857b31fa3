//! A call whose limits' keys are in several slots of a cluster, perhaps on several nodes. Each slot decides its part by
//! a script call of its own, all of them at the same time. If one denies, or gives no answer, what the others took is
//! given back: for a plain acquire by the receipts that they answered, otherwise by an id that this process made for
//! the call. However often that is tried, nothing is given back twice.

mod ids;
mod receipts;

use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use smallvec::SmallVec;

use super::call::Call;
use super::decide::garbled;
use super::handle::Limiter;
use super::prepare::{Targets, holder};
use crate::decision::Decision;
use crate::engine::cluster::slot_of;
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error, Kind};
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::{Rule, Target};
use crate::runtime::LONGEST_WAIT;

/// How long a caller waits for what its call gives back. After that it continues without the caller.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long, beyond three deadlines, the nodes remember at least what a call took. Giving it back may take two
/// deadlines and the time for which failures are retried, which is shorter.
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

/// What each part has after it was given back; `None` for one that took nothing, or didn't answer in time.
type GivenBack = Vec<Option<Result<Decision, Error>>>;

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
        // A cost that could never be admitted takes nothing from any part. What debt admits is known to scripts alone.
        if operation == Operation::Acquire && !self.may_fit(call) {
            return self.peek_at_parts(call, parts).await;
        }
        if operation == Operation::Acquire && !request.has_id() {
            return self.take_by_receipts(call, parts, until).await;
        }
        self.take_by_id(call, parts, until).await
    }

    /// The decision where not all parts allow. `given_back`: the state of each part after it was given back; `is_over`:
    /// whether all were.
    fn denied(
        &self,
        call: Call<'_>,
        parts: &[Part<'_>],
        answers: Answers,
        given_back: GivenBack,
        is_over: bool,
    ) -> Result<Decision, Error> {
        if let Some(error) = gravest(&answers) {
            return Err(if is_over { error.given_back() } else { error.half_way() });
        }
        // Such as a missing right: the units stay charged until somebody grants it, which no denial may hide.
        let mut refusals = given_back.iter().flatten().filter_map(|given| given.as_ref().err());
        if let Some(error) = refusals.find(|error| error.is_refusal()) {
            return Err(Error::clone(error).half_way());
        }
        let mut decided = Vec::with_capacity(parts.len());
        let at = answers.iter().flatten().filter(|decision| !decision.allowed).map(Decision::decided_at).max();
        for (decision, given_back) in answers.into_iter().flatten().zip(given_back) {
            decided.push(match given_back {
                Some(Ok(state)) if decision.allowed => state,
                _ if decision.allowed => decision.not_taken(call.operation == Operation::Reserve),
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
