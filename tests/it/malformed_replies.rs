//! Replies that no script makes: an error or a decision by the deadline, and never an allowance.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::runtime::Runtime;
use tollgate::{Charged, Decision, Error, ErrorKind, Limiter, Redis};
use tollgate_testing::fake_redis::fake_redis;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::rules::rule;

const DEADLINE: Duration = Duration::from_millis(100);

/// A server whose answer to a script is whatever was last put here; once given, it hangs up if told so.
struct Impostor {
    address: String,
    reply: Arc<Mutex<(Vec<u8>, bool)>>,
    runtime: Runtime,
    deadline: Duration,
}

impl Impostor {
    fn new(deadline: Duration) -> Self {
        let reply = Arc::new(Mutex::new((Vec::new(), false)));
        let shared = Arc::clone(&reply);
        let address = fake_redis(move |words| {
            let word = words[0].to_ascii_uppercase();
            if word.starts_with(b"EVAL") {
                let (bytes, _) = shared.lock().expect("unbroken").clone();
                return Some(bytes);
            }
            let hangs_up = shared.lock().expect("unbroken").1;
            match (word.as_slice(), words.get(1).map(Vec::as_slice)) {
                (b"HELLO", Some(b"3")) => Some(b"%2\r\n+version\r\n$5\r\n7.0.0\r\n+proto\r\n:3\r\n".to_vec()),
                (b"HELLO", _) => Some(b"*4\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:2\r\n".to_vec()),
                (b"PING", _) if hangs_up => None,
                _ => Some(b"+OK\r\n".to_vec()),
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { address, reply, runtime, deadline }
    }

    /// What a call makes of this reply, on a connection of its own.
    fn told(&self, reply: &[u8], protocol: u8, call: Call) -> Result<Decision, Error> {
        self.reply.lock().expect("unbroken").0 = reply.to_vec();
        let url = format!("{}?protocol=resp{protocol}", self.address);
        let limiter = Limiter::builder(Redis::open(&url).expect("a good address")).deadline(self.deadline).build();
        let begun = Instant::now();
        let answer = self.runtime.block_on(async {
            match call {
                Call::Packed => limiter.acquire(&rule("gcra 5/10s"), "key").await,
                Call::Long => limiter.at_most(&rule("gcra 5/10s"), "key").await,
                Call::Several => {
                    let both = rule("gcra 5/10s").and("fixed-window 9/1d".parse().expect("a limit")).expect("a rule");
                    limiter.acquire(&both, "key").await
                }
                Call::Inspect => {
                    limiter.inspect(&rule("gcra 5/10s"), "key").await.map(|mut states| states.remove(0).decision)
                }
            }
        });
        assert!(begun.elapsed() < self.deadline + Duration::from_secs(10), "{:?} for {reply:?}", begun.elapsed());
        answer
    }
}

#[derive(Clone, Copy, Debug)]
enum Call {
    /// A record.
    Packed,
    /// A long one, with what was granted.
    Long,
    /// A record of each of two limits.
    Several,
    /// Five integers and the state.
    Inspect,
}

/// What remains, the reset, the wait, how many are allowed; of a long record what was granted, and denials. So many
/// bytes each, again and again.
const WIDTHS: [usize; 4] = [7, 7, 7, 3];
const LONG_WIDTHS: [usize; 6] = [7, 7, 7, 3, 7, 4];

fn in_bytes(numbers: &[i64], widths: &[usize]) -> Vec<u8> {
    let numbers: Vec<u8> = numbers
        .iter()
        .zip(widths.iter().cycle())
        .flat_map(|(number, width)| number.to_le_bytes()[..*width].to_vec())
        .collect();
    [format!("${}\r\n", numbers.len()).as_bytes(), &numbers, b"\r\n"].concat()
}

fn packed(numbers: &[i64]) -> Vec<u8> {
    in_bytes(numbers, &WIDTHS)
}

fn long(numbers: &[i64]) -> Vec<u8> {
    in_bytes(numbers, &LONG_WIDTHS)
}

fn flat(numbers: &[i64]) -> Vec<u8> {
    let items: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
    format!("*{}\r\n{items}", numbers.len()).into()
}

#[test]
fn a_well_formed_reply_without_sense_is_an_error_that_leaves_the_charge_unknown() {
    let impostor = Impostor::new(PATIENCE);
    let good = [4, 2_000_000, 0, 1];
    assert!(impostor.told(&packed(&good), 2, Call::Packed).expect("a decision").allowed);
    let good_long = [4, 2_000_000, 0, 1, 1, 0];
    assert!(impostor.told(&long(&good_long), 2, Call::Long).expect("a decision").allowed);
    let both = [4, 2, 0, 1, 8, 2, 0, 1];
    assert!(impostor.told(&packed(&both), 2, Call::Several).expect("a decision").allowed);
    // Five of a decision, the TTL, six of the state, the block and the denials.
    let state = [1, 5, 4, 0, 2_000_000, 9, 1, 2, 5, 5, 10, 1_000_000, 0, 0];
    assert!(impostor.told(&flat(&state), 2, Call::Inspect).expect("a decision").allowed);
    let bad = |reply: Vec<u8>, call: Call| {
        for protocol in [2, 3] {
            let error = impostor.told(&reply, protocol, call).expect_err("nonsense");
            assert_eq!(error.charged(), Charged::Unknown, "{call:?}, {reply:?}: {error}");
            assert!(
                error.kind() != ErrorKind::Deadline && error.kind() != ErrorKind::Disconnected,
                "{call:?}, {reply:?}: {error}"
            );
        }
    };
    const MUCH: i64 = 1 << 54;
    let denied = [0, 2_000_000, 1_000_000, 0];
    let denied_long = [0, 2_000_000, 1_000_000, 0, 0, 0];
    let denied_both = [4, 2, 0, 0, 0, 2, 1, 0];
    assert!(!impostor.told(&packed(&denied), 2, Call::Packed).expect("a decision").allowed);
    assert!(!impostor.told(&long(&denied_long), 2, Call::Long).expect("a decision").allowed);
    let decision = impostor.told(&packed(&denied_both), 2, Call::Several).expect("a decision");
    assert_eq!(decision.denied_by.as_deref(), Some("fixed-window 9/1d"));
    let of_allowed = [(0, 6), (0, -1), (0, MUCH), (1, -1), (1, MUCH), (1, -MUCH), (2, -1), (2, -2), (2, MUCH)];
    // Of no call of these are windows stale, ids unknown, or keys refused; and what of several calls is unreadable, or
    // of another operation, is an error of one that is alone.
    let of_all = [(3, 2), (3, -3), (3, -4), (3, -5), (3, -6), (3, -7), (3, 1 << 22), (3, -(1 << 23))];
    let of_denied = [(0, 6), (0, -1), (0, -MUCH), (1, -1), (1, MUCH), (2, 0), (2, -2), (2, MUCH), (2, -MUCH)];
    let with = |numbers: &[i64], (at, value): (usize, i64)| {
        let mut numbers = numbers.to_vec();
        numbers[at] = value;
        numbers
    };
    for change in of_allowed.into_iter().chain(of_all) {
        bad(packed(&with(&good, change)), Call::Packed);
        bad(long(&with(&good_long, change)), Call::Long);
        bad(packed(&with(&both, change)), Call::Several);
    }
    for change in of_denied.into_iter().chain(of_all) {
        bad(packed(&with(&denied, change)), Call::Packed);
        bad(long(&with(&denied_long, change)), Call::Long);
    }
    bad(long(&with(&good_long, (4, MUCH))), Call::Long);
    bad(long(&with(&good_long, (4, -1))), Call::Long);
    // Limits of one call that don't agree on it.
    bad(packed(&with(&both, (7, 0))), Call::Several);
    bad(packed(&with(&denied_both, (3, 1))), Call::Several);
    for torn in [&packed(&good[..1])[..], &packed(&good[..3]), &packed(&[]), &packed(&both), &long(&good_long)] {
        bad(torn.into(), Call::Packed);
    }
    for torn in [&long(&good_long[..5])[..], &long(&[]), &packed(&good), &long(&[good_long; 2].concat())] {
        bad(torn.into(), Call::Long);
    }
    for torn in [&packed(&good)[..], &packed(&both[..7]), &packed(&[good; 3].concat()), &long(&[good_long; 2].concat())]
    {
        bad(torn.into(), Call::Several);
    }
    for change in [
        (0, 7),
        (0, -1),
        (0, -7),
        (1, -5),
        (1, i64::MAX),
        (2, 6),
        (2, -1),
        (3, -1),
        (3, -2),
        (4, -2),
        (4, i64::MAX),
        (12, i64::MAX),
        (13, -1),
        (13, i64::MAX),
    ] {
        bad(flat(&with(&state, change)), Call::Inspect);
    }
    for change in [(3, 0), (3, -2)] {
        bad(flat(&with(&with(&state, (0, 0)), change)), Call::Inspect);
    }
    for numbers in [&state[..4], &state[..5], &state[..13], &[&state[..], &[0]].concat(), &[]] {
        bad(flat(numbers), Call::Inspect);
    }
    for reply in ["+OK\r\n", ":1\r\n", "$-1\r\n", "*-1\r\n", "*0\r\n", "*5\r\n:1\r\n:5\r\n:4\r\n:0\r\n$1\r\n2\r\n"] {
        for call in [Call::Packed, Call::Long, Call::Several, Call::Inspect] {
            bad(reply.into(), call);
        }
    }
    // Lines that aren't text.
    for beginning in ["+", "-", ":", "-ERR "] {
        bad([beginning.as_bytes(), b"\xff\r\n"].concat(), Call::Packed);
    }
    let digest = "0123456789abcdef0123456789abcdef01234567";
    let repeats = format!("-ERR unknown command 'evalsha', with args beginning with: '{digest}' '1' 'key' '");
    let error = impostor.told(&[repeats.as_bytes(), b"\xff' \r\n"].concat(), 2, Call::Packed).expect_err("unknown");
    assert!(error.kind() == ErrorKind::Unsupported && error.charged() == Charged::No, "{error}");
}

/// Any value, nested or not, whole or torn, and real replies with bytes changed.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(|number| format!(":{number}\r\n").into_bytes()),
        proptest::collection::vec(any::<u8>(), 0..=48).prop_map(|bytes| [
            format!("${}\r\n", bytes.len()).as_bytes(),
            &bytes,
            b"\r\n"
        ]
        .concat()),
        proptest::collection::vec(any::<i64>(), 1..=8).prop_map(|numbers| packed(&numbers)),
        proptest::collection::vec(proptest::sample::select(vec![0, 1, 5, -1, 2_000_000, -6, 1 << 53]), 4..=8)
            .prop_map(|numbers| packed(&numbers)),
        proptest::collection::vec(proptest::sample::select(vec![0, 1, 5, -1, 2_000_000, -6, 1 << 53]), 6)
            .prop_map(|numbers| long(&numbers)),
        proptest::collection::vec(proptest::sample::select(vec![0, 1, 5, -1, i64::MAX, i64::MIN]), 4..=14)
            .prop_map(|numbers| flat(&numbers)),
        proptest::sample::select(vec![
            "+OK\r\n",
            "$-1\r\n",
            "*-1\r\n",
            "_\r\n",
            "#t\r\n",
            "#x\r\n",
            ",nan\r\n",
            ",1e300\r\n",
            ",inf\r\n",
            "(1234567\r\n",
            "-ERR no\r\n",
            "-\r\n",
            "-NOSCRIPT gone\r\n",
            "-BADSTATE x\r\n",
            "-BADID\r\n",
            "!5\r\nERR x\r\n",
            "=7\r\ntxt:abc\r\n",
            "%1\r\n:1\r\n:1\r\n",
            "~1\r\n:1\r\n",
            "|1\r\n+a\r\n:1\r\n:5\r\n",
            ">2\r\n+message\r\n:1\r\n",
            "$99999\r\nabc\r\n",
            "*7\r\n:1\r\n",
            "\r\n",
            "HTTP/1.1 200 OK\r\n\r\n",
            ":99999999999999999999\r\n",
            "$-7\r\n",
            "*-7\r\n",
            ":\r\n",
            ":1.5\r\n",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
    ];
    let nested = leaf.prop_recursive(3, 24, 6, |inner| {
        (proptest::sample::select(vec!['*', '~', '>']), proptest::collection::vec(inner, 0..=6))
            .prop_map(|(kind, items)| [format!("{kind}{}\r\n", items.len()).into_bytes(), items.concat()].concat())
    });
    let real = prop_oneof![
        Just(packed(&[4, 2_000_000, 0, 1])),
        Just(packed(&[0, 2_000_000, 1_000_000, 0])),
        Just(long(&[4, 2_000_000, 0, 1, 1, 0])),
        Just(packed(&[4, 2, 0, 1, 8, 2, 0, 1])),
        Just(flat(&[1, 5, 4, 0, 2_000_000, 9, 1, 2, 5, 5, 10, 1_000_000, 0, 0])),
    ];
    let changes = proptest::collection::vec((any::<usize>(), any::<u8>()), 1..=3);
    let mutated = (real, changes, any::<bool>()).prop_map(|(mut reply, changes, cut)| {
        for (at, byte) in changes {
            let at = at % reply.len();
            if cut && reply.len() > 1 { reply.truncate(at.max(1)) } else { reply[at] = byte }
        }
        reply
    });
    prop_oneof![nested, mutated, proptest::collection::vec(any::<u8>(), 0..=64)]
}

/// Whether these bytes begin with a record that allows one of one, read without the client's own reader.
fn is_packed_decision(reply: &[u8]) -> bool {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let record = reply.strip_prefix(b"$24\r\n").and_then(|rest| rest.first_chunk::<24>());
    record.is_some_and(|bytes| {
        let [remaining, reset, retry] = [0, 7, 14].map(|at| number(&bytes[at..at + 7]));
        remaining <= 5 && reset <= 1 << 53 && retry == 0 && number(&bytes[21..]) == 1
    })
}

#[test]
fn no_reply_makes_the_client_panic_hang_or_allow_what_redis_did_not() {
    let impostor = Impostor::new(DEADLINE);
    impostor.reply.lock().expect("unbroken").1 = true;
    let calls = proptest::sample::select(vec![Call::Packed, Call::Long, Call::Several, Call::Inspect]);
    let cases = (garbage(), prop_oneof![Just(2_u8), Just(3)], calls, any::<bool>());
    let config = Config { cases: 250, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&cases, |(reply, protocol, call, more)| {
        // What follows keeps most torn replies from waiting for the deadline.
        let reply = if more { [reply.as_slice(), &b"\r\n-ERR more\r\n".repeat(8)].concat() } else { reply };
        match (impostor.told(&reply, protocol, call), call) {
            (Ok(decision), Call::Packed) if decision.allowed => {
                prop_assert!(is_packed_decision(&reply), "{decision:?}");
            }
            (Ok(decision), _) => prop_assert!(decision.remaining <= decision.capacity, "{decision:?}"),
            (Err(error), _) => prop_assert_eq!(error.to_string().lines().count(), 1),
        }
        Ok::<_, TestCaseError>(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Lengths and depths for which there is no memory.
#[test]
fn a_reply_that_promises_too_much_ends_by_the_deadline() {
    let impostor = Impostor::new(DEADLINE);
    let deep = b"*1\r\n".repeat(100_000);
    for reply in [
        b"$9223372036854775807\r\n".as_slice(),
        b"$4294967296\r\nx",
        b"*9223372036854775807\r\n:1\r\n",
        b"*4294967296\r\n:1\r\n",
        b"%9223372036854775807\r\n:1\r\n",
        b"|4294967296\r\n:1\r\n",
        &deep,
    ] {
        for call in [Call::Packed, Call::Long] {
            // A busy machine may need longer than the deadline to connect.
            let told = || impostor.told(reply, 3, call).expect_err("no decision");
            let error = (0..20).map(|_| told()).find(|error| !error.is_unreachable()).expect("a call that was sent");
            assert_eq!(error.charged(), Charged::Unknown, "{:?}: {error}", &reply[..reply.len().min(30)]);
        }
    }
}

/// A server one answer behind: after nonsense, the next answer on the same connection is another call's.
#[tokio::test]
async fn nothing_more_is_read_from_a_connection_that_gave_nonsense() {
    // Whether nonsense was told, and whether anybody has connected since.
    let state = Mutex::new((false, false));
    let address = fake_redis(move |words| {
        let mut state = state.lock().expect("unbroken");
        match words[0].to_ascii_uppercase().as_slice() {
            b"HELLO" => {
                state.1 = state.0;
                Some(b"%2\r\n+version\r\n$5\r\n7.0.0\r\n+proto\r\n:3\r\n".to_vec())
            }
            word if word.starts_with(b"EVAL") => Some(match (std::mem::replace(&mut state.0, true), state.1) {
                (false, _) => b"+OK\r\n".to_vec(),
                (true, false) => packed(&[4, 2_000_000, 0, 1]),
                (true, true) => packed(&[0, 2_000_000, 1_000_000, 0]),
            }),
            _ => Some(b"+OK\r\n".to_vec()),
        }
    });
    let redis = Redis::open(&format!("{address}?protocol=resp3")).expect("a good address");
    let limiter = Limiter::builder(redis).deadline(Duration::from_secs(5)).build();
    let rule = rule("gcra 5/10s");
    assert_eq!(limiter.acquire(&rule, "key").await.expect_err("nonsense").kind().name(), "garbled");
    assert!(!limiter.acquire(&rule, "key").await.expect("a decision").allowed, "another call's answer");
}
