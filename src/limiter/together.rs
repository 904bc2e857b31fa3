//! A batch of calls of any shapes answers and leaves what its calls do one after the other; and the scripts' short
//! cuts, which plain calls in the server's time take, do what the scripts do without them.

use std::time::{Duration, UNIX_EPOCH};

use super::handle::Limiter;
use super::prepare::concerned;
use crate::batch::{Batch, Position};
use crate::call::{Ask, Costs, Mode, Reply, Taken};
use crate::engine::embedded::{Clock, Embedded};
use crate::error::{Error, ErrorKind};
use crate::operation::Operation;
use crate::random::seeded::next;
use crate::request::Request;
use crate::rule::Rule;

/// In some rounds, as many calls go together as a batch has room for.
const MOST: u64 = 1000;

const OPERATIONS: [Operation; 14] = [
    Operation::Acquire,
    Operation::Acquire,
    Operation::Acquire,
    Operation::Reserve,
    Operation::AtMost,
    Operation::Peek,
    Operation::Refund,
    Operation::Penalty,
    Operation::Block,
    Operation::Settle,
    Operation::Cancel,
    Operation::Reset,
    Operation::Renew,
    Operation::Release,
];

struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        next(&mut self.0) % end
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[usize::try_from(self.below(of.len() as u64)).expect("an index")]
    }
}

/// Of one limit and of several, some of which all users of an organisation share.
fn rules() -> Vec<Rule> {
    let of = |text: &str, name: &str| Rule::new(name, text).expect("a rule");
    let shared = |text: &str, name: &str, limit: &str| {
        let rule = of(text, name).tagged("org").and_then(|rule| rule.and_by("org", limit.parse().expect("a limit")));
        rule.expect("a tag")
    };
    vec![
        of("token-bucket 5/10s max-debt 4", "bucket"),
        of("fixed-window 6/10s burst 9", "window"),
        of("sliding-window 7/10s", "counter"),
        of("sliding-log 4/10s", "log"),
        of("fixed-window 9/day", "calendar"),
        of("token-bucket 5/10s, fixed-window 8/30s", "two"),
        shared("token-bucket 6/10s max-debt 2", "org", "token-bucket 20/20s max-debt 3"),
        shared("sliding-log 5/10s, sliding-window 9/20s", "three", "fixed-window 15/day"),
        of("token-bucket 5/10s", "counted").count_overage(true),
        of("concurrency 3 ttl 20s", "permits"),
        of("concurrency 4 ttl 9s, sliding-window 9/20s", "jobs"),
        of("token-bucket 5/10s, sliding-log 9/30s", "blocks").block_for(Duration::from_secs(3)).expect("a time"),
    ]
}

/// The reply without this machine's time; of an error, its kind.
fn told(answer: Result<Reply, Error>) -> Result<Reply, ErrorKind> {
    answer.map(|reply| Reply { at: UNIX_EPOCH, ..reply }).map_err(|error| error.kind())
}

fn shown(ask: &Ask<'_>) -> String {
    let keys: Vec<_> = ask.keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
    format!("{:?} of {keys:?} at {:?}", ask.terms, ask.costs)
}

