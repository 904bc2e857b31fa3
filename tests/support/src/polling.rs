//! Waiting for a condition by a bounded poll, and bounds for what would otherwise hang a test.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Fails a test that would hang. No machine is so slow that it decides one.
pub const PATIENCE: Duration = Duration::from_secs(30);

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

pub async fn in_time<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, answer).await.expect("an answer in time")
}

/// Polls it once: whether it has no answer yet.
pub async fn is_pending<F: Future>(mut future: Pin<&mut F>) -> bool {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}
