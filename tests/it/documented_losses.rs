//! What the documentation of running Redis says that each event can cost, held against a caller that takes all it can.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use tollgate::{Algorithm, Embedded, Limiter, Request};
use tollgate_testing::effort::cases;

/// Each with its capacity and its longest reset, in seconds.
const RULES: [(&str, u64, u64); 6] = [
    ("token-bucket 10/10s burst 30", 30, 30),
    ("token-bucket 10/10s burst 20", 20, 20),
    ("fixed-window 10/10s", 10, 10),
    ("fixed-window 10/10s burst 30", 30, 30),
    ("sliding-window 10/10s", 10, 20),
    ("sliding-log 10/10s", 10, 10),
];
/// Real time between two calls of the caller.
const STEP: Duration = Duration::from_millis(500);
const STEPS: u64 = 200;
const BEGIN: u64 = 1_700_000_003;

#[derive(Clone, Copy, Debug)]
enum Event {
    Nothing,
    /// The key is evicted, or flushed with all others.
    Forgotten,
    /// In seconds.
    Ahead(u64),
    Back(u64),
    /// And back by as much, after so many steps.
    AheadAndBack(u64, u64),
}

/// Units that a caller gets by taking single ones while it is allowed to, at every step.
fn admitted(rule: &str, event: Event, at: u64, begin: i64) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let limiter = Limiter::new(Embedded::new());
        let rule = tollgate_testing::rules::rule(rule);
        let (mut admitted, mut off) = (0, begin);
        for step in 0..STEPS {
            match event {
                Event::Forgotten if step == at => drop(limiter.reset(&rule, "key").await.expect("an answer")),
                Event::Ahead(by) | Event::AheadAndBack(by, _) if step == at => off += by.cast_signed(),
                Event::Back(by) if step == at => off -= by.cast_signed(),
                Event::AheadAndBack(by, after) if step == at + after => off -= by.cast_signed(),
                _ => {}
            }
            let now = instant(off) + STEP * u32::try_from(step).expect("a few steps");
            while limiter.acquire(&rule, Request::new("key").at(now)).await.expect("a decision").allowed {
                admitted += 1;
            }
        }
        admitted
    })
}

/// Without an event. Where in a window it begins decides a little too.
static USUAL: LazyLock<[u64; RULES.len()]> = LazyLock::new(|| {
    let but_for = [Algorithm::CalendarWindow, Algorithm::Concurrency];
    tollgate_testing::rules::assert_of_every_algorithm(&RULES.map(|(rule, ..)| rule), &but_for);
    RULES.map(|(rule, ..)| (0..10).map(|begin| admitted(rule, Event::Nothing, 0, begin)).max().expect("a few"))
});

fn instant(off: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(BEGIN.saturating_add_signed(off))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(2), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_event_costs_more_than_is_documented(
        at in 1..100_u64, short in 1..10_u64, long in 31..200_u64, after in 1..60_u64,
    ) {
        for ((rule, capacity, longest), usual) in RULES.into_iter().zip(&*USUAL) {
            // A jump cuts two windows short: the one it leaves, and the one it gets into. An estimate by windows is
            // rounded anew.
            let jump = match rule.split_once(' ') {
                Some(("fixed-window", _)) => 2 * capacity,
                Some(("sliding-window", _)) => capacity + 2,
                _ => capacity,
            };
            for (event, most) in [
                (Event::Forgotten, capacity),
                (Event::Ahead(short), jump),
                (Event::Ahead(long), jump),
                (Event::Back(short.min(longest)), 0),
                (Event::Back(long), jump),
                (Event::AheadAndBack(short.min(longest), after), jump),
            ] {
                let got = admitted(rule, event, at, 0);
                prop_assert!(got <= usual + most, "{rule}: {event:?} at {at} admits {got}, not {usual} and {most}");
            }
        }
    }
}

/// As the guide has it where the algorithm is chosen.
#[tokio::test]
async fn a_sliding_window_admits_a_unit_more_around_a_boundary_and_a_log_none() {
    let page = tollgate_testing::repository::read("src/guide/algorithms.md");
    let limiter = Limiter::new(Embedded::new());
    for (text, admits) in [
        ("sliding-window 1/10s", 2),
        ("sliding-window 5/1m", 6),
        ("sliding-window 1000/1h", 1001),
        ("sliding-log 1/10s", 1),
        ("sliding-log 5/1m", 5),
        ("sliding-log 1000/1h", 1000),
    ] {
        let rule = tollgate_testing::rules::rule(text);
        let period = rule.limits().next().expect("a limit").period();
        let boundary = UNIX_EPOCH + period * 1000;
        let mut admitted = 0;
        for at in [boundary - Duration::from_millis(1), boundary + Duration::from_micros(1)] {
            while limiter.acquire(&rule, Request::new("key").at(at)).await.expect("a decision").allowed {
                admitted += 1;
            }
        }
        assert_eq!(admitted, admits, "{text}");
    }
    // However its lines are broken.
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in ["`sliding-window 5/1m` allows 6 within", "`sliding-window 1/10s` allows a"] {
        assert!(page.contains(said), "the page does not say \"{said}\"");
    }
}
