//! The cost of decisions to Redis, from `INFO commandstats`, compared with an EVALSHA that does nothing; and the size
//! of keys.

use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::Duration;

use tollgate::{Algorithm, Script};
use tollgate_benches::options::Options;
use tollgate_benches::pipeline::{Calls, Connection, LONG_RECORD, RECORD};
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::server::Server;
use tollgate_benches::{NO_OP, Random, arguments, peers};

/// Keys that calls choose from at random.
const KEYS: u64 = 10_000;
/// Requests that are encoded beforehand and replayed.
const SPELLED: usize = 40_000;
/// Keys in a batch.
const BATCH: usize = 50;
/// Entries in all logs together.
const ENTRIES: u64 = 100_000;
const HOUR_US: i64 = 3_600_000_000;
/// The scripts whose state has a fixed size.
const AIMED_AT: [&str; 3] = ["token_bucket", "fixed_window", "sliding_window_counter"];

/// Calls other than a plain acquire, by `token_bucket`.
const OTHERS: [Other; 12] = [
    Other::alone("peek", 3.5, arguments::PEEK),
    Other::alone("at-most", 4.3, arguments::AT_MOST),
    Other::alone("refund", 3.6, arguments::REFUND),
    Other::alone("penalty", 4.1, arguments::PENALTY),
    TWO_LIMITS,
    Other { name: "two limits in a batch of 25", most: 2.5, wanted: 2.2, batch: 25, ..TWO_LIMITS },
    WITH_ID,
    Other { name: "an acquire with an id, in a batch of 25", most: 3.3, wanted: 2.8, batch: 25, ..WITH_ID },
    // The bounds of these are first guesses: no run has measured them yet.
    Other { name: "two limits in a batch of 25, one of them shared", most: 3.3, wanted: 2.8, batch: 25, ..SHARED },
    Other::alone("reserve, with room", 4.0, arguments::RESERVE),
    SETTLE,
    Other { name: "settle, in a batch of 25", most: 5.0, wanted: 4.0, batch: 25, ..SETTLE },
];

/// The numbers of limits that allow each call.
const MILLION_AN_HOUR: [i64; 5] = [1_000_000, 1, 3_600, 1, 0];
const TWICE_AS_LONG: [i64; 5] = [1_000_000, 1, 7_200, 1, 0];

const ACQUIRE: Other = Other::alone("acquire", 0.0, arguments::ACQUIRE);
const TWO_LIMITS: Other =
    Other { name: "two limits", most: 6.0, wanted: 5.0, limits: &[&MILLION_AN_HOUR, &TWICE_AS_LONG], ..ACQUIRE };
const WITH_ID: Other = Other { name: "an acquire with an id", most: 6.0, wanted: 5.5, has_id: true, ..ACQUIRE };

const SHARED: Other = Other { is_shared: true, ..TWO_LIMITS };
const SETTLE: Other =
    Other { name: "settle", most: 8.0, wanted: 7.0, operation: arguments::SETTLE, has_id: true, ..ACQUIRE };

/// A call other than an acquire: the limits that it is decided by, how many share a script call, and what each may cost
/// and should.
struct Other {
    name: &'static str,
    most: f64,
    wanted: f64,
    operation: u8,
    limits: &'static [&'static [i64]],
    has_id: bool,
    /// Whether the last limit counts all calls by one key.
    is_shared: bool,
    batch: u64,
}

impl Other {
    const fn alone(name: &'static str, wanted: f64, operation: u8) -> Self {
        let limits = &[&MILLION_AN_HOUR as &[i64]];
        Self { name, most: 1.1 * wanted, wanted, operation, limits, has_id: false, is_shared: false, batch: 1 }
    }

    /// Whether its records are long.
    fn is_long(&self) -> bool {
        self.has_id || self.operation == arguments::AT_MOST
    }

    /// ARGV of this operation at this cost.
    fn arguments(&self, script: &Script, operation: u8, cost: u64) -> Vec<Vec<u8>> {
        let shape = self.shape(script, operation, cost);
        if self.is_shared { arguments::listed(shape, self.batch as usize, self.limits.len()) } else { vec![shape] }
    }

    fn shape(&self, script: &Script, operation: u8, cost: u64) -> Vec<u8> {
        let options = [(self.has_id, arguments::WITH_ID), (self.is_long(), arguments::LONG)];
        let options = options.iter().filter(|(is_set, _)| *is_set).map(|(_, option)| option).sum();
        let ten_minutes_ms: &[u64] = if self.has_id { &[600_000] } else { &[] };
        arguments::shape(script, self.limits, [operation, options], cost, ten_minutes_ms)
    }
}

