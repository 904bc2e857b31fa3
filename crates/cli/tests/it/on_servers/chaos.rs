//! Load that the tool audits, while the servers are killed, frozen, emptied, failed over and cut off at random: one
//! node, a primary under sentinels, and a cluster, in turn. `tests/chaos.sh` runs it for as long as is wanted.
//!
//! Each is loaded twice: at first no failure loses counts, and nothing may be admitted beyond the rule; then
//! anything may, and each loss lets in a capacity of each key at most, as documented.

use std::fmt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::Value;
use tollgate_testing::failures::{Event, Servers};
use tollgate_testing::polling::{PATIENCE, block_until};

use crate::support::tool::{command, stderr, stdout};

/// In all: `TOLLGATE_CHAOS_SECONDS` says otherwise.
const SECONDS: u64 = 9;
/// Of what happens: `TOLLGATE_CHAOS_SEED` says otherwise.
const SEED: u64 = 1;
const KEYS: u64 = 25;
const CAPACITY: u64 = 20;
const DEADLINE: Duration = Duration::from_millis(200);
/// A call that ends so long after its deadline has waited for something else, however busy the machine is.
const SLACK: Duration = Duration::from_secs(20);

/// What became of one load.
struct Round {
    name: &'static str,
    events: u64,
    /// Of them, those that lost counts.
    losses: u64,
    over_by: Duration,
    hung: bool,
    /// What the tool printed, or why it printed nothing.
    report: Result<Value, String>,
}

#[test]
fn no_server_fault_admits_more_than_documented_or_keeps_a_caller_past_its_deadline() {
    let from_environment = |name: &str, otherwise: u64| {
        std::env::var(name).map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
    };
    let seconds = from_environment("TOLLGATE_CHAOS_SECONDS", SECONDS);
    let seed = from_environment("TOLLGATE_CHAOS_SEED", SEED);
    println!("chaos of {seconds} s, seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let each = Duration::from_secs(seconds) / 6;
    let mut rounds = Vec::new();
    for mut servers in Servers::all() {
        for anything in [false, true] {
            rounds.push(Round::run(&mut servers, anything, each, &mut rng));
        }
    }
    println!("\n{}", Round::HEADINGS);
    rounds.iter().for_each(|round| println!("{round}"));
    let broken: Vec<_> = rounds.iter().flat_map(Round::broken).collect();
    println!("\nchaos: {}", if broken.is_empty() { "held".into() } else { format!("broke: {}", broken.join("; ")) });
    assert!(broken.is_empty(), "seed {seed}: {broken:#?}");
}

impl Round {
    const HEADINGS: &str = "servers                     calls answered events losses  over bound  false denials    \
                            longest / deadline  hung";

    fn run(servers: &mut Servers, anything: bool, time: Duration, rng: &mut Rng) -> Self {
        let name = servers.name(anything);
        servers.reset_command_counts();
        let mut load = load(&servers.url(), time);
        // A tool that loses its connections before it has begun says so and ends.
        block_until("the load", || ended(&mut load) || servers.all_run_scripts());
        let began = Instant::now();
        let (mut events, mut losses) = (0, 0);
        loop {
            std::thread::sleep(Duration::from_millis(100 + rng.u64(..200)));
            let left = time.saturating_sub(began.elapsed());
            let fits = |event: &Event| (anything || !event.loses_counts()) && event.takes() < left;
            let possible: Vec<_> = servers.events().iter().copied().filter(fits).collect();
            let Some(event) = rng.choice(possible) else { break };
            println!("{name:24} {:7.3} s  {event:?}", began.elapsed().as_secs_f64());
            events += 1;
            losses += u64::from(servers.meet(event, rng));
        }
        let (hung, report) = end(load, began + time + PATIENCE);
        let report = report.and_then(|report| {
            let complete = report["audit"].is_object() && report["longest_us"].is_u64();
            if complete { Ok(report) } else { Err(format!("nothing was audited: {report}")) }
        });
        Self { name, events, losses, over_by: time, hung, report }
    }

    fn bound(&self) -> u64 {
        self.losses * KEYS * CAPACITY
    }

    fn number(&self, name: &str) -> u64 {
        let report = self.report.as_ref().unwrap_or(&Value::Null);
        report[name].as_u64().or(report["audit"][name].as_u64()).unwrap_or_default()
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.number("longest_us"))
    }

    fn broken(&self) -> Vec<String> {
        if let Err(why) = &self.report {
            return vec![format!("{}: {}", self.name, why.trim())];
        }
        let over = self.number("over_admissions");
        // A tenth of a second's calls in each, but for one in which everything begins: something was answered between
        // what happened.
        let few = (100 * self.over_by.as_secs().saturating_sub(1)).max(1);
        let found = [
            (self.hung, "the load hung".to_owned()),
            (over > self.bound(), format!("{over} over-admissions for a bound of {}", self.bound())),
            (self.number("false_denials") > 0, format!("{} false denials", self.number("false_denials"))),
            (self.longest() > DEADLINE + SLACK, format!("a call took {:?}", self.longest())),
            (self.number("answered") < few, format!("only {} calls were answered", self.number("answered"))),
        ];
        found.into_iter().filter(|(holds, _)| *holds).map(|(_, what)| format!("{}: {what}", self.name)).collect()
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [calls, answered, over, denied] =
            ["sent", "answered", "over_admissions", "false_denials"].map(|name| self.number(name));
        let (longest, deadline) = (self.longest().as_millis(), DEADLINE.as_millis());
        let (hung, bound) = (if self.hung { "yes" } else { "no" }, self.bound());
        write!(f, "{:24} {calls:8} {answered:8} {:6} {:6} ", self.name, self.events, self.losses)?;
        write!(f, "{over:5} {bound:5} {denied:14} {longest:7} / {deadline} ms {hung:>7}")
    }
}

/// Twice as many calls on each key as the rule admits.
fn load(url: &str, time: Duration) -> Child {
    let (rule, keys, time) = (format!("gcra {CAPACITY}/1s"), KEYS.to_string(), format!("{}ms", time.as_millis()));
    let deadline = format!("{}ms", DEADLINE.as_millis());
    let load = ["load", &rule, "--rate", "1000", "--key-count", &keys, "--duration", &time, "--warmup", "100ms"];
    let how = ["--deadline", &deadline, "--format", "jsonl", "--url", url];
    let mut load = command(&[&load[..], &how].concat());
    load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs")
}

fn ended(load: &mut Child) -> bool {
    load.try_wait().expect("a state").is_some()
}

/// Whether it had to be ended, and what it said.
fn end(mut load: Child, last: Instant) -> (bool, Result<Value, String>) {
    let mut hung = false;
    while !ended(&mut load) {
        if Instant::now() > last {
            hung = true;
            load.kill().expect("it runs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = load.wait_with_output().expect("an end");
    (hung, serde_json::from_str(&stdout(&output)).map_err(|_| stderr(&output)))
}
