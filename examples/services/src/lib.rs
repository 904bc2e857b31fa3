//! Shared by all examples.

use std::error::Error;

use tokio::signal::unix::{SignalKind, signal};
use tollgate::{Embedded, Engine};

/// The Redis at `TOLLGATE_URL` or, without one, the engine in this process.
pub fn engine() -> Result<Engine, Box<dyn Error>> {
    match std::env::var("TOLLGATE_URL") {
        Ok(url) => Ok(Engine::open(&url)?),
        Err(_) => Ok(Embedded::new().into()),
    }
}

/// The address to listen on: `LISTEN`, or this default.
pub fn address(default: &str) -> String {
    std::env::var("LISTEN").unwrap_or_else(|_| default.to_owned())
}

/// Waits for Ctrl-C, or for the signal that ends services.
pub async fn interrupted() {
    let mut ended = signal(SignalKind::terminate()).expect("a handler of signals");
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = ended.recv() => {}
    }
}
