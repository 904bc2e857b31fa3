//! The options of the programs that `run.sh` starts.

use std::process::exit;
use std::str::FromStr;
use std::time::Duration;

const USAGE: &str = "\
Options:
  --rounds N      how often each variant has its turn (5)
  --slice MS      how long a turn is, in milliseconds (1000); on the server alone, a quarter of it
  --callers N,N   end to end: how many ask at once (1,16,64,1024)
  --keys N        server: live keys that growth is measured up to, 0 to skip it (5000000)";

#[derive(Debug)]
pub struct Options {
    pub rounds: usize,
    pub slice: Duration,
    pub callers: Vec<usize>,
    pub keys: u64,
}

impl Options {
    /// Parses this process's options; ends the process if they are invalid.
    pub fn read() -> Self {
        let mut options =
            Self { rounds: 5, slice: Duration::from_secs(1), callers: vec![1, 16, 64, 1024], keys: 5_000_000 };
        let mut given = std::env::args().skip(1);
        while let Some(option) = given.next() {
            let value = given.next().unwrap_or_default();
            match option.as_str() {
                "--rounds" => options.rounds = number::<usize>(&value).max(1),
                "--slice" => options.slice = Duration::from_millis(number(&value)),
                "--callers" => options.callers = value.split(',').map(number).collect(),
                "--keys" => options.keys = number(&value),
                _ => misused(),
            }
        }
        options
    }
}

fn number<T: FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| misused())
}

fn misused() -> ! {
    eprintln!("{USAGE}");
    exit(2)
}
