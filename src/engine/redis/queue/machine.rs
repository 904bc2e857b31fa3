//! Who sends the batches that wait, and who wakes callers whose deadline has passed: the queue's state, without its
//! callers and their locks. Each event changes it, and returns what is to be done once the lock is released.
//!
//! A *dispatch* is a task that sends batches, or a lone caller that sends its own ask. Of those that run, one is
//! *responsible* for the batches that wait: it connects, and then takes the next batch. (Two that finish sending at the
//! same time may both be responsible, which costs one of them a needless check.)
//!
//! ```text
//!                        Enter                          Enter
//!      ┌────────┐ SendOwn      ┌─────────────┐ Queue           ┌─────────────┐
//!      │  idle  │─────────────▶│ one sends   │────────────────▶│ and another │
//!      │        │◀─────────────│             │ StartDispatch   │ responsible │
//!      └────────┘ Left         └─────────────┘                 └─────────────┘
//!           ▲     nothing waits   ▲     ▲                        │   ▲      │
//!           │                     │     └────────────────────────┘   │      │ Connected: SendNext
//!           │                     │ Looked, nothing waits: End       │      │
//!           │                     │                                  │      ▼
//!           │                     │ Left, nothing waits        ┌─────────────┐
//!           │                     └────────────────────────────│  two send   │
//!           │                                                  └─────────────┘
//!           │                       Sent, or Left while something waits: responsible again
//!           │
//!           └─── Abandoned: what is in flight is given up, in any state. Its dispatches are of an earlier generation
//!                from then on, and their events change nothing.
//! ```
//!
//! The watch is one timer for all callers: it sleeps until the earliest deadline, wakes those whose deadline has
//! passed, and ends once nobody waits.

use tokio::time::Instant;

/// Batches in flight at once: while one's answer travels, the server works on the other. With more of them, each would
/// only be smaller.
pub(super) const IN_FLIGHT: usize = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Machine {
    /// How many dispatches of this generation run: each has a batch in flight, or is about to send one.
    dispatches: usize,
    /// Goes up when the batches in flight are given up.
    generation: u64,
    /// Whether one of the dispatches is responsible for the batches that wait.
    claimed: bool,
    /// When the watch checks deadlines next; none if no watch runs.
    next_check: Option<Instant>,
}

/// What has happened. `waits`: whether batches wait to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A caller asks.
    Entered,
    /// Callers were added to a batch that waits.
    Queued,
    /// A dispatch checks whether it is still needed.
    Looked { generation: u64, waits: bool },
    /// The responsible dispatch has a connection.
    Connected { generation: u64, waits: bool },
    /// It has taken its batch, and another one may wait.
    Taken { waits: bool },
    /// Its batch was sent, and was answered or failed.
    Sent { generation: u64 },
    /// It couldn't connect.
    Unconnected { generation: u64 },
    /// A dispatch has ended.
    Left { generation: u64, waits: bool },
    /// A dispatch was dropped before it has sent what waits: its runtime is shutting down.
    Stranded { generation: u64 },
    /// The connection has fallen silent.
    Abandoned,
    /// A caller with this deadline waits.
    Waits(Instant),
    /// The watch has looked at all deadlines: the earliest of those to come, if anybody waits.
    Checked(Option<Instant>),
    /// The watch was dropped, with its runtime.
    WatchLost,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// The caller sends its own ask, as a dispatch of this generation.
    SendOwn(u64),
    /// The caller joins a batch that waits.
    Queue,
    /// A dispatch of this generation is to be started; it is responsible.
    StartDispatch(u64),
    /// The dispatch takes the next batch.
    SendNext,
    /// The dispatch goes on, and is responsible.
    GoOn,
    /// The dispatch ends: nothing waits, or a later generation sends it.
    End,
    /// Callers that wait to be sent get an error.
    FailWaiting,
    StartWatch,
    /// The watch is to sleep for a shorter time.
    WakeWatch,
}