/// A script and its calls.
struct Measurement {
    name: &'static str,
    text: &'static str,
    /// ARGV of an allowed call, by the call's number.
    allow: Box<dyn Fn(u64) -> Vec<Vec<u8>>>,
    /// ARGV of a denied call; the first on each key is allowed.
    deny: Box<dyn Fn(u64) -> Vec<Vec<u8>>>,
    takes_many_keys: bool,
}

/// Measurements of a script by round; times are ratios to the no-op measured just before.
#[derive(Default)]
struct Measured {
    /// Allowed, denied, and both in batches.
    ratios: [Vec<f64>; 4],
    bytes: Vec<f64>,
}

fn main() {
    let options = Options::read();
    let server = Server::start();
    let mut bench = Bench::on(&server, options.slice / 4);
    let mut targets = Targets::default();
    println!("## The server\n");
    bench.scripts(options.rounds, &mut targets);
    bench.others(options.rounds, &mut targets);
    bench.logs(options.rounds, &mut targets);
    if options.keys > 0 {
        bench.growth(options.rounds, options.keys, &mut targets);
    }
    println!("{targets}");
}

struct Bench {
    redis: Connection,
    no_op: Calls,
    /// How long one sample takes.
    time: Duration,
}

impl Bench {
    fn on(server: &Server, time: Duration) -> Self {
        let mut redis = Connection::open(&server.socket());
        let digest = redis.load(NO_OP);
        Self { no_op: at_random(&digest, KEYS, 1, |_| words(&["a", "b", "c", "d", "e"])), redis, time }
    }

    /// Each script, allowed and denied, alone and in batches.
    fn scripts(&mut self, rounds: usize, targets: &mut Targets) {
        let scripts = scripts();
        let mut all: Vec<Measured> = scripts.iter().map(|_| Measured::default()).collect();
        let mut no_op = Vec::new();
        for _ in 0..rounds {
            for (script, measured) in scripts.iter().zip(&mut all) {
                let floor = self.redis.replay(&self.no_op, self.time).us;
                no_op.push(floor);
                let digest = self.redis.load(script.text);
                for (at, (arguments, allow)) in [(&script.allow, true), (&script.deny, false)].into_iter().enumerate() {
                    self.redis.text(&["FLUSHALL"]);
                    let empty = self.redis.used_memory();
                    self.redis.play(&each_key_once(&digest, KEYS, arguments));
                    measured.bytes.push((self.redis.used_memory() - empty) / KEYS as f64);
                    for (at, keys) in [(at, 1), (at + 2, BATCH)] {
                        if keys == 1 || script.takes_many_keys {
                            let us = self.time_of(&at_random(&digest, KEYS, keys, arguments), allow, script.name);
                            measured.ratios[at].push(us / floor);
                        }
                    }
                }
            }
        }

        let floor = short(median(no_op));
        println!(
            "Time for a decision, as a multiple of the no-op's {floor} µs; bytes that Redis allocates for a key of"
        );
        println!("16 bytes.\n");
        println!("{}", header(&["script", "allowed", "denied", "batch of 50", "denied", "bytes per key"]));
        for (Measurement { name, .. }, measured) in scripts.iter().zip(&all) {
            let ratios @ [allowed, denied, batch, _] = measured.ratios.clone().map(median);
            let cells = ratios.into_iter().chain([median(measured.bytes.clone()).round()]).map(short);
            println!("{}", row([format!("`{name}`")].into_iter().chain(cells)));
            if AIMED_AT.contains(name) {
                targets.at_most(format!("`{name}` allowed, x no-op"), 2.75, allowed).wanted(2.6);
                targets.at_most(format!("`{name}` denied, x no-op"), 2.6, denied).wanted(2.1);
                targets.at_most(format!("`{name}` in a batch of 50, x no-op"), 1.2, batch).wanted(0.65);
            }
        }
        println!();
    }

