//! Calls of scripts, asked together in one pipeline, and again for as long as that is safe: by its text what the server
//! has no script of, over another connection what was never written, and after a wait what the server doesn't run now.

use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::Redis;
use super::errors::Called;
use super::link::Link;
use super::local::Local;
use super::queue::Until;
use super::sending::{Asking, How, of_call, of_packed, send};
use crate::batch::{Packed, Records};
use crate::error::{Error, Kind};
use crate::random::jittered;
use crate::script::{Call, Reply};

/// What certainly didn't run is asked again after these waits, and up to half as long again.
const WAITS: [Duration; 3] = [Duration::from_millis(5), Duration::from_millis(20), Duration::from_millis(60)];

/// A call of a script.
pub(super) trait Question {
    type Answer;

    fn command(&self, how: How) -> Cmd;

    fn called(&self) -> Called;

    /// Whether a node of a cluster that says where to ask instead is asked again all the same.
    fn stays(&self) -> bool;

    /// What the script answered, and what the replicas lack of what it took.
    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Self::Answer, Error>;
}

/// How far a question has come.
#[derive(Debug)]
pub(super) enum Progress<T> {
    /// It isn't under way, and didn't run.
    Unsent,
    Sent,
    /// It didn't run for this, and is asked again in a moment.
    Refused(Error),
    Answered(Result<T, Error>),
}

/// How questions are asked.
#[derive(Clone, Copy)]
pub(super) struct Manner {
    pub(super) asking: Asking,
    /// By when replicas must confirm, if they must.
    pub(super) confirmed: Option<Instant>,
}

impl Redis {
    /// Asks one question, and ends by the deadline.
    pub(super) async fn ask_one<Q: Question>(
        &self,
        local: &Arc<Local>,
        question: &Q,
        asking: Asking,
        confirmed: bool,
        until: Until,
    ) -> Result<Q::Answer, Error> {
        let manner = Manner { asking, confirmed: confirmed.then_some(until.at) };
        let mut progress = Progress::Unsent;
        let asked = async {
            match self.connection(local).await {
                Ok(link) => {
                    let questions = std::slice::from_ref(question);
                    self.exchange(local, link, questions, manner, |_, said| progress = said).await;
                }
                Err(error) => progress = Progress::Answered(Err(error)),
            }
        };
        // What has come of it by then is told below.
        let _ = tokio::time::timeout_at(until.at, asked).await;
        match progress {
            Progress::Answered(answer) => answer,
            // It says more than that there was no time to ask again.
            Progress::Refused(error) => Err(error),
            Progress::Unsent => Err(until.missed(false)),
            Progress::Sent => Err(until.missed(true)),
        }
    }

    /// Asks these questions, and says of each how far it has come, in the end that it is answered.
    pub(super) async fn exchange<Q: Question>(
        &self,
        local: &Arc<Local>,
        mut link: Link,
        questions: &[Q],
        manner: Manner,
        mut say: impl FnMut(usize, Progress<Q::Answer>),
    ) {
        let mut asked: Vec<_> = (0..questions.len()).map(|at| (at, How::ByDigest)).collect();
        let mut later = Vec::new();
        let mut waits = WAITS.into_iter();
        while !asked.is_empty() {
            asked.iter().for_each(|(at, _)| say(*at, Progress::Sent));
            let written = link.written();
            let confirm = manner.confirmed.and_then(|by| self.confirms(by.saturating_duration_since(Instant::now())));
            let commands = asked.iter().map(|(at, how)| questions[*at].command(*how)).collect();
            let (answers, lacking) = send(&link, commands, manner.asking, confirm).await;

            let lost = answers.iter().all(|answer| answer.as_ref().is_err_and(RedisError::is_io_error));
            if lost && link.wrote_nothing_since(written) {
                asked.iter().for_each(|(at, _)| say(*at, Progress::Unsent));
                if let Some(Err(error)) = answers.first() {
                    local.told(error, link.number);
                }
            } else {
                let (mut by_text, mut answered, mut failed) = (Vec::new(), false, None);
                for ((at, how), answer) in asked.drain(..).zip(answers) {
                    let question = &questions[at];
                    let answer = match answer {
                        Err(error) if how == How::ByDigest && is_noscript(&error) => {
                            by_text.push((at, How::ByText));
                            answered = true;
                            continue;
                        }
                        Err(error) => Err(local.told_of(question.called(), &error, link.number)),
                        Ok(value) => question.read(value, lacking.clone()),
                    };
                    if answer.as_ref().is_err_and(Error::is_garbled) {
                        // It may be another call's: none that comes on this connection can be trusted any more.
                        local.drop_link(link.number);
                        link.lose();
                    }
                    match answer {
                        Err(error)
                            if waits.len() > 0
                                && error.is_not_now()
                                && (question.stays() || error.detour().is_none()) =>
                        {
                            later.push((at, error));
                        }
                        answer => {
                            match &answer {
                                Err(error) if error.is_outage() => failed = Some(error.clone()),
                                _ => answered = true,
                            }
                            say(at, Progress::Answered(answer));
                        }
                    }
                }
                // They are one attempt: Redis is away if it answered none of them.
                if answered || failed.is_some() {
                    local.outcome(failed.filter(|_| !answered).as_ref());
                }
                if !by_text.is_empty() {
                    asked = by_text;
                    continue;
                }
                if later.is_empty() {
                    return;
                }
                // After all that was answered has been said.
                for (at, error) in later.drain(..) {
                    asked.push((at, How::ByDigest));
                    say(at, Progress::Refused(error));
                }
                tokio::time::sleep(jittered(waits.next().unwrap_or_default(), 50)).await;
            }
            link = match self.connection(local).await {
                Ok(link) => link,
                Err(error) => {
                    asked.into_iter().for_each(|(at, _)| say(at, Progress::Answered(Err(error.clone()))));
                    return;
                }
            };
        }
    }
}

impl Question for Call<'_> {
    type Answer = Reply;

    fn command(&self, how: How) -> Cmd {
        of_call(self, how)
    }

    fn called(&self) -> Called {
        Called::of(self)
    }

    /// Of several keys some may have moved and some not, until all have.
    fn stays(&self) -> bool {
        self.key_count() > 1
    }

    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Reply, Error> {
        let reply = match &answer {
            Value::Array(items) => Reply::from_integers(items.iter().map(|item| match item {
                Value::Int(integer) => Some(*integer),
                _ => None,
            })),
            _ => None,
        };
        let expected = "redis: expected five or more integers from the script, got something else";
        reply.ok_or_else(|| Error::new(Kind::Garbled, expected))?.unless(lacking)
    }
}

impl Question for Packed<'_> {
    type Answer = Records;

    fn command(&self, how: How) -> Cmd {
        of_packed(*self, how)
    }

    fn called(&self) -> Called {
        Called::of_packed(*self)
    }

    /// Whoever asked follows by itself, and keeps nobody else waiting.
    fn stays(&self) -> bool {
        false
    }

    fn read(&self, answer: Value, lacking: Option<Error>) -> Result<Records, Error> {
        match answer {
            Value::BulkString(answer) => Packed::read(*self, &answer, lacking),
            _ => {
                let expected = "redis: expected a string of decisions from the script, got something else";
                Err(Error::new(Kind::Garbled, expected))
            }
        }
    }
}

fn is_noscript(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
