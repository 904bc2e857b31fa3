//! Requests between the passes over them: in memory while they are few, then in a file that is gone with the process.

use std::env;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tempfile::SpooledTempFile;

use crate::by_time::{At, Horizon, Sorted};

/// What stays in memory, in bytes.
const IN_MEMORY: usize = 32 << 20;
/// The bytes of a request.
const EACH: usize = 20;
const BUFFER: usize = 1 << 18;

/// A request: all that algorithms know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) t_us: u64,
    /// The number of its key.
    pub(super) key: u32,
    pub(super) cost: u64,
}

impl At for Request {
    fn t_us(&self) -> u64 {
        self.t_us
    }
}

/// Requests in some order.
#[derive(Debug)]
pub(super) struct Spool {
    file: BufWriter<SpooledTempFile>,
}

impl Spool {
    pub(super) fn new() -> Self {
        Self { file: BufWriter::with_capacity(BUFFER, SpooledTempFile::new(IN_MEMORY)) }
    }

    pub(super) fn push(&mut self, request: Request) -> Result<()> {
        let mut bytes = [0; EACH];
        bytes[..8].copy_from_slice(&request.t_us.to_le_bytes());
        bytes[8..12].copy_from_slice(&request.key.to_le_bytes());
        bytes[12..].copy_from_slice(&request.cost.to_le_bytes());
        self.file.write_all(&bytes).with_context(told)
    }

    /// All requests, in order.
    pub(super) fn requests(&mut self) -> Result<Requests<'_>> {
        self.file.flush().with_context(told)?;
        let file = self.file.get_mut();
        file.rewind().with_context(told)?;
        Ok(Requests(BufReader::with_capacity(BUFFER, file)))
    }

    /// The same requests by time; those of one time in the order in which they came.
    pub(super) fn by_time(mut self, horizon: Horizon) -> Result<Self> {
        let mut sorted = Self::new();
        for request in Sorted::new(horizon, self.requests()?) {
            sorted.push(request?)?;
        }
        Ok(sorted)
    }

    /// The requests of some keys.
    pub(super) fn of_keys(&mut self, is_one: impl Fn(u32) -> bool) -> Result<Self> {
        let mut some = Self::new();
        for request in self.requests()? {
            let request = request?;
            if is_one(request.key) {
                some.push(request)?;
            }
        }
        Ok(some)
    }
}

pub(super) struct Requests<'s>(BufReader<&'s mut SpooledTempFile>);

impl Iterator for Requests<'_> {
    type Item = Result<Request>;

    fn next(&mut self) -> Option<Result<Request>> {
        let mut bytes = [0; EACH];
        match self.0.read_exact(&mut bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return None,
            Err(error) => return Some(Err(error).with_context(told)),
        }
        let number = |from: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[from..from + 8]);
            u64::from_le_bytes(number)
        };
        let key = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        Some(Ok(Request { t_us: number(0), key, cost: number(12) }))
    }
}

fn told() -> String {
    format!("a temporary file in {}", env::temp_dir().display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_back_from_memory_and_from_a_file_and_by_time() {
        for count in [0, 1, 5_000, 2_000_000_u64] {
            let mut random = fastrand::Rng::with_seed(count);
            let (mut spool, mut horizon, mut pushed) = (Spool::new(), Horizon::default(), Vec::new());
            for at in 0..count {
                let request = Request { t_us: at + random.u64(0..9), key: random.u32(..), cost: random.u64(..) };
                spool.push(request).unwrap();
                horizon.note(request.t_us);
                pushed.push(request);
            }
            horizon.end();
            let read: Vec<_> = spool.requests().unwrap().map(Result::unwrap).collect();
            assert!(read == pushed, "{count}");
            let read: Vec<_> =
                spool.of_keys(|key| key % 2 == 0).unwrap().requests().unwrap().map(Result::unwrap).collect();
            assert!(read.iter().eq(pushed.iter().filter(|request| request.key % 2 == 0)), "{count}");
            let read: Vec<_> = spool.by_time(horizon).unwrap().requests().unwrap().map(Result::unwrap).collect();
            pushed.sort_by_key(|request| request.t_us);
            assert!(read == pushed, "{count}");
        }
    }
}
