//! The end of a command, as the user or the system asks for it.

use std::future::pending;
use std::io;
use std::process::exit;
use std::sync::OnceLock;

use tokio::sync::watch;

use crate::messages;

/// Ends when the user or the system asks the process to end. A second time ends the process at once: the first may have
/// come while this thread waits for a file, and what is done to end, such as removing keys, may take long.
///
/// # Errors
///
/// Signals can't be received.
pub(crate) async fn interrupted() -> io::Result<()> {
    static ASKED: OnceLock<watch::Receiver<()>> = OnceLock::new();
    let mut asked = match ASKED.get() {
        Some(asked) => asked.clone(),
        None => {
            let asked = receive()?;
            ASKED.get_or_init(|| asked).clone()
        }
    };
    asked.mark_unchanged();
    match asked.changed().await {
        Ok(()) => Ok(()),
        // Its thread has ended, which it doesn't before the process.
        Err(_) => pending().await,
    }
}

/// Receives signals in a thread of its own, which nothing keeps from it.
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
