//! Calls scripts over one socket with many calls in flight, so that Redis is never idle. The cost is what Redis
//! reports; requests are encoded beforehand and replayed, so that this process leaves the machine to Redis.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Decisions in flight.
const IN_FLIGHT: usize = 64;
/// Bytes of a record in a packed reply, the last three of which say how many calls are allowed; and of a long one.
pub const RECORD: usize = 24;
pub const LONG_RECORD: usize = 35;

#[derive(Debug)]
pub struct Connection(BufReader<UnixStream>);

/// Encoded calls of one script.
#[derive(Debug, Default)]
pub struct Calls {
    bytes: Vec<u8>,
    /// Where each pipeline ends in the bytes, and its number of calls.
    pipelines: Vec<(usize, usize)>,
    /// Bytes of a decision in a packed reply.
    answer: usize,
}

/// The results of some calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Replayed {
    /// Microseconds that Redis spent on each decision.
    pub us: f64,
    pub decisions: u64,
    pub allowed: u64,
    /// The total time, including the way to Redis and back.
    pub time: Duration,
}

#[derive(Debug)]
enum Reply {
    Integer(i64),
    Text(Vec<u8>),
    Array(Vec<Reply>),
}

impl Calls {
    /// Calls of this script, each with the numbers of its keys and its arguments. It decides by each key.
    pub fn of<K: AsRef<[u64]>>(digest: &str, calls: impl IntoIterator<Item = (K, Vec<Vec<u8>>)>) -> Self {
        Self::answered_in(RECORD, digest, calls)
    }

    /// The same of calls whose decisions have so many bytes in a packed reply.
    pub fn answered_in<K: AsRef<[u64]>>(
        answer: usize,
        digest: &str,
        calls: impl IntoIterator<Item = (K, Vec<Vec<u8>>)>,
    ) -> Self {
        let mut spelled = Self { answer, ..Self::default() };
        let (mut decisions, mut count) = (0, 0);
        for (keys, arguments) in calls {
            let keys = keys.as_ref();
            let names = keys.iter().map(|key| format!("key:{key:012}").into_bytes());
            let opening = [b"EVALSHA".to_vec(), digest.into(), keys.len().to_string().into()];
            let words: Vec<_> = opening.into_iter().chain(names).chain(arguments).collect();
            spell(&mut spelled.bytes, &words);
            (decisions, count) = (decisions + keys.len(), count + 1);
            if decisions >= IN_FLIGHT {
                spelled.pipelines.push((spelled.bytes.len(), count));
                (decisions, count) = (0, 0);
            }
        }
        if count > 0 {
            spelled.pipelines.push((spelled.bytes.len(), count));
        }
        spelled
    }
}

impl Replayed {
    /// Whether all were allowed, or all denied. One in a hundred may differ: calls that began a state or a window.
    pub fn all(&self, allowed: bool) -> bool {
        let others = if allowed { self.decisions - self.allowed } else { self.allowed };
        others * 100 <= self.decisions
    }
}

impl Connection {
    pub fn open(socket: &Path) -> Self {
        Self(BufReader::with_capacity(1 << 16, UnixStream::connect(socket).expect("a redis-server at the socket")))
    }

    /// Loads a script and returns its digest.
    pub fn load(&mut self, text: &str) -> String {
        self.text(&["SCRIPT", "LOAD", text])
    }

    /// A command's text reply.
    pub fn text(&mut self, words: &[&str]) -> String {
        match self.ask(words) {
            Reply::Text(text) => String::from_utf8(text).expect("text"),
            other => panic!("{words:?}: expected text, got {other:?}"),
        }
    }

    /// A command's integer reply.
    pub fn integer(&mut self, words: &[&str]) -> i64 {
        match self.ask(words) {
            Reply::Integer(integer) => integer,
            other => panic!("{words:?}: expected an integer, got {other:?}"),
        }
    }

    /// The number that follows these words in INFO.
    pub fn info(&mut self, section: &str, words: &[&str]) -> f64 {
        let info = self.text(&["INFO", section]);
        let number = words.iter().fold(info.as_str(), |rest, word| {
            rest.split_once(word).unwrap_or_else(|| panic!("INFO {section}: expected {word}, got {info}")).1
        });
        let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
        number[..end].parse().expect("a number")
    }

