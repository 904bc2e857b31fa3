//! A worker that waits for its turn: ten jobs, in order, at five a second over all workers that share a Redis.
//!
//!   cargo run -p tollgate-examples --bin worker

use std::error::Error;
use std::time::{Duration, Instant};

use tollgate::{Limiter, Rule};
use tollgate_examples::engine;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::new(engine()?);
    // With `max-debt`, workers queue by reservation; without it, whoever retries first is served.
    let rule = Rule::new("jobs", "token-bucket 5/1s burst 1 max-debt 100")?;
    let began = Instant::now();
    for job in 0..10 {
        // A job isn't lost because Redis was unreachable for a while: it asks for its turn again.
        let turn = loop {
            match limiter.acquire_wait(&rule, "mail", Duration::from_secs(30)).await {
                Ok(turn) => break turn,
                Err(error) => eprintln!("job {job}: {error}"),
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        if !turn.allowed {
            println!("job {job}: the queue is longer than 30 s");
            continue;
        }
        println!("job {job} at {:.1} s", began.elapsed().as_secs_f64());
    }
    Ok(())
}
