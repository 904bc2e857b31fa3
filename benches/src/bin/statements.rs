//! What the deadline of each statement on PostgreSQL costs: a statement of the system of record, with the deadline that
//! it has by default and with a chosen one, and the same statement by tokio-postgres alone, in turn. Needs a PostgreSQL
//! at TOLLGATE_DATABASE, in which it changes nothing.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant, SystemTime};

use tokio_postgres::NoTls;
use tollgate_benches::options::Options;
use tollgate_benches::process;
use tollgate_benches::report::{header, median, row, short};
use tollgate_record::Postgres;

const STATEMENTS: u32 = 2000;

/// Microseconds for each statement: in all, and of this process.
async fn measured<T>(mut statement: impl AsyncFnMut() -> T) -> [f64; 2] {
    let (began, before) = (Instant::now(), process::processor_time());
    for _ in 0..STATEMENTS {
        black_box(statement().await);
    }
    let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(STATEMENTS);
    [each(began.elapsed()), each(process::processor_time() - before)]
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::read();
    let url = std::env::var("TOLLGATE_DATABASE").map_err(|_| "expected TOLLGATE_DATABASE, got none")?;
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    let by_default = Postgres::open(&url)?;
    let chosen = Postgres::open(&url)?.deadline(Duration::from_millis(500));
    let mut turns: [Vec<[f64; 2]>; 3] = Default::default();
    for _ in 0..options.rounds {
        turns[0].push(
            measured(async || client.query_one("SELECT now()", &[]).await.expect("a row").get::<_, SystemTime>(0))
                .await,
        );
        turns[1].push(measured(async || by_default.now().await.expect("the time")).await);
        turns[2].push(measured(async || chosen.now().await.expect("the time")).await);
    }
    println!("## A statement on PostgreSQL\n");
    println!(
        "`SELECT now()`, one after the other, in microseconds; two round trips, since it is prepared each time.\n"
    );
    println!("{}", header(&["", "in all", "of the client"]));
    let names = ["tokio-postgres alone", "with the default deadline", "with a chosen deadline"];
    for (name, turns) in names.into_iter().zip(turns) {
        let of = |at: usize| short(median(turns.iter().map(|turn| turn[at])));
        println!("{}", row([name.to_owned(), of(0), of(1)]));
    }
    println!();
    Ok(())
}