impl Machine {
    pub(super) fn on(&mut self, event: Event) -> Action {
        match event {
            Event::Entered if self.dispatches == 0 => {
                self.dispatches = 1;
                Action::SendOwn(self.generation)
            }
            Event::Entered => Action::Queue,
            Event::Queued => self.claim(true),
            Event::Looked { generation, .. }
            | Event::Connected { generation, .. }
            | Event::Sent { generation }
            | Event::Unconnected { generation }
            | Event::Left { generation, .. }
            | Event::Stranded { generation }
                if generation != self.generation =>
            {
                Action::End
            }
            Event::Looked { waits, .. } => {
                // If nothing waits, the next caller to arrive starts another dispatch.
                self.claimed &= waits;
                if waits { Action::GoOn } else { Action::End }
            }
            Event::Connected { waits, .. } => {
                self.claimed = false;
                if waits { Action::SendNext } else { Action::Nothing }
            }
            Event::Taken { waits } => self.claim(waits),
            Event::Sent { .. } => {
                self.claimed = true;
                Action::GoOn
            }
            Event::Unconnected { .. } => {
                self.claimed = false;
                Action::FailWaiting
            }
            Event::Left { waits, .. } => {
                self.dispatches -= 1;
                self.claim(waits)
            }
            Event::Stranded { .. } => {
                self.dispatches -= 1;
                self.claimed = false;
                Action::FailWaiting
            }
            Event::Abandoned => {
                self.generation += 1;
                self.dispatches = 0;
                self.claimed = false;
                Action::FailWaiting
            }
            Event::Waits(until) if self.next_check.is_some_and(|at| at <= until) => Action::Nothing,
            Event::Waits(until) => match self.next_check.replace(until) {
                Some(_) => Action::WakeWatch,
                None => Action::StartWatch,
            },
            Event::Checked(next) => {
                self.next_check = next;
                if next.is_some() { Action::GoOn } else { Action::End }
            }
            Event::WatchLost => {
                self.next_check = None;
                Action::Nothing
            }
        }
    }

    /// When the watch checks deadlines next.
    pub(super) fn next_check(&self) -> Option<Instant> {
        self.next_check
    }

    /// A dispatch for what waits, if nobody is responsible for it and another batch may be in flight.
    fn claim(&mut self, waits: bool) -> Action {
        if !waits || self.claimed || self.dispatches >= IN_FLIGHT {
            return Action::Nothing;
        }
        self.claimed = true;
        self.dispatches += 1;
        Action::StartDispatch(self.generation)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;

    /// An event, its action, and the state after it: dispatches, generation, whether one is responsible.
    type Row = (Event, Action, (usize, u64, bool));

    #[test]
    fn each_event_has_its_action() {
        use Action::*;
        use Event::*;
        let stories: &[&[Row]] = &[
            // A lone caller, and another one after it.
            &[
                (Entered, SendOwn(0), (1, 0, false)),
                (Left { generation: 0, waits: false }, Nothing, (0, 0, false)),
                (Entered, SendOwn(0), (1, 0, false)),
            ],
            // Callers that come meanwhile fill a batch, which a second dispatch sends; the next one waits for it.
            &[
                (Entered, SendOwn(0), (1, 0, false)),
                (Entered, Queue, (1, 0, false)),
                (Queued, StartDispatch(0), (2, 0, true)),
                (Queued, Nothing, (2, 0, true)),
                (Looked { generation: 0, waits: true }, GoOn, (2, 0, true)),
                (Connected { generation: 0, waits: true }, SendNext, (2, 0, false)),
                (Taken { waits: true }, Nothing, (2, 0, false)),
                // The lone caller is answered: what waits goes out.
                (Left { generation: 0, waits: true }, StartDispatch(0), (2, 0, true)),
                (Sent { generation: 0 }, GoOn, (2, 0, true)),
                (Looked { generation: 0, waits: false }, End, (2, 0, false)),
                (Left { generation: 0, waits: false }, Nothing, (1, 0, false)),
            ],
            // Two batches at once, from a caller with many asks.
            &[
                (Queued, StartDispatch(0), (1, 0, true)),
                (Connected { generation: 0, waits: true }, SendNext, (1, 0, false)),
                (Taken { waits: true }, StartDispatch(0), (2, 0, true)),
            ],
            // All have given up by the time it has connected.
            &[
                (Queued, StartDispatch(0), (1, 0, true)),
                (Connected { generation: 0, waits: false }, Nothing, (1, 0, false)),
                (Sent { generation: 0 }, GoOn, (1, 0, true)),
                (Looked { generation: 0, waits: false }, End, (1, 0, false)),
            ],
            // No connection; and a runtime that ends.
            &[
                (Queued, StartDispatch(0), (1, 0, true)),
                (Unconnected { generation: 0 }, FailWaiting, (1, 0, false)),
                (Left { generation: 0, waits: false }, Nothing, (0, 0, false)),
                (Queued, StartDispatch(0), (1, 0, true)),
                (Stranded { generation: 0 }, FailWaiting, (0, 0, false)),
            ],
            // What falls silent is left behind: its dispatches no longer count, and change nothing.
            &[
                (Entered, SendOwn(0), (1, 0, false)),
                (Queued, StartDispatch(0), (2, 0, true)),
                (Abandoned, FailWaiting, (0, 1, false)),
                (Entered, SendOwn(1), (1, 1, false)),
                (Queued, StartDispatch(1), (2, 1, true)),
                (Looked { generation: 0, waits: true }, End, (2, 1, true)),
                (Connected { generation: 0, waits: true }, End, (2, 1, true)),
                (Unconnected { generation: 0 }, End, (2, 1, true)),
                (Sent { generation: 0 }, End, (2, 1, true)),
                (Left { generation: 0, waits: true }, End, (2, 1, true)),
                (Stranded { generation: 0 }, End, (2, 1, true)),
            ],
        ];
        for story in stories {
            let mut machine = Machine::default();
            for (at, (event, action, state)) in story.iter().enumerate() {
                let done = machine.on(*event);
                let now = (machine.dispatches, machine.generation, machine.claimed);
                assert_eq!((done, now), (*action, *state), "{at}: {event:?}");
            }
        }
    }

    #[test]
    fn one_watch_serves_all_deadlines() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut machine = Machine::default();
        for (event, action) in [
            (Event::Waits(at(50)), Action::StartWatch),
            (Event::Waits(at(70)), Action::Nothing),
            (Event::Waits(at(5)), Action::WakeWatch),
            (Event::Checked(Some(at(50))), Action::GoOn),
            (Event::Waits(at(50)), Action::Nothing),
            (Event::Checked(None), Action::End),
            (Event::Waits(at(80)), Action::StartWatch),
            (Event::WatchLost, Action::Nothing),
            (Event::Waits(at(90)), Action::StartWatch),
        ] {
            assert_eq!(machine.on(event), action, "{event:?}");
        }
    }

