//! Many decisions at hand.

use futures_util::future::{join, join_all};

use super::Limiter;
use super::sharded::Place;
use crate::batch::Ask;
use crate::decision::Decision;
use crate::denials::Sighting;
use crate::error::Error;
use crate::request::Request;
use crate::rule::Rule;
use crate::script::Mode;

/// How one of many requests is decided.
enum Asked<'r> {
    Recalled(Box<Decision>),
    Together(Ask<'r>, Option<Sighting>),
    Alone,
}

impl Limiter {
    /// Acquires for each of these requests by itself, together: as few calls of scripts as will do, in one round trip.
    /// The decisions are in the requests' order. Requests that can't be decided together, as those with an id or by a
    /// rule of several limits, are sent at the same time.
    pub async fn acquire_many<'a, R: Into<Request<'a>>>(
        &self,
        rule: &Rule,
        requests: impl IntoIterator<Item = R>,
    ) -> Vec<Result<Decision, Error>> {
        let requests: Vec<Request<'a>> = requests.into_iter().map(Into::into).collect();
        let mut decided: Vec<Option<Result<Decision, Error>>> = requests.iter().map(|_| None).collect();
        let (mut places, mut alone) = (Vec::with_capacity(requests.len()), Vec::new());
        let asks = requests.iter().enumerate().filter_map(|(at, request)| {
            match self.ask_or_recall(rule, request) {
                Ok(Asked::Recalled(denial)) => decided[at] = Some(Ok(denial.jittered(request.wait_jitter()))),
                Ok(Asked::Together(ask, sighting)) => {
                    places.push((at, sighting));
                    return Some((ask, request.deadline_or(self.deadline)));
                }
                Ok(Asked::Alone) => alone.push(async move { (at, self.decide(rule, request, Mode::Acquire).await) }),
                Err(error) => decided[at] = Some(Err(error)),
            }
            None
        });
        let together = self.engine.acquire_all(asks);
        let (replies, alone) = join(together, join_all(alone)).await;
        for ((at, sighting), reply) in places.into_iter().zip(replies) {
            let request = &requests[at];
            let decision =
                reply.and_then(|reply| self.decision_of_ask(rule, rule.counts()[0].whole(), request, &reply));
            if let (Some(cache), Some(sighting), Ok(decision)) = (&self.denials, sighting, &decision) {
                cache.remember(sighting, request.units(rule), decision);
            }
            let decision = match decision {
                Err(error) => {
                    // What is decided in this process never waits by itself.
                    tokio::task::consume_budget().await;
                    Box::pin(self.answer_instead(error, rule, request, Mode::Acquire)).await
                }
                decided => decided,
            };
            decided[at] = Some(decision.map(|decision| decision.jittered(request.wait_jitter())));
        }
        for (at, decision) in alone {
            decided[at] = Some(decision);
        }
        decided.into_iter().flatten().collect()
    }

    fn ask_or_recall<'r>(&self, rule: &'r Rule, request: &Request<'_>) -> Result<Asked<'r>, Error> {
        let [count] = rule.counts() else { return Ok(Asked::Alone) };
        let target = match count.limit.shards() {
            1 => count.whole(),
            _ => match self.place(rule, count, request, Mode::Acquire) {
                Place::One(number) => count.shard(number),
                Place::OneOf(..) | Place::All => return Ok(Asked::Alone),
            },
        };
        let Some(ask) = self.ask(rule, target, request)? else { return Ok(Asked::Alone) };
        let Some(cache) = &self.denials else { return Ok(Asked::Together(ask, None)) };
        let Some(sighting) = self.sight(cache, rule, request)? else { return Ok(Asked::Together(ask, None)) };
        Ok(match cache.recall(&sighting, request.units(rule)) {
            Some(denial) => Asked::Recalled(Box::new(denial)),
            None => Asked::Together(ask, Some(sighting)),
        })
    }
}
