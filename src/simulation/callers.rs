//! The callers: tasks that ask for decisions by a few rules, each with its own patience, and record the answers.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::chance::Chance;
use super::network::Network;
use crate::{Charged, DecidedBy, Decision, Error, ErrorKind, Limiter, Request, Rule};

/// One caller's answer.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) caller: usize,
    pub(super) key: String,
    pub(super) kind: CallKind,
    pub(super) cost: u64,
    pub(super) deadline: Duration,
    /// In milliseconds of simulated time.
    pub(super) began: u64,
    /// None while in flight.
    pub(super) ended: Option<u64>,
    pub(super) outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    /// On a key that no other call uses.
    Own,
    /// The same, by a rule of two limits.
    OwnOfTwo,
    /// The same, resent with the same id until the outcome is known.
    OwnById,
    OwnPeek,
    /// By the shared rule at this index.
    Shared(usize),
    AtMost(usize),
    Peek,
    Hold,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its future was dropped.
    Abandoned,
    Allowed {
        limit: u64,
        remaining: u64,
        granted: u64,
    },
    Denied {
        limit: u64,
    },
    Failed {
        charged: Charged,
        why: String,
        disconnected: bool,
    },
}

/// How long a caller waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    Awaits,
    GivesUpAfter(Duration),
    /// After polling the future this many times.
    DropsAfter(u32),
}

pub(super) struct Callers {
    pub(super) told: Mutex<Vec<Told>>,
    pub(super) rules: Rules,
    pub(super) network: Arc<Network>,
    limiter: Limiter,
}

pub(super) struct Rules {
    /// Each rule, with a key's capacity and what it gets back per second.
    pub(super) shared: Vec<(Rule, u64, u64)>,
    own: Rule,
    own_of_two: Rule,
    permits: Rule,
}

/// The capacity of callers' own keys: more than any call takes.
pub(super) const OWN: u64 = 1000;

impl Rules {
    pub(super) fn new() -> Self {
        let rule = |text: &str, name: &str| Rule::new(name, text).expect("a name");
        Self {
            shared: vec![
                (rule("gcra 5/1s", "gcra"), 5, 5),
                (rule("fixed-window 8/1s", "window"), 8, 8),
                (rule("token-bucket 20/10s burst 6", "bucket"), 6, 2),
                (rule("gcra 4/1s, fixed-window 60/10s", "two"), 4, 4),
            ],
            own: rule("gcra 1000/1h", "own"),
            own_of_two: rule("gcra 1000/1h, token-bucket 1000/2h", "both"),
            permits: rule("concurrency 3 ttl 2s", "permits"),
        }
    }
}

impl Callers {
    pub(super) fn new(limiter: Limiter, network: &Arc<Network>) -> Arc<Self> {
        Arc::new(Self { told: Mutex::default(), rules: Rules::new(), network: Arc::clone(network), limiter })
    }

    /// Asks now and then, until `end`.
    pub(super) async fn call(self: Arc<Self>, caller: usize, mut chance: Chance, pause: u64, end: Instant) {
        // Some ask at the same instant as others.
        let together = chance.one_in(2);
        sleep(chance.ms(0, pause)).await;
        let mut number = 0;
        while Instant::now() < end {
            number += 1;
            self.one(caller, number, &mut chance).await;
            let mut wait = chance.between(0, 2 * pause);
            if together {
                let now = self.network.medium.ms();
                wait = (now + wait).next_multiple_of(100) - now;
            }
            sleep(Duration::from_millis(wait)).await;
        }
    }