    /// Dispatches of the present generation, as their tasks go through their states.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Task {
        /// About to look whether something waits.
        Looks,
        Connects,
        Sends,
        Ends,
    }

    /// Every order of the events of one generation, with up to three batches that wait: at any time, somebody is
    /// responsible for them.
    #[test]
    fn what_waits_is_always_sent_by_somebody() {
        let mut seen = HashSet::new();
        let mut open = vec![(Machine::default(), Vec::<Task>::new(), 0_usize)];
        while let Some((machine, mut tasks, waiting)) = open.pop() {
            tasks.sort_unstable();
            if !seen.insert((machine.dispatches, machine.claimed, tasks.clone(), waiting)) {
                continue;
            }
            assert_eq!(machine.dispatches, tasks.len());
            assert!(machine.dispatches <= IN_FLIGHT);
            let responsible = tasks.iter().filter(|task| matches!(task, Task::Looks | Task::Connects)).count();
            assert!(!machine.claimed || responsible > 0, "whoever was responsible is gone");
            assert!(waiting == 0 || !tasks.is_empty(), "nobody will send what waits");
            let generation = machine.generation;
            // A caller, alone or beside others.
            let (mut after, mut with) = (machine.clone(), tasks.clone());
            match after.on(Event::Entered) {
                Action::SendOwn(_) => {
                    with.push(Task::Ends);
                    open.push((after, with, waiting));
                }
                Action::Queue if waiting < 3 => {
                    if let Action::StartDispatch(_) = after.on(Event::Queued) {
                        with.push(Task::Looks);
                    }
                    open.push((after, with, waiting + 1));
                }
                _ => {}
            }
            // The callers of a batch that waits give up.
            if waiting > 0 {
                open.push((machine.clone(), tasks.clone(), waiting - 1));
            }
            for (at, task) in tasks.iter().enumerate() {
                let (mut after, mut with, mut waiting) = (machine.clone(), tasks.clone(), waiting);
                let waits = waiting > 0;
                // Its runtime may end before it does.
                if *task != Task::Ends {
                    let (mut stranded, mut others) = (machine.clone(), tasks.clone());
                    assert_eq!(stranded.on(Event::Stranded { generation }), Action::FailWaiting);
                    others.remove(at);
                    open.push((stranded, others, 0));
                }
                match task {
                    Task::Looks => match after.on(Event::Looked { generation, waits }) {
                        Action::GoOn => with[at] = Task::Connects,
                        _ => with[at] = Task::Ends,
                    },
                    Task::Connects => {
                        let (mut failed, mut of_failed) = (machine.clone(), tasks.clone());
                        assert_eq!(failed.on(Event::Unconnected { generation }), Action::FailWaiting);
                        of_failed[at] = Task::Ends;
                        open.push((failed, of_failed, 0));
                        with[at] = Task::Sends;
                        if let Action::SendNext = after.on(Event::Connected { generation, waits }) {
                            waiting -= 1;
                            if let Action::StartDispatch(_) = after.on(Event::Taken { waits: waiting > 0 }) {
                                with.push(Task::Looks);
                            }
                        }
                    }
                    Task::Sends => {
                        after.on(Event::Sent { generation });
                        with[at] = Task::Looks;
                    }
                    Task::Ends => {
                        with.remove(at);
                        if let Action::StartDispatch(_) = after.on(Event::Left { generation, waits }) {
                            with.push(Task::Looks);
                        }
                    }
                }
                open.push((after, with, waiting));
            }
        }
        assert!(seen.len() > 20, "{} states", seen.len());
    }
}
