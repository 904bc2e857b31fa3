//! A flight: the asks of callers who leave together, in one pipeline of as few calls as will do.

use std::pin::{Pin, pin};
use std::sync::Arc;

use deadpool_redis::redis::{RedisError, Value};
use tokio::time::Instant;

use super::departures::{Answer, Caller, GRAIN};
use super::errors::Called;
use super::link::Link;
use super::local::Local;
use super::sending::{Confirm, Guest, How, of_batch, send};
use super::{Redis, WAITS, is_noscript, records};
use crate::batch::{Batch, Records};
use crate::error::Error;
use crate::random::jittered;

/// What was answered, and what the replicas lack of it.
type Confirmed = (Records, Option<Error>);

/// Those who wait for an answer still.
struct Passengers(Vec<Option<Answer>>);

impl Redis {
    /// Sends these callers' asks, and gives each its answer as soon as there is one.
    pub(super) async fn fly(&self, local: &Arc<Local>, mut callers: Vec<Caller>) {
        // Who gives up before there is a connection isn't sent.
        let mut connecting = pin!(self.connection(local));
        let held = loop {
            let Some(first) = callers.iter().map(|caller| caller.answer.until).min() else { return };
            if let Ok(held) = tokio::time::timeout_at(first.max(Instant::now() + GRAIN), &mut connecting).await {
                break held;
            }
            let now = Instant::now();
            callers.extract_if(.., |caller| caller.answer.until <= now).for_each(|caller| caller.answer.give_up(false));
        };
        let now = Instant::now();
        callers.extract_if(.., |caller| caller.answer.until <= now).for_each(|caller| caller.answer.give_up(false));
        callers.retain(|caller| !caller.answer.is_unwanted());
        let (asks, answers): (Vec<_>, Vec<_>) =
            callers.into_iter().map(|caller| (caller.ask, Some(caller.answer))).unzip();
        let mut passengers = Passengers(answers);
        let mut held = match held {
            Ok(held) => held,
            Err(error) => return passengers.tell_all(&error),
        };

        let (batches, places) = Batch::of(&asks);
        let mut under_way: Vec<_> = (0..batches.len()).collect();
        let mut waits = WAITS.into_iter();
        loop {
            let Some(last) = passengers.deadlines().max() else { return };
            let confirm = self.confirms(last.saturating_duration_since(Instant::now()));
            let those = under_way.iter().map(|at| &batches[*at]).collect();
            let sent = pin!(self.send_all(local, held, those, confirm));
            let Some(answered) = passengers.until(sent, |_, answer| answer.late(true)).await else { return };

            let wait = waits.next();
            let mut results: Vec<Option<Result<Confirmed, Error>>> = batches.iter().map(|_| None).collect();
            under_way.iter().zip(answered).for_each(|(at, result)| results[*at] = Some(result));
            // Who has a detour to take isn't kept waiting, and keeps nobody.
            let put_off = |result: &Option<Result<Confirmed, Error>>| {
                let not_now = |error: &Error| error.is_not_now() && error.detour().is_none();
                wait.is_some() && result.as_ref().is_some_and(|result| result.as_ref().is_err_and(not_now))
            };
            under_way.retain(|at| put_off(&results[*at]));
            local.outcome_of_all(results.iter().filter(|result| !put_off(result)).flatten());
            for ((answer, ask), place) in passengers.0.iter_mut().zip(&asks).zip(&places) {
                let reply = match &results[place.batch] {
                    result if put_off(result) => continue,
                    Some(Ok((records, lacking))) => records
                        .reply(*place, ask.script)
                        .and_then(|reply| reply.unless(lacking.clone().filter(|_| ask.cost > 0))),
                    Some(Err(error)) => Err(error.clone()),
                    None => continue,
                };
                if let Some(answer) = answer.take() {
                    answer.tell(reply);
                }
            }
            let Some(wait) = wait.filter(|_| !under_way.is_empty()) else { return };

            // It says more than that there was no time to ask again.
            let said = |at: usize, answer: &Answer| match &results[places[at].batch] {
                Some(Err(error)) => error.clone(),
                _ => answer.late(false),
            };
            let again = pin!(async {
                tokio::time::sleep(jittered(wait, 50)).await;
                self.connection(local).await
            });
            held = match passengers.until(again, said).await {
                Some(Ok(held)) => held,
                Some(Err(error)) => return passengers.tell_all(&error),
                None => return,
            };
        }
    }

    /// One pipeline, and another for what the server has no script of.
    async fn send_all(
        &self,
        local: &Local,
        link: Link,
        batches: Vec<&Batch<'_>>,
        confirm: Option<Confirm>,
    ) -> Vec<Result<Confirmed, Error>> {
        let called = |batches: &[&Batch<'_>], how| batches.iter().map(|batch| of_batch(batch, how)).collect::<Vec<_>>();
        let (answers, lacking) = send(&link, called(&batches, How::ByDigest), Guest::No, confirm).await;
        let mut answers: Vec<_> = answers.into_iter().map(|answer| (answer, lacking.clone())).collect();
        let missing: Vec<_> = (0..batches.len()).filter(|at| answers[*at].0.as_ref().is_err_and(is_noscript)).collect();
        if !missing.is_empty() {
            let those: Vec<_> = missing.iter().map(|at| batches[*at]).collect();
            let (again, lacking) = send(&link, called(&those, How::ByText), Guest::No, confirm).await;
            missing.into_iter().zip(again).for_each(|(at, answer)| answers[at] = (answer, lacking.clone()));
        }
        let read = |((answer, lacking), batch): ((Result<Value, RedisError>, Option<Error>), &Batch<'_>)| match answer {
            Ok(value) => records(value, batch).map(|records| (records, lacking)),
            Err(error) => Err(local.told_of(Called::of_batch(batch), &error, link.number)),
        };
        answers.into_iter().zip(batches).map(read).collect()
    }
}

impl Local {
    /// They are one attempt: Redis is away if it answered none of them.
    fn outcome_of_all<'a>(&self, mut results: impl Iterator<Item = &'a Result<Confirmed, Error>> + Clone) {
        let answered = results.clone().find(|result| !result.as_ref().is_err_and(Error::is_outage));
        if let Some(result) = answered.or_else(|| results.next()) {
            self.outcome(result.as_ref().err());
        }
    }
}

impl Passengers {
    fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.iter().flatten().map(|answer| answer.until)
    }

    /// What comes of this, while those whose deadlines pass are told so; none if nobody waits any more.
    async fn until<T>(
        &mut self,
        mut future: Pin<&mut impl Future<Output = T>>,
        late: impl Fn(usize, &Answer) -> Error,
    ) -> Option<T> {
        loop {
            let first = self.deadlines().min()?;
            if let Ok(done) = tokio::time::timeout_at(first.max(Instant::now() + GRAIN), &mut future).await {
                return Some(done);
            }
            let now = Instant::now();
            for (at, answer) in self.0.iter_mut().enumerate() {
                if let Some(answer) = answer.take_if(|answer| answer.until <= now) {
                    let error = late(at, &answer);
                    answer.tell(Err(error));
                }
            }
        }
    }

    fn tell_all(self, error: &Error) {
        self.0.into_iter().flatten().for_each(|answer| answer.tell(Err(error.clone())));
    }
}