    async fn one(self: &Arc<Self>, caller: usize, number: u64, chance: &mut Chance) {
        let deadline = Duration::from_millis(chance.pick(&[5, 20, 20, 100, 100, 500, 500, 500, 5000]));
        let patience = match chance.below(8) {
            0 | 1 => Patience::GivesUpAfter(chance.ms(1, 100)),
            2 => Patience::DropsAfter(chance.between(1, 3) as u32),
            _ => Patience::Awaits,
        };
        let cost = chance.between(1, 50);
        let key = format!("o{caller}-{number}");
        match chance.below(16) {
            0..=4 => {
                let (rule, kind) = match chance.one_in(5) {
                    true => (&self.rules.own_of_two, CallKind::OwnOfTwo),
                    false => (&self.rules.own, CallKind::Own),
                };
                let ask = |key| self.limiter.acquire(rule, key);
                self.ask(caller, patience, deadline, &key, kind, cost, ask).await;
            }
            5 => {
                let ask = |key| self.limiter.peek(&self.rules.own, key);
                self.ask(caller, patience, deadline, &key, CallKind::OwnPeek, cost, ask).await;
            }
            6 | 7 => self.by_id(caller, patience, deadline, &key, cost).await,
            8 => self.many(caller, patience, deadline, &key, chance).await,
            9 => self.hold(caller, patience, deadline, chance).await,
            10 => {
                let which = chance.below(3) as usize;
                let (key, cost) = (format!("s{which}-{}", chance.below(2)), chance.between(1, 8));
                let ask = |key| self.limiter.at_most(&self.rules.shared[which].0, key);
                self.ask(caller, patience, deadline, &key, CallKind::AtMost(which), cost, ask).await;
            }
            11 => {
                let which = chance.below(4) as usize;
                let key = format!("s{which}-{}", chance.below(2));
                let ask = |key| self.limiter.peek(&self.rules.shared[which].0, key);
                self.ask(caller, patience, deadline, &key, CallKind::Peek, 1, ask).await;
            }
            _ => {
                let which = chance.below(4) as usize;
                let (key, cost) = (format!("s{which}-{}", chance.below(2)), chance.between(1, 2));
                let ask = |key| self.limiter.acquire(&self.rules.shared[which].0, key);
                self.ask(caller, patience, deadline, &key, CallKind::Shared(which), cost, ask).await;
            }
        }
    }

    /// Asks for one decision, and records the outcome.
    #[expect(clippy::too_many_arguments, reason = "all that there is to a call")]
    async fn ask<'a, F>(
        &self,
        caller: usize,
        patience: Patience,
        deadline: Duration,
        key: &'a str,
        kind: CallKind,
        cost: u64,
        ask: impl FnOnce(Request<'a>) -> F,
    ) -> Outcome
    where
        F: Future<Output = Result<Decision, Error>>,
    {
        let place = self.begin(caller, key, kind, cost, deadline);
        let answer = patience.wait(ask(Request::new(key).cost(cost).deadline(deadline))).await;
        let outcome = answer.map_or(Outcome::Abandoned, |answer| Outcome::of(&answer));
        self.end(place, outcome.clone());
        outcome
    }

