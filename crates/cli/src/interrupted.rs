//! Interrupts of a command by the user or the system.

use std::future::pending;
use std::io;
use std::process::exit;
use std::sync::OnceLock;

use tokio::sync::watch;

use crate::messages;

/// Completes once the process is asked to end, by a signal at any time from this call on. A second signal ends the
/// process at once: this thread may be waiting for a file, and cleaning up, such as removing keys, may take long.
///
/// # Errors
///
/// Signals can't be received.
pub(crate) fn interrupted() -> impl Future<Output = io::Result<()>> {
    let asked = asked();
    async {
        match asked?.changed().await {
            Ok(()) => Ok(()),
            // The thread of the sender lives as long as the process.
            Err(_) => pending().await,
        }
    }
}

/// A value that changes when the process is asked to end after this call.
fn asked() -> io::Result<watch::Receiver<()>> {
    static ASKED: OnceLock<watch::Receiver<()>> = OnceLock::new();
    if let Some(asked) = ASKED.get() {
        let mut asked = asked.clone();
        asked.mark_unchanged();
        return Ok(asked);
    }
    let asked = receive()?;
    Ok(ASKED.get_or_init(|| asked).clone())
}

/// Receives signals in a thread of its own, which nothing else blocks.
fn receive() -> io::Result<watch::Receiver<()>> {
    let (sender, asked) = watch::channel(());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _entered = runtime.enter();
        Signals::new()?
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            signals.next().await;
            sender.send_replace(());
            signals.next().await;
            messages::error("interrupted again: ended at once; keys that are left in Redis expire");
            exit(2);
        });
    })?;
    Ok(asked)
}

#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 3]);

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let all = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = all.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            pending().await
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::{Command, id};

    use super::*;

    /// As between the first output of a command and its first wait. No other test of this process uses signals.
    #[tokio::test]
    async fn a_signal_before_the_first_poll_is_not_lost() {
        let ended = interrupted();
        assert!(Command::new("kill").args(["-TERM", &id().to_string()]).status().expect("kill runs").success());
        tokio::time::timeout(std::time::Duration::from_secs(60), ended).await.expect("in time").expect("signals");
    }
}
