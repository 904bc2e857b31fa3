//! Sets of rules: the cost of finding a request's rule as rules grow in number, and the memory of a rule. Redis isn't
//! called.

use std::fmt::Write;
use std::fs;
use std::hint::black_box;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tollgate::rules::{Action, Attributes, Definition, RuleSet, WatchedRules};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::{Random, process};

const RULES: [usize; 4] = [10, 1_000, 10_000, 100_000];
const REQUESTS: usize = 4096;

/// Rules of the file that is reloaded, and how often.
const RELOADED: usize = 50_000;
const RELOADS: u32 = 8;

/// A request's attributes, as a service would know them.
struct Known {
    user: String,
    tier: &'static str,
    method: &'static str,
    path: String,
    address: IpAddr,
}

impl Known {
    fn attributes(&self) -> Attributes<'_> {
        let Self { user, tier, method, path, address } = self;
        Attributes::new().user(user).tier(tier).method(method).path(path).ip(*address)
    }
}

/// One of four kinds: endpoints, single users, networks, and tiers of an endpoint. Some rules go before all others, and
/// one applies to everything.
fn definition(number: usize, of: usize) -> Definition {
    let mut rule = Definition::new(&format!("rule-{number}"));
    rule.key = ["user"].into();
    rule.limits = vec!["token-bucket 1000/1h burst 20".into()];
    let mut when = |name: &str, value: String| rule.conditions.insert(name.to_owned(), [value].into());
    match number % 4 {
        _ if number + 1 == of => {}
        0 => {
            when("path", format!("/api/v1/resource-{number}/*/items/*"));
        }
        1 => {
            when("user", format!("user-{number}"));
        }
        2 => {
            when("ip", format!("{}.{}.{}.0/24", 10 + (number >> 16), number >> 8 & 255, number & 255));
            when("method", "POST".into());
        }
        _ => {
            when("path", format!("/api/v1/resource-{}/*", number - 3));
            when("tier", ["free", "paid"][number / 4 % 2].into());
        }
    }
    if number % 50 == 2 {
        rule.action = Action::Block;
        rule.key = Default::default();
        rule.limits.clear();
    }
    rule.priority = if number + 1 == of { -1 } else { i64::try_from(number % 3).unwrap_or_default() };
    rule
}

/// Requests that match some rule, each of another kind and at another place in the set.
fn requests(of: usize) -> Vec<Known> {
    let mut random = Random::seeded(7);
    let mut below = |bound: usize| usize::try_from(random.next().unwrap_or_default()).unwrap_or_default() % bound;
    (0..REQUESTS)
        .map(|_| {
            let (path, user, net) = (below(of) / 4 * 4, below(2 * of), below(of));
            let tail = ["x/items/7", "x", "y/items"][below(3)];
            Known {
                user: format!("user-{user}"),
                tier: ["free", "paid", "gold"][below(3)],
                method: ["GET", "POST"][below(2)],
                path: format!("/api/v1/resource-{path}/{tail}"),
                address: IpAddr::from([
                    10 + (net >> 16) as u8,
                    (net >> 8 & 255) as u8,
                    (net & 255) as u8,
                    below(256) as u8,
                ]),
            }
        })
        .collect()
}

fn main() {
    let options = Options::read();
    let mut targets = Targets::default();
    println!("## Rules\n");
    reloads(&mut targets);
    println!("Finding a request's rule, its limits and key, in microseconds, with five known attributes; building the");
    println!("set from definitions; and its memory, including the definitions.\n");
    println!("{}", header(&["rules", "a request", "one whose path is encoded", "building, ms", "bytes a rule"]));
    for count in RULES {
        let definitions: Vec<_> = (0..count).map(|number| definition(number, count)).collect();
        let (before, began) = (process::resident_bytes(), Instant::now());
        let rules = RuleSet::new(definitions).unwrap_or_else(|error| panic!("{error}"));
        let (built, bytes) = (began.elapsed(), process::resident_bytes().saturating_sub(before));
        let plain = requests(count);
        let mut encoded = requests(count);
        encoded.iter_mut().for_each(|known| known.path = known.path.replace("/resource", "//%72esource"));
        let turns = |known: &[Known]| median((0..options.rounds).map(|_| found(&rules, known, options.slice)));
        let (plain, encoded) = (turns(&plain), turns(&encoded));
        let cells = [plain, encoded, built.as_secs_f64() * 1e3, bytes as f64 / count as f64];
        println!("{}", row([count.to_string()].into_iter().chain(cells.map(short))));
        if count == 10_000 {
            targets.at_most("10,000 rules: a request, µs", 1.3, plain).wanted(1.0);
        }
    }
    together(&options, &mut targets);
    println!("\n{targets}");
}

/// One rule of four limits that count the request's key.
const ONE: &str = r#"
[[rule]]
name = "users"
key = "user"
limits = ["fixed-window 1000/1d", "fixed-window 1000/2d", "fixed-window 1000/3d", "fixed-window 1000/4d"]
"#;

/// The same, of which two have a key of their own.
const OF_THREE_KEYS: &str = r#"
[[rule]]
name = "users"
key = "user"
limits = [
    { limit = "fixed-window 1000/1d", key = "global" },
    { limit = "fixed-window 1000/2d", key = "ip" },
    "fixed-window 1000/3d",
    "fixed-window 1000/4d",
]
"#;

/// The same limits, of three rules that apply together.
const THREE: &str = r#"
[[rule]]
name = "everybody"
key = "global"
limits = ["fixed-window 1000/1d"]
continue = true

[[rule]]
name = "addresses"
key = "ip"
limits = ["fixed-window 1000/2d"]
continue = true

