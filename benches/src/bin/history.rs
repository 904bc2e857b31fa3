//! Recording every decision: rows written a second, the cost to decisions, and the memory used while PostgreSQL is
//! away.
//!
//! Turns of five seconds with recording and without it alternate, four of each. Needs a PostgreSQL it may write to, at
//! TOLLGATE_DATABASE; creates its tables there, and adds some three million rows to the history.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::time::{MissedTickBehavior, interval};
use tollgate::rules::{Attributes, RuleSet, Verdict};
use tollgate::{Limiter, Redis};
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::server::Server;
use tollgate_record::Postgres;
use tollgate_record::history::{History, HistorySettings};

const CALLERS: u64 = 4;
const CALLS_A_SECOND: u64 = 4_000;
/// The length of a turn, long enough that its records are written within it; and the number of turns of each kind.
const SECONDS: u64 = 5;
const TURNS: usize = 4;
const ROWS: u64 = 1_000_000;

const RULES: &str = r#"
    [[rule]]
    name = "api"
    match = { path = "/api/*" }
    key = "user"
    limits = ["token-bucket 1000000/1s"]
"#;

/// Latencies of one turn of decisions for a thousand users, including the recording.
async fn served(limiter: Limiter, rules: RuleSet, history: Option<History>, caller: u64) -> Histogram<u64> {
    let users: Vec<_> = (0..1_000 / CALLERS).map(|user| (caller * 1_000 + user).to_string()).collect();
    let mut latencies = Histogram::new(3).expect("a histogram");
    let mut ticks = interval(Duration::from_secs(1) / (CALLS_A_SECOND / CALLERS) as u32);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for call in 0..SECONDS * CALLS_A_SECOND / CALLERS {
        ticks.tick().await;
        let request = request(&users[call as usize % users.len()]);
        let began = Instant::now();
        let verdict = limiter.acquire_by(&rules, &request).await.expect("a verdict");
        if let Some(history) = &history {
            history.record(&request, &verdict, began.elapsed());
        }
        latencies += began.elapsed().as_nanos() as u64;
    }
    latencies
}

fn request(user: &str) -> Attributes<'_> {
    let address = std::net::IpAddr::from([192, 0, 2, 1]);
    Attributes::new().user(user).ip(address).method("GET").path("/api/v1/items").set("route", "/api/v1/{collection}")
}

/// Records a million rows as fast as they are accepted; returns rows a second.
async fn throughput(history: &History, verdict: &Verdict) -> Result<f64, Box<dyn Error>> {
    let users: Vec<_> = (0..1_000).map(|user| user.to_string()).collect();
    let began = Instant::now();
    let before = history.status().recorded;
    for number in 0..ROWS {
        history.record(&request(&users[number as usize % users.len()]), verdict, Duration::from_micros(number % 5_000));
        // Fills the queue only up to its last quarter, which is reserved for denials.
        while number % 64 == 0 && history.status().queued > 40_000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if number % 1_024 == 0 {
            tokio::task::yield_now().await;
        }
    }
    history.finish().await?;
    Ok((history.status().recorded - before) as f64 / began.elapsed().as_secs_f64())
}

/// Resident memory of this process, in MiB.
fn memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap_or(f64::NAN) / 1024.0
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("TOLLGATE_DATABASE").map_err(|_| "expected TOLLGATE_DATABASE, got none")?;
    let (redis, postgres) = (Server::start(), Postgres::open(&url)?);
    postgres.migrate().await?;
    let limiter = Limiter::new(Redis::open(&redis.url())?);
    let rules: RuleSet = RULES.parse()?;
    let history = postgres.record(HistorySettings::new().region("bench"))?;
    let (mut without, mut with) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    for turn in 0..2 * TURNS + 2 {
        let history = Some(history.clone()).filter(|_| turn % 2 == 1);
        let is_recorded = history.is_some();
        let mut latencies = Histogram::new(3)?;
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| tokio::spawn(served(limiter.clone(), rules.clone(), history.clone(), caller)))
            .collect();
        for caller in callers {
            latencies += caller.await?;
        }
        // Lets the records be written before the next turn.
        tokio::time::sleep(Duration::from_secs(2)).await;
        // The first two warm up.
        if turn >= 2 {
            *(if is_recorded { &mut with } else { &mut without }) += latencies;
        }
    }
    println!("## Recording every decision\n");
    println!("{CALLS_A_SECOND} decisions a second.\n");
    println!("{}", header(&["decisions, µs", "p50", "p99", "p99.9"]));
    let us = |latencies: &Histogram<u64>, quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    for (what, latencies) in [("not recorded", &without), ("recorded", &with)] {
        let quantiles = [0.5, 0.99, 0.999].map(|quantile| short(us(latencies, quantile)));
        println!("{}", row(std::iter::once(what.to_owned()).chain(quantiles)));
    }

    let verdict = limiter.acquire_by(&rules, &request("42")).await?;
    let mut rates = Vec::new();
    for _ in 0..3 {
        rates.push(throughput(&history, &verdict).await?);
    }
    let lost = history.status().lost;
    println!(
        "\n{ROWS} rows at once, three times: {} a second, {lost} lost.",
        rates.iter().map(|rate| format!("{rate:.0}")).collect::<Vec<_>>().join(", ")
    );

    // A PostgreSQL that doesn't exist.
    let away = Postgres::open("postgres://nobody@127.0.0.1:1/away")?.record(HistorySettings::new())?;
    let at_first = memory();
    let mut held = Vec::new();
    let began = Instant::now();
    for number in 0..2 * ROWS {
        away.record(black_box(&request("42")), &verdict, Duration::from_micros(number % 5_000));
        if number % (ROWS / 4) == ROWS / 4 - 1 {
            held.push(memory() - at_first);
            tokio::task::yield_now().await;
        }
    }
    let each = began.elapsed().as_nanos() as f64 / (2 * ROWS) as f64;
    let held: Vec<_> = held.into_iter().map(|mib| format!("{mib:.1}")).collect();
    println!(
        "\nWhile PostgreSQL is unreachable, {} decisions: {} MiB held after each {}, {} kept and {} counted as lost.",
        2 * ROWS,
        held.join(", "),
        ROWS / 4,
        away.status().recorded,
        away.status().lost
    );
    println!("A call that records took {each:.0} ns while the queue was full.\n");

    let mut targets = Targets::default();
    targets.at_least("rows a second", 50_000.0, median(rates));
    targets.at_most("median latency recorded, x not recorded", 1.05, us(&with, 0.5) / us(&without, 0.5));
    println!("{targets}");
    Ok(())
}