    async fn by_id(&self, caller: usize, patience: Patience, deadline: Duration, key: &str, cost: u64) {
        let id = format!("id-{key}");
        for _ in 0..3 {
            let ask = |request: Request<'_>| {
                let (request, id) = (request.into_owned(), &id);
                async move { self.limiter.acquire(&self.rules.own, Request::from(&request).id(id)).await }
            };
            let outcome = self.ask(caller, patience, deadline, key, CallKind::OwnById, cost, ask).await;
            if !matches!(outcome, Outcome::Abandoned | Outcome::Failed { charged: Charged::Unknown, .. }) {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn many(&self, caller: usize, patience: Patience, deadline: Duration, key: &str, chance: &mut Chance) {
        let each: Vec<_> =
            (0..chance.between(2, 12)).map(|at| (format!("{key}-{at}"), chance.between(1, 50))).collect();
        let places: Vec<_> =
            each.iter().map(|(key, cost)| self.begin(caller, key, CallKind::Own, *cost, deadline)).collect();
        let requests = each.iter().map(|(key, cost)| Request::new(key).cost(*cost).deadline(deadline));
        let answers = patience.wait(self.limiter.acquire_many(&self.rules.own, requests)).await;
        match answers {
            Some(answers) => {
                places.iter().zip(answers).for_each(|(place, answer)| self.end(*place, Outcome::of(&answer)));
            }
            None => places.into_iter().for_each(|place| self.end(place, Outcome::Abandoned)),
        }
    }

    async fn hold(&self, caller: usize, patience: Patience, deadline: Duration, chance: &mut Chance) {
        let key = format!("p{}", chance.below(3));
        let place = self.begin(caller, &key, CallKind::Hold, 1, deadline);
        let request = Request::new(&key).deadline(deadline);
        let held = patience.wait(self.limiter.hold(&self.rules.permits, request)).await;
        let outcome = match &held {
            None => Outcome::Abandoned,
            Some(Ok(held)) => Outcome::of(&Ok(held.decision.clone())),
            Some(Err(error)) => Outcome::of(&Err(error.clone())),
        };
        self.end(place, outcome);
        if let Some(Ok(held)) = held {
            sleep(chance.ms(0, 300)).await;
            if chance.one_in(2)
                && let Some(permit) = held.permit
            {
                // Its result doesn't matter, only that it ends.
                let _ = permit.release().await;
            }
        }
    }

    fn begin(&self, caller: usize, key: &str, kind: CallKind, cost: u64, deadline: Duration) -> usize {
        let told = Told {
            caller,
            key: key.to_owned(),
            kind,
            cost,
            deadline,
            began: self.network.medium.ms(),
            ended: None,
            outcome: Outcome::Abandoned,
        };
        self.network.medium.note(|| format!("{caller} asks {kind:?} {key} cost {cost} within {deadline:?}"));
        let mut all = self.told.lock().expect("nobody panicked");
        all.push(told);
        all.len() - 1
    }

    fn end(&self, place: usize, outcome: Outcome) {
        let mut all = self.told.lock().expect("nobody panicked");
        let told = &mut all[place];
        (told.ended, told.outcome) = (Some(self.network.medium.ms()), outcome);
        self.network.medium.note(|| format!("{} gets the answer for {}: {:?}", told.caller, told.key, told.outcome));
    }
}

impl CallKind {
    pub(super) fn is_own(self) -> bool {
        matches!(self, Self::Own | Self::OwnOfTwo | Self::OwnById)
    }

    /// Whether such a call has several keys, which a moving slot doesn't accept.
    pub(super) fn has_several_keys(self) -> bool {
        matches!(self, Self::OwnOfTwo | Self::OwnById | Self::Shared(3))
    }
}

impl Patience {
    /// The future's result, unless it is dropped before.
    async fn wait<T>(self, future: impl Future<Output = T>) -> Option<T> {
        match self {
            Self::Awaits => Some(future.await),
            Self::GivesUpAfter(patience) => timeout(patience, future).await.ok(),
            Self::DropsAfter(looks) => {
                let (mut future, mut seen) = (pin!(future), 0);
                std::future::poll_fn(move |cx| {
                    seen += 1;
                    match future.as_mut().poll(cx) {
                        Poll::Ready(done) => Poll::Ready(Some(done)),
                        Poll::Pending if seen >= looks => Poll::Ready(None),
                        Poll::Pending => Poll::Pending,
                    }
                })
                .await
            }
        }
    }
}

impl Outcome {
    fn of(answer: &Result<Decision, Error>) -> Self {
        let failed = |error: &Error| Self::Failed {
            charged: error.charged(),
            why: format!("{}: {error}", error.kind()),
            disconnected: error.kind() == ErrorKind::Disconnected,
        };
        match answer {
            Err(error) => failed(error),
            Ok(Decision { by: DecidedBy::Policy(Some(error)), .. }) => failed(error),
            Ok(Decision { allowed: true, capacity, remaining, granted, .. }) => {
                Self::Allowed { limit: *capacity, remaining: *remaining, granted: *granted }
            }
            Ok(Decision { capacity, .. }) => Self::Denied { limit: *capacity },
        }
    }
}
