//! The cost of a decision to the client. A task that replies at once stands in for Redis on the same thread, so that
//! all time is work. The stand-in's cost is measured separately, to be subtracted: it is sent the same bytes, encoded
//! beforehand. redis-rs alone does the same, and `governor` gives the scale.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tollgate::redis::{self, Client, Value};
use tollgate::{Algorithm, Limiter, Redis, Rule};
use tollgate_benches::pipeline::RECORD;
use tollgate_benches::{arguments, peers, rule};

const KEYS: usize = 1024;
/// Most keys in one call of a script.
const MOST_KEYS: usize = 80;
/// A packed decision on an allowed call: what remains, the reset, the wait, and how many are allowed, with their bytes.
const ALLOWED: [(i64, usize); 4] = [(999_999, 7), (1, 7), (0, 7), (1, 3)];

fn decisions(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let url = runtime.block_on(stand_in());
    let keys: Vec<String> = (0..KEYS).map(|key| format!("user:{key}")).collect();

    let limiter = Limiter::builder(Redis::open(&url).expect("a good address")).deadline(Duration::from_secs(5)).build();
    let rule = rule("token-bucket 1000000/1s");
    let client = Client::open(url.as_str()).expect("a good address");
    let connection = runtime.block_on(client.get_multiplexed_async_connection()).expect("a connection");
    let script = Algorithm::TokenBucket.script();
    let numbers = arguments::acquire(script, &[1_000_000, 1, 1, 1, 0], 1);

    let mut group = criterion.benchmark_group("client");
    for callers in [1, 64, 1024] {
        group.throughput(Throughput::Elements(callers as u64));
        group.bench_function(format!("tollgate/{callers}"), |bencher| {
            bencher.iter(|| {
                let calls = keys[..callers].iter().map(|key| limiter.acquire(&rule, key.as_str()));
                for decision in runtime.block_on(join_all(calls)) {
                    assert!(decision.expect("a decision").allowed);
                }
            });
        });
        let mut stream = runtime.block_on(connected(&url));
        let (asked, answered) = spelled(&keys[..callers]);
        let mut answer = vec![0; answered];
        group.bench_function(format!("the stand-in/{callers}"), |bencher| {
            bencher.iter(|| {
                runtime.block_on(async {
                    stream.write_all(&asked).await.expect("a stand-in");
                    stream.read_exact(&mut answer).await.expect("answers");
                });
            });
        });
        group.bench_function(format!("redis-rs/{callers}"), |bencher| {
            bencher.iter(|| {
                let calls = keys[..callers].iter().map(|key| {
                    let mut connection = connection.clone();
                    let mut command = redis::cmd("EVALSHA");
                    command.arg(script.digest()).arg(1).arg(key).arg(&numbers);
                    async move { command.query_async::<Value>(&mut connection).await }
                });
                for answer in runtime.block_on(join_all(calls)) {
                    black_box(answer.expect("an answer"));
                }
            });
        });
    }
    group.throughput(Throughput::Elements(KEYS as u64));
    group.bench_function(format!("acquire_many/{KEYS}"), |bencher| {
        bencher.iter(|| {
            for decision in runtime.block_on(limiter.acquire_many(&rule, keys.iter().map(String::as_str))) {
                assert!(decision.expect("a decision").allowed);
            }
        });
    });
    group.throughput(Throughput::Elements(1));
    group.bench_function("rule, parsed", |bencher| {
        bencher.iter(|| Rule::new("api", black_box("token-bucket 100/1s burst 20")).expect("a good rule"));
    });
    let governor = peers::governor();
    let names: Vec<&'static str> = keys.iter().map(|key| &*key.clone().leak()).collect();
    let mut next = names.iter().cycle();
    group.bench_function("governor, in process", |bencher| {
        bencher.iter_batched(
            || next.next().expect("keys without end"),
            |key| governor.check_key(key).is_ok(),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

async fn connected(url: &str) -> TcpStream {
    let stream =
        TcpStream::connect(url.trim_start_matches("redis://").trim_end_matches('/')).await.expect("a stand-in");
    stream.set_nodelay(true).expect("a socket");
    stream
}

/// What tollgate sends for one decision on each of these keys together, and how many bytes come back.
fn spelled(keys: &[String]) -> (Vec<u8>, usize) {
    let script = Algorithm::TokenBucket.script();
    let mut pipeline = redis::Pipeline::new();
    let mut answered = 0;
    for keys in keys.chunks(MOST_KEYS) {
        let command = pipeline.cmd("EVALSHA").arg(script.digest()).arg(keys.len());
        keys.iter().for_each(|key| _ = command.arg(format!("tollgate:{{{key}}}:bench/token-bucket-1s")));
        command.arg(arguments::acquire(script, &[1_000_000, 1, 1, 1, 0], 1));
        let bytes = keys.len() * RECORD;
        answered += format!("${bytes}\r\n").len() + bytes + 2;
    }
    (pipeline.get_packed_pipeline(), answered)
}

/// Starts a server that replies as Redis would if every call were allowed, and returns its address.
async fn stand_in() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    format!("redis://{address}/")
}

async fn serve(mut stream: TcpStream) {
    stream.set_nodelay(true).expect("a socket");
    let record: Vec<u8> = ALLOWED.iter().flat_map(|(number, width)| number.to_le_bytes()[..*width].to_vec()).collect();
    let (mut asked, mut answers) = (Vec::with_capacity(1 << 17), Vec::with_capacity(1 << 17));
    while stream.read_buf(&mut asked).await.is_ok_and(|bytes| bytes > 0) {
        let mut taken = 0;
        while let Some((command, bytes)) = parsed(&asked[taken..]) {
            taken += bytes;
            match command {
                Command::Script { keys } => {
                    answers.extend(format!("${}\r\n", keys * record.len()).bytes());
                    (0..keys).for_each(|_| answers.extend(&record));
                    answers.extend(b"\r\n");
                }
                // Denied, so that the client skips its check of the version.
                Command::Hello => answers.extend(b"-NOPERM\r\n"),
                Command::Other => answers.extend(b"+OK\r\n"),
            }
        }
        asked.drain(..taken);
        if stream.write_all(&answers).await.is_err() {
            return;
        }
        answers.clear();
    }
}

enum Command {
    Script { keys: usize },
    Hello,
    Other,
}

/// The first command and its length, if it is complete.
fn parsed(bytes: &[u8]) -> Option<(Command, usize)> {
    let (count, mut at) = number(bytes, 0)?;
    let (mut command, mut words) = (Command::Other, 0);
    while words < count {
        let (length, begin) = number(bytes, at)?;
        let word = bytes.get(begin..begin + length)?;
        at = begin + length + 2;
        match (words, &command) {
            (0, _) if word == b"EVALSHA" => command = Command::Script { keys: 0 },
            (0, _) if word == b"HELLO" => command = Command::Hello,
            (2, Command::Script { .. }) => command = Command::Script { keys: digits(word) },
            _ => {}
        }
        words += 1;
    }
    (at <= bytes.len()).then_some((command, at))
}

/// The number in a line such as `$12` that begins here, and where the next line begins.
fn number(bytes: &[u8], at: usize) -> Option<(usize, usize)> {
    let line = bytes.get(at + 1..)?;
    let end = line.iter().take(16).position(|byte| *byte == b'\r')?;
    Some((digits(&line[..end]), at + end + 3))
}

fn digits(text: &[u8]) -> usize {
    text.iter().fold(0, |number, digit| number * 10 + usize::from(digit - b'0'))
}

fn configured() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20)
}

criterion_group!(name = client; config = configured(); targets = decisions);
criterion_main!(client);
