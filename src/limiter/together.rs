//! What a batch of calls of any shapes answers and leaves is what its calls do one after the other.

use std::time::{Duration, UNIX_EPOCH};

use super::Limiter;
use super::prepare::concerned;
use crate::batch::{Batch, Position};
use crate::call::{Ask, Mode, Reply, Taken};
use crate::engine::embedded::Embedded;
use crate::error::Error;
use crate::operation::Operation;
use crate::random::seeded::next;
use crate::request::Request;
use crate::rule::Rule;

/// As many calls as a batch has room for go together in some rounds.
const MOST: u64 = 1000;

const OPERATIONS: [Operation; 12] = [
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
    let of = |text: &str, name: &str| text.parse::<Rule>().and_then(|rule| rule.named(name)).expect("a rule");
    let shared = |text: &str, name: &str, limit: &str| {
        let rule = of(text, name).tagged("org").and_by("org", limit.parse().expect("a limit"));
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
        of("token-bucket 5/10s", "counted").count_denials(true),
        of("token-bucket 5/10s, sliding-log 9/30s", "blocks").block_for(Duration::from_secs(3)).expect("a time"),
    ]
}

/// The reply without this machine's time; of an error, what class it is.
fn told(answer: Result<Reply, Error>) -> Result<Reply, &'static str> {
    answer.map(|reply| Reply { at: UNIX_EPOCH, ..reply }).map_err(|error| error.class())
}

#[test]
fn a_batch_decides_as_its_calls_do_one_after_the_other() {
    let rules = rules();
    let ids: Vec<String> = (0..4).map(|number| format!("id {number}")).collect();
    let (mut compared, mut grouped) = (0, 0);
    for seed in 0..60 {
        let mut draws = Draws(seed);
        let (together, one_by_one) = (Embedded::new(), Embedded::new());
        let limiter = Limiter::new(together.clone());
        let mut now = UNIX_EPOCH + Duration::from_micros(1 << 50);
        for round in 0..6 {
            now += Duration::from_millis(draws.below(6000));
            let count = if round == 5 && seed % 6 == 0 { MOST } else { 1 + draws.below(40) };
            let parts: [&[(&str, &[u8])]; 2] = [&[("org", b"acme")], &[("org", b"other")]];
            let mut asks: Vec<Ask<'_>> = Vec::new();
            for _ in 0..count {
                let (rule, operation) = (draws.pick(&rules), *draws.pick(&OPERATIONS));
                let (user, parts) = (draws.pick(&["a", "b", "c"]), *draws.pick(&parts));
                let mut request = Request::new(user).parts(parts).at(now).cost(draws.below(4));
                if draws.below(3) == 0 || matches!(operation, Operation::Settle | Operation::Cancel) {
                    request = request.id(draws.pick(&ids));
                }
                let targets = concerned(rule, operation, &request).expect("limits");
                let Ok(mut ask) = limiter.ask_for(rule, &targets, &request, Mode::Call(operation), None) else {
                    continue;
                };
                // As a request for a model takes one call and some tokens.
                if targets.len() > 1 && operation != Operation::Block && draws.below(3) == 0 {
                    ask.costs = targets.iter().map(|_| draws.below(4)).collect();
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
                let is_grouped = positions.iter().filter(|other| other.group == position.group).count() > 1;
                grouped += usize::from(is_grouped);
                if let (true, Ok(own), Ok(alone)) = (is_grouped, &own, &mut alone) {
                    // What remains and the reset are as of the last of them.
                    for (own, alone) in own.limits.iter().zip(&mut alone.limits) {
                        (alone.remaining, alone.reset_after_us) = (own.remaining, own.reset_after_us);
                    }
                }
                compared += 1;
                assert_eq!(own, alone, "seed {seed}, round {round}, {:?}", asks[at]);
            }
            assert_eq!(together.states(), one_by_one.states(), "seed {seed}, round {round}");
        }
    }
    assert!(compared > 6000 && grouped > 40, "{compared}, {grouped}");
}
