//! A storm of made-up API keys: how many are looked up in PostgreSQL, and the cost to clients with a valid key.
//!
//! Seconds with 10,000 unknown keys and seconds without alternate, while four callers with a valid key make 1,000 calls
//! a second. Needs a PostgreSQL it may write to, at TOLLGATE_DATABASE; creates its tables and one key there.

use std::error::Error;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::time::{MissedTickBehavior, interval};
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Limiter, Redis};
use tollgate_benches::report::{Targets, header, row, short};
use tollgate_benches::server::Server;
use tollgate_record::{Configuration, KeyTerms, Postgres};

const UNKNOWN_A_SECOND: u64 = 10_000;
const CALLERS: u64 = 4;
const CALLS_A_SECOND: u64 = 1_000;
/// Seconds of each kind.
const SECONDS: u64 = 10;

/// A key that is spelled correctly, with a checksum as good as any that is made without the database's secret.
fn unknown(number: u64) -> String {
    let digits = |mut number: u64, count: usize| -> String {
        let digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let mut text = vec!['0'; count];
        for digit in text.iter_mut().rev() {
            *digit = char::from(digits[(number % 62) as usize]);
            number /= 62;
        }
        text.into_iter().collect()
    };
    format!("tg_{}_{}{}", digits(number, 12), digits(number, 24), digits(number, 6))
}

/// One second of requests with a valid key.
async fn served(limiter: Limiter, configuration: Configuration, key: String) -> Histogram<u64> {
    let rules: RuleSet =
        "[[rule]]\nname = \"all\"\nkey = \"user\"\nlimits = [\"token-bucket 1000000/1s\"]".parse().expect("rules");
    let mut latencies = Histogram::new(3).expect("a histogram");
    let mut ticks = interval(Duration::from_secs(1) / (CALLS_A_SECOND / CALLERS) as u32);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for _ in 0..CALLS_A_SECOND / CALLERS {
        let due = ticks.tick().await.into_std();
        let account = configuration.account_of_key(&key).await.expect("a valid key");
        let verdict = limiter.acquire_by(&rules, &Attributes::new().account(&account)).await.expect("a verdict");
        assert!(verdict.allowed);
        latencies += due.elapsed().as_micros() as u64;
    }
    latencies
}

/// One second of keys that don't exist.
async fn storm(configuration: Configuration, from: u64) -> u64 {
    const AT_ONCE: u64 = 100;
    let mut ticks = interval(Duration::from_secs(1) * AT_ONCE as u32 / UNKNOWN_A_SECOND as u32);
    let mut sent = 0;
    while sent < UNKNOWN_A_SECOND {
        ticks.tick().await;
        for number in from + sent..from + sent + AT_ONCE {
            let configuration = configuration.clone();
            tokio::spawn(async move { configuration.account_of_key(unknown(number)).await.expect_err("unknown") });
        }
        sent += AT_ONCE;
    }
    sent
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("TOLLGATE_DATABASE").map_err(|_| "expected TOLLGATE_DATABASE, got none")?;
    let (redis, postgres) = (Server::start(), Postgres::open(&url)?);
    postgres.migrate().await?;
    let (key, _) = postgres.create_key("bench", &KeyTerms::default(), "bench").await?;
    let limiter = Limiter::new(Redis::open(&redis.url())?);
    let configuration = postgres.follow(&limiter).await?;
    let (mut calm, mut stormy) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    let (mut unknown_keys, mut looked_up) = (0, 0);
    for second in 0..2 * SECONDS + 2 {
        let has_storm = second % 2 == 1;
        let before = configuration.status().key_look_ups;
        let began = Instant::now();
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| tokio::spawn(served(limiter.clone(), configuration.clone(), key.secret().to_owned())))
            .collect();
        if has_storm {
            // Each run uses another range, since the cache may still have the last run's keys.
            let from = second * UNKNOWN_A_SECOND + 1_000_000_000 * u64::from(std::process::id());
            unknown_keys += storm(configuration.clone(), from).await;
        }
        let mut latencies = Histogram::new(3)?;
        for caller in callers {
            latencies += caller.await?;
        }
        // So that each second begins with a full second's allowance of look-ups.
        tokio::time::sleep(Duration::from_millis(1200).saturating_sub(began.elapsed())).await;
        // The first two warm up.
        if second >= 2 {
            *(if has_storm { &mut stormy } else { &mut calm }) += latencies;
            looked_up += configuration.status().key_look_ups - before;
        }
    }
    unknown_keys -= UNKNOWN_A_SECOND;
    println!("## A storm of unknown API keys\n");
    println!("{unknown_keys} keys in {SECONDS} seconds, of which {looked_up} were looked up in PostgreSQL.\n");
    println!("{}", header(&["decisions with a valid key, µs", "p50", "p99", "p99.9"]));
    let us = |latencies: &Histogram<u64>, quantile| latencies.value_at_quantile(quantile) as f64;
    for (what, latencies) in [("without the storm", &calm), ("with it", &stormy)] {
        let quantiles = [0.5, 0.99, 0.999].map(|quantile| short(us(latencies, quantile)));
        println!("{}", row(std::iter::once(what.to_owned()).chain(quantiles)));
    }
    let mut targets = Targets::default();
    targets.at_most("look-ups a second", 0.0, looked_up as f64 / SECONDS as f64);
    targets.at_most("median latency with the storm, x without", 1.1, us(&stormy, 0.5) / us(&calm, 0.5));
    println!("\n{targets}");
    Ok(())
}
