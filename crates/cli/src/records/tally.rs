//! What a reader reports about a log as a whole, beside its records.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::place::Place;
use crate::messages;
use crate::output::counted;

/// Counted while it is read, perhaps by another thread than the one that reports it.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed_over: AtomicU64,
    /// Requests without the field that has the client's address, and those with it.
    without_client: AtomicU64,
    with_client: AtomicU64,
    /// The field that has the clients' addresses, if one was named.
    client: Option<String>,
    /// Sentences about the log.
    findings: Mutex<Vec<String>>,
}

impl Tally {
    pub(super) fn of(client: Option<&Place>) -> Self {
        Self { client: client.map(ToString::to_string), ..Self::default() }
    }

    pub(super) fn passed_over(&self) {
        self.passed_over.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn client(&self, there: bool) {
        let count = if there { &self.with_client } else { &self.without_client };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn finding(&self, text: String) {
        self.findings.lock().unwrap_or_else(|broken| broken.into_inner()).push(text);
    }

    /// Reports everything about this source, once; `is_sure` is whether its format is known for certain.
    pub(crate) fn say(&self, source: &str, is_sure: bool) {
        if let count @ 1.. = self.passed_over.swap(0, Ordering::Relaxed) {
            let lines = counted(count, "line");
            let are = if count == 1 { "is not a request" } else { "are not requests" };
            let hint = if is_sure { "" } else { "; leave out --input to have its format detected" };
            messages::note(format!("{source}: {lines} {are}; ignored{hint}"));
        }
        let (without, with) =
            (self.without_client.swap(0, Ordering::Relaxed), self.with_client.swap(0, Ordering::Relaxed));
        if let (1.., Some(client)) = (without, &self.client) {
            let requests = counted(without, "request");
            let all = if with == 0 { "; none has it" } else { "" };
            let count = if without == 1 { "counts" } else { "count" };
            messages::note(format!("{source}: {requests} without {client} {count} by the connection's address{all}"));
        }
        for text in self.findings.lock().unwrap_or_else(|broken| broken.into_inner()).drain(..) {
            messages::note(format!("{source}: {text}"));
        }
    }
}