#[test]
fn a_batch_decides_as_its_calls_do_one_after_the_other() {
    let rules = rules();
    let ids: Vec<String> = (0..4).map(|number| format!("id {number}")).collect();
    let (mut compared, mut grouped) = (0, 0);
    for seed in 0..30 {
        let mut draws = Draws(seed);
        let in_server_time = seed % 2 == 0;
        let mut now = UNIX_EPOCH + Duration::from_micros(1 << 50);
        let clock = Clock::new(now);
        let engine = || Embedded::with_clock(clock.clone());
        let (together, one_by_one, without_short_ways) = (engine(), engine(), engine());
        let limiter = Limiter::new(together.clone());
        for round in 0..6 {
            let step = Duration::from_millis(draws.below(6000));
            now += step;
            clock.advance(step);
            let now_us = u64::try_from(now.duration_since(UNIX_EPOCH).expect("later").as_micros()).expect("few");
            let count = if round == 5 && seed % 6 == 0 { MOST } else { 1 + draws.below(40) };
            let parts: [&[(&str, &[u8])]; 2] = [&[("org", b"acme")], &[("org", b"other")]];
            let mut asks: Vec<Ask<'_>> = Vec::new();
            for _ in 0..count {
                let (rule, mut operation) = (draws.pick(&rules), *draws.pick(&OPERATIONS));
                if in_server_time && draws.below(3) > 0 {
                    operation = Operation::Acquire;
                }
                let (user, parts) = (draws.pick(&["a", "b", "c"]), *draws.pick(&parts));
                let mut request = Request::new(user).parts(parts).cost(draws.below(4));
                if !in_server_time {
                    request = request.at(now);
                }
                if draws.below(3) == 0 || matches!(operation, Operation::Settle | Operation::Cancel) {
                    request = request.id(draws.pick(&ids));
                }
                let Ok(targets) = concerned(rule, &request, operation) else { continue };
                let Ok(mut ask) = limiter.ask_for(rule, &targets, &request, Mode::Call(operation), Some(now_us)) else {
                    continue;
                };
                // As a request for a model takes one call and some tokens.
                if targets.len() > 1 && operation != Operation::Block && draws.below(3) == 0 {
                    ask.costs = Costs::each_of(targets.iter().map(|_| draws.below(4)));
                }
                // Of calls some time ago, by what each limit answered.
                if operation == Operation::Refund && draws.below(2) == 0 {
                    let resets_us = targets.iter().map(|_| draws.below(30_000_000)).collect();
                    ask.terms.taken = Some(Taken { ago_us: draws.below(8_000_000), resets_us });
                }
                asks.push(ask);
            }
            let mut batch = Batch::default();
            let mut groups = Vec::new();
            for ask in &asks {
                let hashes = ask.hashes();
                if !batch.has_room(ask, &hashes) {
                    break;
                }
                groups.push(Some(batch.add(ask, &hashes)));
            }
            let sent = batch.mark_sent(groups.into_iter());
            let positions: Vec<Position> = sent.into_iter().flatten().collect();
            let answers: Vec<_> = batch.calls().map(|(_, call)| together.records(call)).collect();
            let mut order: Vec<usize> = (0..positions.len()).collect();
            order.sort_by_key(|at| positions[*at]);
            for at in order {
                let position = positions[at];
                let answer = answers[position.group.call as usize].as_ref();
                let own = told(answer.map_err(Error::clone).and_then(|records| records.reply(position)));
                let mut alone = told(one_by_one.ask(&asks[at]));
                let own_time = Ask { now_us: Some(now_us), ..asks[at].clone() };
                assert_eq!(
                    alone,
                    told(without_short_ways.ask(&own_time)),
                    "seed {seed}, round {round}, {}",
                    shown(&own_time)
                );
                let is_grouped = positions.iter().filter(|other| other.group == position.group).count() > 1;
                grouped += usize::from(is_grouped);
                if let (true, Ok(own), Ok(alone)) = (is_grouped, &own, &mut alone) {
                    // What remains and the reset are as of the last of them.
                    for (own, alone) in own.limits.iter().zip(&mut alone.limits) {
                        (alone.remaining, alone.reset_after_us) = (own.remaining, own.reset_after_us);
                    }
                }
                compared += 1;
                assert_eq!(own, alone, "seed {seed}, round {round}, {}", shown(&asks[at]));
            }
            let differing: Vec<_> = together
                .states()
                .into_iter()
                .zip(one_by_one.states())
                .filter(|(own, alone)| own != alone)
                .take(1)
                .collect();
            assert!(differing.is_empty(), "seed {seed}, round {round}: {differing:?}");
        }
    }
    assert!(compared > 3000 && grouped > 20, "{compared}, {grouped}");
}

#[tokio::test]
async fn waits_are_exact_up_to_the_largest_numbers_by_the_short_ways_too() {
    let cases = [
        ("token-bucket 5/1us burst 9007199254740976", 9_007_199_254_740_975, 9_007_199_254_740_976),
        ("token-bucket 5/1us burst 9007199254740976", 9_007_199_254_740_961, 9_007_199_254_740_976),
        (
            "fixed-window 1125899906842624/140737488355328us burst 7881299347898367 start first-hit",
            4_503_599_627_370_497,
            7_881_299_347_898_366,
        ),
    ];
    let now = UNIX_EPOCH + Duration::from_micros(1 << 50);
    for (text, taken, cost) in cases {
        let rule = Rule::new("huge", text).expect("a rule");
        let limiter = Limiter::new(Embedded::with_clock(Clock::new(now)));
        let request = Request::new("key");
        assert!(limiter.acquire(&rule, request.cost(taken)).await.expect("a decision").allowed, "{text}");
        let denied = limiter.acquire(&rule, request.cost(cost)).await.expect("a decision");
        let as_asked = limiter.acquire(&rule, request.cost(cost).at(now)).await.expect("a decision");
        assert_eq!(denied.retry_after, as_asked.retry_after, "{text}");
        assert!(!denied.allowed, "{text}: {denied:?}");
    }
}
