//! The terminal: taken over, redrawn for each snapshot and key, and restored however the command ends.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::collect::Snapshots;
use super::controls::Controls;
use super::snapshot::Snapshot;
use super::summary::{History, Theme};
use super::view::View;
use crate::interrupted::interrupted;

/// How soon the thread that reads keys notices that it is no longer needed.
const NOTICED: Duration = Duration::from_millis(100);

/// Shows snapshots as they come, until the user quits.
pub(super) async fn show(first: Snapshot, mut snapshots: Snapshots) -> Result<()> {
    // Before the terminal is taken over: a signal must not end the process with it.
    let unwanted = interrupted();
    tokio::pin!(unwanted);
    let mut screen = Screen::take()?;
    let mut events = Keyboard::listen();
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (mut controls, mut history, theme) = (Controls::default(), History::default(), Theme { colours });
    let (mut shown, mut latest) = (first, None);
    history.add(&shown);
    loop {
        if !controls.paused
            && let Some(latest) = latest.take()
        {
            shown = latest;
        }
        let view = View { snapshot: &shown, history: &history, theme };
        screen.0.draw(|frame| view.draw(&mut controls, frame.area(), frame.buffer_mut()))?;
        tokio::select! {
            _ = &mut unwanted => return Ok(()),
            event = events.receiver.recv() => match event {
                Some(Ok(Event::Key(key))) => controls.press(key),
                // A resize, or anything else that needs a redraw.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error).context("the terminal's keys can't be read"),
                None => return Ok(()),
            },
            snapshot = snapshots.next() => {
                if !controls.paused {
                    history.add(&snapshot);
                }
                latest = Some(snapshot);
            }
        }
        if controls.quit {
            return Ok(());
        }
    }
}

/// The terminal while it is taken over. A panic restores it before its message is printed.
struct Screen(DefaultTerminal);

impl Screen {
    fn take() -> io::Result<Self> {
        // If the second step fails, the first is undone.
        ratatui::try_init().map(Self).inspect_err(|_| ratatui::restore())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A panic has restored it already; doing so again would overwrite its message.
        if !std::thread::panicking() {
            // If the terminal is gone, there is nothing to restore.
            let _ = ratatui::try_restore();
        }
    }
}

/// A thread that waits for keys.
struct Keyboard {
    receiver: UnboundedReceiver<io::Result<Event>>,
    unwanted: Arc<AtomicBool>,
}

impl Keyboard {
    fn listen() -> Self {
        let (sender, receiver) = unbounded_channel();
        let unwanted = Arc::new(AtomicBool::new(false));
        let noticed = Arc::clone(&unwanted);
        std::thread::spawn(move || read(&sender, &noticed));
        Self { receiver, unwanted }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        self.unwanted.store(true, Ordering::Relaxed);
    }
}

fn read(events: &UnboundedSender<io::Result<Event>>, unwanted: &AtomicBool) {
    while !unwanted.load(Ordering::Relaxed) {
        let event = match event::poll(NOTICED) {
            Ok(false) => continue,
            Ok(true) => event::read(),
            Err(error) => Err(error),
        };
        let is_last = event.is_err();
        if events.send(event).is_err() || is_last {
            return;
        }
    }
}