    /// Calls that are no plain acquire, all allowed.
    fn others(&mut self, rounds: usize, targets: &mut Targets) {
        println!("Other calls by `token_bucket`, as multiples of the no-op.\n");
        println!("{}", header(&["call", "x no-op"]));
        let mut ratios: Vec<Vec<f64>> = OTHERS.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for (other, ratios) in OTHERS.iter().zip(&mut ratios) {
                let floor = self.redis.replay(&self.no_op, self.time).us;
                ratios.push(self.other(other) / floor);
            }
        }
        for (Other { name, most, wanted, .. }, ratios) in OTHERS.iter().zip(ratios) {
            let measured = median(ratios);
            println!("{}", row([(*name).to_owned(), short(measured)]));
            targets.at_most(format!("`token_bucket`, {name}, x no-op"), *most, measured).wanted(*wanted);
        }
        let given_back = median((0..rounds).map(|_| {
            let floor = self.redis.replay(&self.no_op, self.time).us;
            self.given_back() / floor
        }));
        println!("{}", row(["a permit, given back".to_owned(), short(given_back)]));
        targets.at_most("a permit, given back, x no-op", 4.4, given_back).wanted(4.0);
        println!();
    }

    /// Microseconds of giving a permit back.
    fn given_back(&mut self) -> f64 {
        let script = Algorithm::Concurrency.script();
        let digest = self.redis.load(script.text());
        self.redis.text(&["FLUSHALL"]);
        let calls = |operation| {
            let holder = |number| format!("holder:{number}");
            let of = |number| arguments::of_permit(script, &[1_000, HOUR_US], operation, holder(number));
            Calls::of(&digest, (0..SPELLED as u64).map(|number| ([number % KEYS], of(number))))
        };
        self.redis.play(&calls(arguments::ACQUIRE));
        let played = self.redis.play(&calls(arguments::RELEASE));
        assert!(played.all(true), "release: expected all permits to be given back, got {played:?}");
        played.us
    }

    /// Microseconds of such a call.
    fn other(&mut self, other: &Other) -> f64 {
        let script = Algorithm::TokenBucket.script();
        let digest = self.redis.load(script.text());
        let limits = other.limits.len();
        let record = if other.is_long() { LONG_RECORD } else { RECORD };
        self.redis.text(&["FLUSHALL"]);
        // The states of the limits, and then, if there is one more key, a fresh id for each call.
        let calls = |ids: u64, argv: Vec<Vec<u8>>| {
            let mut random = Random::seeded(1);
            let calls = (0..SPELLED as u64 / other.batch).map(|number| {
                let first = random.next().unwrap_or_default();
                let keys = (0..other.batch).flat_map(|at| {
                    // Neighbours, so that no two calls of a batch are by one key.
                    let key = (first % KEYS + at) % KEYS;
                    let is_shared = move |limit| other.is_shared && limit + 1 == limits as u64;
                    let states =
                        (0..limits as u64).map(move |limit| KEYS * limit + if is_shared(limit) { 0 } else { key });
                    states.chain(other.has_id.then_some(ids + number * other.batch + at))
                });
                (keys.collect::<Vec<_>>(), argv.clone())
            });
            Calls::answered_in(record * limits, &digest, calls)
        };
        if !other.has_id && limits == 1 {
            // Something to give back.
            self.redis.play(&each_key_once(&digest, KEYS, |_| arguments::acquire(script, &MILLION_AN_HOUR, 50)));
        } else {
            self.redis.play(&calls(10 * KEYS, other.arguments(script, arguments::ACQUIRE, 1)));
        }
        if other.operation == arguments::SETTLE {
            // What is settled, for less. A thousand units take 3.6 s to come back by themselves.
            self.redis.play(&calls(100 * KEYS, other.arguments(script, arguments::ACQUIRE, 1000)));
        }
        let played = self.redis.play(&calls(100 * KEYS, other.arguments(script, other.operation, 1)));
        assert!(played.all(true), "{}: expected all calls to be allowed, got {played:?}", other.name);
        played.us
    }

    /// The sliding log at each limit, while as many entries leave as come in.
    fn logs(&mut self, rounds: usize, targets: &mut Targets) {
        println!("The sliding log by its limit, as multiples of the no-op, and bytes per entry.\n");
        println!("{}", header(&["costs", "limit", "allowed", "denied", "bytes per entry"]));
        for (costs, most_bytes) in [("1", 20.0), ("1 to 3", 40.0)] {
            for limit in [10, 100, 1_000, 10_000] {
                let (mut allowed, mut denied, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
                for _ in 0..rounds {
                    let floor = self.redis.replay(&self.no_op, self.time).us;
                    let (allow, deny, bytes_per_entry) = self.log(limit, costs != "1");
                    allowed.push(allow / floor);
                    denied.push(deny / floor);
                    bytes.push(bytes_per_entry);
                }
                let [allowed, denied, bytes] = [allowed, denied, bytes].map(median);
                let cells = [allowed, denied, bytes].map(short);
                println!("{}", row([costs.to_owned(), limit.to_string()].into_iter().chain(cells)));
                let what = |what| format!("sliding log, costs {costs}, limit {limit}: {what}");
                targets.at_most(what("allowed, x no-op"), 4.5, allowed).wanted(3.6);
                targets.at_most(what("denied, x no-op"), 3.2, denied).wanted(2.5);
                if limit >= 100 {
                    targets.at_most(what("bytes per entry"), most_bytes, bytes);
                }
            }
        }
        println!();
    }

    /// Microseconds of an allowed and of a denied call, and bytes per entry.
    fn log(&mut self, entries: u64, weighted: bool) -> (f64, f64, f64) {
        let script = Algorithm::SlidingLog.script();
        let digest = self.redis.load(script.text());
        let keys = ENTRIES / entries;
        // Costs of 1, 2 and 3 in turn average 2.
        let limit = (if weighted { 2 * entries } else { entries }) as i64;
        let cost = |number: u64| if weighted { 1 + number % 3 } else { 1 };

        self.redis.text(&["FLUSHALL"]);
        let hour = |number| arguments::acquire(script, &[limit, HOUR_US], cost(number));
        let calls = (0..ENTRIES).map(|number| ([number % keys], hour(number)));
        let full = self.redis.play(&Calls::of(&digest, calls));
        let bytes = self.bytes_of_a_key() * keys as f64 / full.allowed as f64;
        // The rest of a limit may cover a lower cost.
        let most = if weighted { 3 } else { 1 };
        let deny = |_| arguments::acquire(script, &[limit, HOUR_US], most);
        let denied = self.time_of(&at_random(&digest, keys, 1, deny), false, script.name());

        // A period that fills the logs to 7/10 at the pace just measured, unless that was slow by chance.
        let mut period = full.time.mul_f64(0.7);
        loop {
            self.redis.text(&["FLUSHALL"]);
            let soon = |number| arguments::acquire(script, &[limit, period.as_micros() as i64], cost(number));
            let calls = Calls::of(&digest, (0..ENTRIES).map(|number| ([number % keys], soon(number))));
            self.redis.replay(&calls, period.mul_f64(1.2));
            let allowed = self.redis.replay(&calls, self.time);
            if allowed.all(true) {
                return (allowed.us, denied, bytes);
            }
            period /= 2;
        }
    }

    /// The cost of a decision by the number of live keys, measured on a second, full server.
    fn growth(&mut self, rounds: usize, keys: u64, targets: &mut Targets) {
        println!(
            "Time for a decision by live keys, as a multiple of the no-op; bytes that Redis allocates for a key of"
        );
        println!("16 bytes.\n");
        let [among_few, among_many] = [KEYS, keys].map(|keys| format!("{keys} keys"));
        println!("{}", header(&["script", &among_few, &among_many, "growth", "bytes per key"]));
        let server = Server::start();
        let mut full = Connection::open(&server.socket());
        // Without batches, filling it would take minutes.
        let filled = |script: &&Measurement| script.takes_many_keys && AIMED_AT.contains(&script.name);
        for script in scripts().iter().filter(filled) {
            full.text(&["FLUSHALL"]);
            let digest = full.load(script.text);
            let empty = full.used_memory();
            for first in (0..keys).step_by(SPELLED) {
                let some: Vec<u64> = (first..keys.min(first + SPELLED as u64)).collect();
                let calls = some.chunks(BATCH);
                full.play(&Calls::of(&digest, calls.map(|keys| (keys, (script.allow)(0)))));
            }
            let bytes = (full.used_memory() - empty) / keys as f64;
            // Redis moves its keys to a larger table in small steps. Let that finish, as it would if the keys came over
            // days.
            full.text(&["CONFIG", "SET", "hz", "500"]);
            sleep(Duration::from_secs(4));
            full.text(&["CONFIG", "SET", "hz", "10"]);

            self.redis.text(&["FLUSHALL"]);
            self.redis.load(script.text);
            self.redis.play(&each_key_once(&digest, KEYS, &script.allow));
            let among_few = at_random(&digest, KEYS, 1, &script.allow);
            let many = Random::seeded(2).take(5 * SPELLED).map(|random| ([random % keys], (script.allow)(0)));
            let among_many = Calls::of(&digest, many);
            let (mut few, mut many, mut growth) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..rounds {
                let floor = self.redis.replay(&self.no_op, self.time).us;
                let among_few = self.redis.replay(&among_few, self.time).us;
                let among_many = full.replay(&among_many, self.time).us;
                few.push(among_few / floor);
                many.push(among_many / floor);
                growth.push(among_many / among_few);
            }
            let [few, many, growth] = [few, many, growth].map(median);
            let cells = [few, many, growth, bytes.round()].map(short);
            println!("{}", row([format!("`{}`", script.name)].into_iter().chain(cells)));
            targets.at_most(format!("`{}`, {keys} live keys, x {KEYS} live keys", script.name), 1.25, growth);
        }
        println!();
    }

    /// Microseconds for each decision of these calls, which must all be allowed or all be denied.
    fn time_of(&mut self, calls: &Calls, allow: bool, what: &str) -> f64 {
        let replayed = self.redis.replay(calls, self.time);
        assert!(replayed.all(allow), "{what}: expected allowed to be {allow} for each call, got {replayed:?}");
        replayed.us
    }

    fn bytes_of_a_key(&mut self) -> f64 {
        let key = self.redis.text(&["RANDOMKEY"]);
        self.redis.integer(&["MEMORY", "USAGE", &key, "SAMPLES", "0"]) as f64
    }
}

