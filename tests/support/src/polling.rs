//! Waiting for a condition by a bounded poll, and bounds for what would otherwise hang a test.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use tollgate::{Charged, Error};

/// Fails a test that would hang. No machine is so slow that it decides one.
pub const PATIENCE: Duration = Duration::from_secs(120);

const PAUSE: Duration = Duration::from_millis(5);

/// Blocks until this holds; returns how long that took.
pub fn block_until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(PAUSE);
    }
    began.elapsed()
}

/// Waits until this holds; returns how long that took.
pub async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(PAUSE).await;
    }
    began.elapsed()
}

/// Waits until there is a value.
pub async fn wait_for_value<T>(mut look: impl AsyncFnMut() -> Option<T>) -> T {
    in_time(async {
        loop {
            match look().await {
                Some(found) => return found,
                None => tokio::time::sleep(PAUSE).await,
            }
        }
    })
    .await
}

/// What a server that is well answers, however busy the machine is. Where that stood still for half a second, a client
/// takes the server for silent: calls that waited behind others end without having been sent, and are made again.
pub async fn once_sent<T, C: Future<Output = Result<T, Error>>>(call: impl Fn() -> C) -> T {
    in_time(async {
        loop {
            match call().await {
                Err(error) if error.is_unreachable() && error.charged() == Charged::No => {
                    tokio::time::sleep(PAUSE).await;
                }
                answer => return answer.expect("an answer"),
            }
        }
    })
    .await
}

pub async fn in_time<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, answer).await.expect("an answer in time")
}

/// Polls it once: whether it has no answer yet.
pub async fn is_pending<F: Future>(mut future: Pin<&mut F>) -> bool {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

/// How often another future of the same task has its turn while this is done 10,000 times.
pub async fn turns_of_others(ask: impl AsyncFn()) -> u64 {
    turns_while(async || {
        for _ in 0..10_000 {
            ask().await;
        }
    })
    .await
}

/// How often another future of the same task has its turn while this is done.
pub async fn turns_while(asks: impl AsyncFn()) -> u64 {
    let turns = std::cell::Cell::new(0);
    let others = async {
        loop {
            turns.set(turns.get() + 1);
            tokio::task::yield_now().await;
        }
    };
    let both = async {
        tokio::select! {
            biased;
            () = asks() => {}
            () = others => {}
        }
    };
    tokio::task::LocalSet::new().run_until(both).await;
    turns.get()
}

/// The most of these calls in a row, of a thousand, without a turn of another future of the same task.
pub async fn most_in_a_row(ask: impl AsyncFn()) -> u64 {
    let (row, most) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let others = async {
        loop {
            row.set(0);
            tokio::task::yield_now().await;
        }
    };
    let asks = async {
        for _ in 0..1000 {
            row.set(row.get() + 1);
            most.set(most.get().max(row.get()));
            ask().await;
        }
    };
    let both = async {
        tokio::select! {
            biased;
            () = asks => {}
            () = others => {}
        }
    };
    tokio::task::LocalSet::new().run_until(both).await;
    most.get()
}
