//! Requests by number of key.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::by_time::At;
use crate::spool::{self, Packed};

/// The bytes of a request.
const EACH: usize = 20;

/// A request: all that algorithms know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) t_us: u64,
    /// The number of its key.
    pub(super) key: u32,
    pub(super) cost: u64,
}

/// Requests in some order.
pub(super) type Spool = spool::Spool<Request, EACH>;

impl At for Request {
    fn t_us(&self) -> u64 {
        self.t_us
    }
}

impl Packed<EACH> for Request {
    fn pack(&self) -> [u8; EACH] {
        let mut bytes = [0; EACH];
        bytes[..8].copy_from_slice(&self.t_us.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.cost.to_le_bytes());
        bytes[16..].copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    fn unpack(bytes: &[u8; EACH]) -> Self {
        let ([t_us, cost], key) = numbers(bytes);
        Self { t_us, key, cost }
    }
}

/// Eight bytes each, and the four after them.
fn numbers(bytes: &[u8; EACH]) -> ([u64; 2], u32) {
    let (whole, rest) = bytes.as_chunks::<8>();
    let number = |at: usize| u64::from_le_bytes(whole[at]);
    ([number(0), number(1)], u32::from_le_bytes(*rest.first_chunk().expect("four bytes are left")))
}

/// The requests of some keys.
pub(super) fn of_keys(all: &mut Spool, is_one: impl Fn(u32) -> bool) -> Result<Spool> {
    let mut some = Spool::new();
    for request in all.requests()? {
        let request = request?;
        if is_one(request.key) {
            some.push(&request)?;
        }
    }
    Ok(some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::by_time::Horizon;

    #[test]
    fn requests_come_back_from_memory_and_from_a_file_and_by_time() {
        for count in [0, 1, 5_000, 500_000_u64] {
            let mut random = fastrand::Rng::with_seed(count);
            let (mut spool, mut horizon, mut pushed) = (Spool::new(), Horizon::default(), Vec::new());
            for at in 0..count {
                let request = Request { t_us: at + random.u64(0..9), key: random.u32(..), cost: random.u64(..) };
                spool.push(&request).unwrap();
                horizon.note(request.t_us);
                pushed.push(request);
            }
            horizon.end();
            let read: Vec<_> = spool.requests().unwrap().map(Result::unwrap).collect();
            assert!(read == pushed, "{count}");
            let some = of_keys(&mut spool, |key| key % 2 == 0).unwrap();
            let read: Vec<_> = some.into_requests().unwrap().map(Result::unwrap).collect();
            assert!(read.iter().eq(pushed.iter().filter(|request| request.key % 2 == 0)), "{count}");
            let read: Vec<_> = spool.by_time(horizon).unwrap().requests().unwrap().map(Result::unwrap).collect();
            pushed.sort_by_key(|request| request.t_us);
            assert!(read == pushed, "{count}");
        }
    }
}