    /// All memory that Redis has allocated, in bytes.
    pub fn used_memory(&mut self) -> f64 {
        self.info("memory", &["used_memory:"])
    }

    /// Plays all calls once.
    pub fn play(&mut self, calls: &Calls) -> Replayed {
        self.play_until(calls, |pipelines| pipelines == calls.pipelines.len())
    }

    /// Plays the calls repeatedly for this long.
    pub fn replay(&mut self, calls: &Calls, time: Duration) -> Replayed {
        let until = Instant::now() + time;
        self.play_until(calls, |_| Instant::now() >= until)
    }

    fn play_until(&mut self, calls: &Calls, over: impl Fn(usize) -> bool) -> Replayed {
        self.ask(&["CONFIG", "RESETSTAT"]);
        let mut replayed = Replayed::default();
        let (mut begin, started) = (0, Instant::now());
        for (pipeline, (end, count)) in calls.pipelines.iter().cycle().enumerate() {
            if over(pipeline) {
                break;
            }
            if pipeline % calls.pipelines.len() == 0 {
                begin = 0;
            }
            self.0.get_mut().write_all(&calls.bytes[begin..*end]).expect("redis-server takes requests");
            begin = *end;
            for _ in 0..*count {
                let (decisions, allowed) = self.reply().decided(calls.answer);
                replayed.decisions += decisions;
                replayed.allowed += allowed;
            }
        }
        replayed.time = started.elapsed();
        replayed.us = self.info("commandstats", &["cmdstat_evalsha:", ",usec="]) / replayed.decisions as f64;
        replayed
    }

    fn ask(&mut self, words: &[&str]) -> Reply {
        let mut bytes = Vec::new();
        spell(&mut bytes, words);
        self.0.get_mut().write_all(&bytes).expect("redis-server takes requests");
        self.reply()
    }

    fn reply(&mut self) -> Reply {
        let mut line = Vec::with_capacity(32);
        self.0.read_until(b'\n', &mut line).expect("redis-server answers");
        let text = String::from_utf8_lossy(&line[1..]);
        let number = || text.trim().parse::<i64>().unwrap_or_else(|_| panic!("expected a number, got {text}"));
        match line[0] {
            b'+' => Reply::Text(text.trim().into()),
            b':' => Reply::Integer(number()),
            b'$' => {
                let mut bytes = vec![0; number() as usize + 2];
                self.0.read_exact(&mut bytes).expect("redis-server answers");
                bytes.truncate(bytes.len() - 2);
                Reply::Text(bytes)
            }
            b'*' => Reply::Array((0..number()).map(|_| self.reply()).collect()),
            _ => panic!("redis: {text}"),
        }
    }
}

impl Reply {
    /// How many decisions a reply contains, each in so many bytes if it is packed, and how many of them allow.
    fn decided(&self, answer: usize) -> (u64, u64) {
        match self {
            Self::Array(integers) => (1, u64::from(matches!(integers.first(), Some(Self::Integer(1))))),
            Self::Text(records) => {
                let allowed = records.chunks(answer).filter(|record| is_allowed(record)).count();
                (records.len().div_ceil(answer) as u64, allowed as u64)
            }
            Self::Integer(_) => panic!("expected decisions, got {self:?}"),
        }
    }
}

/// Whether this record, or the first of several limits', says that a call is allowed.
pub fn is_allowed(record: &[u8]) -> bool {
    record.get(RECORD - 3..RECORD).is_some_and(|count| count[2] < 0x80 && count != [0, 0, 0])
}

fn spell(bytes: &mut Vec<u8>, words: &[impl AsRef<[u8]>]) {
    bytes.extend(format!("*{}\r\n", words.len()).bytes());
    for word in words.iter().map(AsRef::as_ref) {
        bytes.extend(format!("${}\r\n", word.len()).bytes());
        bytes.extend(word);
        bytes.extend(b"\r\n");
    }
}