/// Every script, and the published token bucket.
fn scripts() -> Vec<Measurement> {
    let ours = Algorithm::all().map(|algorithm| {
        let script = algorithm.script();
        let (allow, deny): (&[i64], &[i64]) = match algorithm {
            Algorithm::TokenBucket => (&[1_000_000, 1, 3_600, 1, 0], &[1, 1, HOUR_US, 1, 0]),
            Algorithm::FixedWindow => (&[1_000_000, 1_000_000, HOUR_US, 0, 0], &[1, 1, HOUR_US, 0, 0]),
            Algorithm::CalendarWindow => (&[1_000_000, 0, 1 << 51, 1 << 52], &[1, 0, 1 << 51, 1 << 52]),
            Algorithm::SlidingWindow => (&[1_000_000, HOUR_US, 1], &[1, HOUR_US, 1]),
            // A few entries; more follow.
            Algorithm::SlidingLog => (&[10, 10_000], &[1, HOUR_US]),
            Algorithm::Concurrency => (&[1_000, 10_000], &[1, HOUR_US]),
            other => panic!("{other}: which numbers allow, and which deny?"),
        };
        let call = move |numbers: &'static [i64]| -> Box<dyn Fn(u64) -> Vec<Vec<u8>>> {
            Box::new(move |number| match algorithm.holds() {
                // Each permit has its own holder.
                true => arguments::acquire_permit(script, numbers, format!("holder:{number}")),
                false => arguments::acquire(script, numbers, 1),
            })
        };
        Measurement {
            name: script.name(),
            text: script.text(),
            allow: call(allow),
            deny: call(deny),
            takes_many_keys: !algorithm.holds(),
        }
    });
    let published = Measurement {
        name: "published token bucket",
        text: peers::PUBLISHED_BUCKET,
        allow: Box::new(|_| words(&["1000000", "1000000", "1"])),
        deny: Box::new(|_| words(&["1", "0.0001", "1"])),
        takes_many_keys: false,
    };
    ours.chain([published]).collect()
}

/// Calls with this many randomly chosen keys each.
fn at_random(digest: &str, keys: u64, each: usize, arguments: impl Fn(u64) -> Vec<Vec<u8>>) -> Calls {
    let mut random = Random::seeded(1);
    let calls = (0..(SPELLED / each) as u64).map(|number| {
        // No key twice in one call: it would have to list its costs.
        let keys: BTreeSet<_> = random.by_ref().take(each).map(|random| random % keys).collect();
        // The holders of the keys' first permits keep these.
        (Vec::from_iter(keys), arguments(KEYS + number))
    });
    Calls::of(digest, calls)
}

fn each_key_once(digest: &str, keys: u64, arguments: impl Fn(u64) -> Vec<Vec<u8>>) -> Calls {
    Calls::of(digest, (0..keys).map(|key| ([key], arguments(key))))
}

fn words(words: &[&str]) -> Vec<Vec<u8>> {
    words.iter().map(|word| Vec::from(*word)).collect()
}