[[rule]]
name = "users"
key = "user"
limits = ["fixed-window 1000/3d", "fixed-window 1000/4d"]
"#;

/// Rules that apply together, beside one rule.
fn together(options: &Options, targets: &mut Targets) {
    let requests = requests(1000);
    let sets = [ONE, OF_THREE_KEYS, THREE].map(|text| text.parse::<RuleSet>().expect("rules"));
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..options.rounds {
        for (set, times) in sets.iter().zip(&mut times) {
            times.push(found(set, &requests, options.slice));
        }
    }
    let [one, of_three_keys, three] = times.map(median);
    println!("\n| applies to a request | microseconds |\n| --- | --- |");
    let named = [
        ("one rule of four limits", one),
        ("one rule of four limits, which count three keys", of_three_keys),
        ("three rules of four limits, which count three keys", three),
    ];
    named.iter().for_each(|(name, time)| println!("| {name} | {} |", short(*time)));
    let what = "three rules of four limits: finding them, x one rule of the same";
    targets.at_most(what, 2.0, three / of_three_keys);
}

/// Microseconds of processor time for each request.
fn found(rules: &RuleSet, requests: &[Known], slice: Duration) -> f64 {
    let (began, before, mut count) = (Instant::now(), process::processor_time(), 0_u32);
    while began.elapsed() < slice {
        for known in requests {
            black_box(rules.applies(&known.attributes()).expect("a rule"));
        }
        count += 1;
    }
    (process::processor_time() - before).as_secs_f64() * 1e6 / f64::from(count) / requests.len() as f64
}

/// The file that the definitions are in, of an edition that its last rule says.
fn file(edition: u32) -> String {
    let mut text = String::new();
    for number in 0..RELOADED {
        let Definition { name, priority, conditions, limits, .. } = definition(number, RELOADED);
        let conditions: Vec<_> =
            conditions.iter().map(|(name, values)| format!("{name} = {:?}", values.0[0])).collect();
        let conditions = conditions.join(", ");
        let _ = write!(text, "[[rule]]\nname = \"{name}\"\npriority = {priority}\nmatch = {{ {conditions} }}\n");
        let _ = match limits.first() {
            Some(limit) => write!(text, "key = \"user\"\nlimits = [\"{}\"]\n", limit.limit),
            None => writeln!(text, "action = \"block\""),
        };
        if number + 1 == RELOADED {
            let _ = writeln!(text, "message = \"{edition}\"");
        }
        text.push('\n');
    }
    text
}

/// A file of many rules that is replaced while requests are decided by it. It is the first thing that the process
/// does, so that its memory is that of the rules.
fn reloads(targets: &mut Targets) {
    let directory = std::env::temp_dir().join(format!("tollgate-bench-rules-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let (path, next) = (directory.join("rules.toml"), directory.join("next.toml"));
    fs::write(&path, file(0)).expect("a file");
    let before = process::resident_bytes();
    let (began, used) = (Instant::now(), process::processor_time());
    let rules = WatchedRules::open(&path).expect("rules");
    let (opened, used) = (began.elapsed(), process::processor_time() - used);
    let of_rules = |bytes: u64| bytes.saturating_sub(before) as f64;
    let (bytes, over) = (of_rules(process::resident_bytes()) / RELOADED as f64, AtomicBool::new(false));
    let (mut taken, mut most) = (Vec::new(), 0.0_f64);
    let requests = requests(RELOADED);
    let longest = thread::scope(|scope| {
        let deciding = scope.spawn(|| {
            let (mut longest, mut requests) = (Duration::ZERO, requests.iter().cycle());
            while !over.load(Ordering::Relaxed) {
                let began = process::thread_time();
                let current = rules.current();
                black_box(current.applies(&requests.next().expect("requests").attributes()).expect("a rule"));
                drop(current);
                longest = longest.max(process::thread_time() - began);
                thread::sleep(Duration::from_micros(50));
            }
            longest
        });
        for edition in 1..=RELOADS {
            fs::write(&next, file(edition)).expect("a file");
            fs::rename(&next, &path).expect("renamed");
            let (began, edition) = (Instant::now(), edition.to_string());
            while rules.current().definitions()[RELOADED - 1].message.as_deref() != Some(&edition) {
                thread::sleep(Duration::from_millis(5));
            }
            taken.push(began.elapsed().as_secs_f64());
            most = most.max(of_rules(process::resident_bytes()) / 1e6);
        }
        over.store(true, Ordering::Relaxed);
        deciding.join().expect("decisions")
    });
    let _ = fs::remove_dir_all(&directory);
    let in_force = median(taken);
    println!(
        "A file of {RELOADED} rules, read once, and renamed into its place {RELOADS} times while requests are decided:\n"
    );
    println!("| {RELOADED} rules | |\n| --- | --- |");
    let rows = [
        ("read, s", opened.as_secs_f64()),
        ("read, s of processor time", used.as_secs_f64()),
        ("a rule, KB", bytes / 1e3),
        ("renamed until in force, s", in_force),
        ("most memory while reloading, MB", most),
        ("longest processor time of a request, ms", longest.as_secs_f64() * 1e3),
    ];
    rows.iter().for_each(|(what, value)| println!("{}", row([(*what).to_owned(), short(*value)])));
    println!();
    targets.at_most("50,000 rules: renamed until in force, s", 1.0, in_force);
    targets.at_most("50,000 rules: a rule, KB", 4.0, bytes / 1e3).wanted(3.0);
    targets.at_most("50,000 rules: longest processor time of a request, ms", 5.0, longest.as_secs_f64() * 1e3);
}
