//! How a server answers requests.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::resp::{Requests, write, write_map};
use super::server::{Role, Server};
use super::slots::{self, Node};
use super::wire::ServerEnd;
use crate::engine::embedded::raw::{Answer, Runner, Serves};

/// A connection's state on the server.
struct Session {
    run: u64,
    resp3: bool,
    asking: bool,
    wrote_at: Option<Instant>,
    /// Whether the server has been a replica for all of the connection's life.
    of_replica: bool,
}

/// What happens to a request.
enum Step {
    Answered,
    /// It waits until this instant, and is processed again.
    Paused(Instant, Vec<Vec<u8>>),
    /// It is answered once this many replicas have the writes, or at this instant.
    Waits(i64, Instant),
    Crashes,
}

type Words = Vec<Vec<u8>>;

thread_local! {
    /// Compiles a script once for all servers of the thread.
    static RUNNER: RefCell<Runner> = RefCell::new(Runner::new());
}

impl Server {
    pub(super) async fn serve(self: Arc<Self>, mut end: ServerEnd) {
        let (run, of_replica) = {
            let state = self.state();
            (state.run, state.role == Role::Replica)
        };
        let mut session = Session { run, resp3: false, asking: false, wrote_at: None, of_replica };
        let mut requests = Requests::default();
        let mut paused: Option<Words> = None;
        // Whether more of the received data may be waiting.
        let mut more = false;
        loop {
            if !std::mem::take(&mut more) {
                let idle = self.state().trouble.idle;
                let received = match idle {
                    Some(idle) => tokio::time::timeout(idle, end.receive()).await.ok().flatten(),
                    None => end.receive().await,
                };
                let Some(bytes) = received else { return };
                requests.push(&bytes);
            }
            let turn = self.turn.lock().await;
            self.awake().await;
            if !self.is_run(session.run) {
                return;
            }
            let (mut replies, mut waits) = (Vec::new(), None);
            while let Some(words) = paused.take().or_else(|| requests.next()) {
                let slow = self.state().trouble.slow;
                if let Some(slow) = slow {
                    tokio::time::sleep(slow).await;
                    self.awake().await;
                    if !self.is_run(session.run) {
                        return;
                    }
                }
                match self.execute(&mut session, words, &mut replies) {
                    Step::Answered => {}
                    Step::Paused(until, words) => {
                        paused = Some(words);
                        waits = Some((0, until));
                        break;
                    }
                    Step::Waits(replicas, until) => {
                        waits = Some((replicas, until));
                        break;
                    }
                    // The answers so far are lost with it.
                    Step::Crashes => {
                        drop(turn);
                        return self.crash();
                    }
                }
            }
            if !replies.is_empty() {
                end.send(&replies);
            }
            drop(turn);
            if let Some((replicas, until)) = waits
                && !self.wait(&mut session, &end, replicas, until, paused.is_some()).await
            {
                return;
            }
            more = waits.is_some();
        }
    }

    /// Whether the process still runs after it.
    async fn wait(&self, session: &mut Session, end: &ServerEnd, replicas: i64, until: Instant, paused: bool) -> bool {
        if paused {
            tokio::time::sleep_until(until).await;
            return self.is_run(session.run);
        }
        let had = loop {
            let had = {
                let state = self.state();
                let synced = session.wrote_at.is_none_or(|wrote| state.synced_at > wrote);
                i64::from(state.other.is_some() && synced && state.role == Role::Primary)
            };
            if had >= replicas || Instant::now() >= until {
                break had;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            if !self.is_run(session.run) {
                return false;
            }
        };
        self.awake().await;
        let mut reply = Vec::new();
        write(&Answer::Integer(had), session.resp3, &mut reply);
        end.send(&reply);
        self.is_run(session.run)
    }

    fn execute(&self, session: &mut Session, words: Words, replies: &mut Vec<u8>) -> Step {
        let name = String::from_utf8_lossy(&words[0]).to_uppercase();
        let asking = std::mem::take(&mut session.asking);
        let (trouble, role) = {
            let mut state = self.state();
            if let Some(left) = &mut state.trouble.crash_after {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    return Step::Crashes;
                }
            }
            (state.trouble.clone(), state.role.clone())
        };
        let word = |at: usize| words.get(at).map(|word| String::from_utf8_lossy(word).to_uppercase());
        let error = |text: &str| Answer::Error(text.to_owned());
        let refused = match name.as_str() {
            "HELLO" | "AUTH" => None,
            _ if trouble.busy => Some("BUSY Redis is busy running a script. You can only call SCRIPT KILL."),
            "CLIENT" | "INFO" | "ROLE" | "PING" | "SELECT" | "CLUSTER" => None,
            _ if trouble.loading => Some("LOADING Redis is loading the dataset in memory"),
            _ => None,
        };
        let answer = match name.as_str() {
            _ if refused.is_some() => error(refused.unwrap_or_default()),
            "HELLO" => {
                if let Some(version) = word(1) {
                    session.resp3 = version == "3";
                }
                self.hello(session, &role, replies);
                return Step::Answered;
            }
            "AUTH" | "CLIENT" | "SELECT" => Answer::Status("OK".into()),
            "PING" => Answer::Status("PONG".into()),
            "ASKING" => {
                session.asking = true;
                Answer::Status("OK".into())
            }
            "INFO" => {
                Answer::Bytes(format!("# Server\r\nredis_version:7.2.4\r\nrun_id:{:040x}\r\n", session.run).into())
            }
            "ROLE" if role == Role::Primary => {
                Answer::Array(vec![Answer::Bytes(b"master".to_vec()), Answer::Integer(0)])
            }
            "ROLE" => Answer::Array(vec![Answer::Bytes(b"slave".to_vec())]),
            "SENTINEL" => match role {
                Role::Sentinel(primary) => {
                    let primary = self.others.at(primary);
                    let port = primary.port().to_string();
                    Answer::Array([primary.host(), &port].map(|text| Answer::Bytes(text.into())).into())
                }
                _ => error("ERR unknown command 'SENTINEL'"),
            },
            "CLUSTER" if word(1).is_some_and(|what| what == "SLOTS") => self.slots(),
            "CLUSTER" => {
                let state = if trouble.refuses_scripts == Some(slots::DOWN) { "fail" } else { "ok" };
                Answer::Bytes(format!("cluster_state:{state}\r\n").into_bytes())
            }
            "WAIT" => {
                let number = |at| word(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or_default();
                return Step::Waits(number(1) as i64, Instant::now() + Duration::from_millis(number(2)));
            }
            "EVAL" | "EVALSHA" if trouble.paused.is_some_and(|until| Instant::now() < until) => {
                session.asking = asking;
                return Step::Paused(trouble.paused.unwrap_or_else(Instant::now), words);
            }
            "EVAL" | "EVALSHA" | "EVAL_RO" | "EVALSHA_RO" => match trouble.refuses_scripts {
                // A script without declared keys runs on a node that finds the cluster down, and can use no key.
                Some(slots::DOWN) if word(2).is_some_and(|keys| keys == "0") && words.len() > 3 => {
                    self.run_script(session, asking, &name, &words)
                }
                Some(why) if !self.spares() => error(why),
                _ => self.run_script(session, asking, &name, &words),
            },
            _ => Answer::Error(format!("ERR unknown command '{name}', with args beginning with: ")),
        };
        write(&answer, session.resp3, replies);
        Step::Answered
    }

    /// Whether this script is run while others are refused.
    fn spares(&self) -> bool {
        let trouble = &mut self.state().trouble;
        trouble.spared = trouble.spares_some && !trouble.spared;
        trouble.spared
    }

    fn hello(&self, session: &Session, role: &Role, replies: &mut Vec<u8>) {
        let text = |text: &str| Answer::Bytes(text.as_bytes().to_vec());
        let sentinel = matches!(role, Role::Sentinel(_));
        let mode = if sentinel { "sentinel" } else { "standalone" };
        let role = if *role == Role::Primary { "master" } else { "replica" };
        let pairs = [
            ("server", text("redis")),
            ("version", text("7.2.4")),
            ("proto", Answer::Integer(if session.resp3 { 3 } else { 2 })),
            ("mode", text(mode)),
            ("role", text(role)),
        ];
        write_map(&pairs, session.resp3, replies);
    }

    fn slots(&self) -> Answer {
        let Some(slots) = self.state().slots.clone() else {
            return Answer::Error("ERR This instance has cluster support disabled".into());
        };
        slots.shown(|at| {
            let node = self.others.at(at);
            Node { host: node.host().to_owned(), port: node.port(), replica: node.state().other }
        })
    }

    /// The answer to a request for keys that this server of a cluster doesn't have.
    fn elsewhere(&self, keys: &[Vec<u8>], asking: bool) -> Option<String> {
        let mut state = self.state();
        let slots = state.slots.clone()?;
        state.store.set_time(self.medium.now_us());
        let missing = keys.iter().filter(|key| !state.store.has(key)).count();
        let primary = (state.role != Role::Replica).then_some(self.at);
        drop(state);
        slots.elsewhere(primary, keys, missing, asking, |at| self.others.at(at).address())
    }

    fn run_script(&self, session: &mut Session, asking: bool, name: &str, words: &Words) -> Answer {
        let number = |word: &[u8]| std::str::from_utf8(word).ok().and_then(|count| count.parse::<usize>().ok());
        let count = number(&words[2]).expect("a number of keys");
        let (keys, arguments) = words[3..].split_at(count);
        if let Some(elsewhere) = self.elsewhere(keys, asking) {
            if elsewhere.starts_with("MOVED") {
                self.medium.ledger().moved.push(self.medium.ms());
            }
            return Answer::Error(elsewhere);
        }
        let mut state = self.state();
        session.of_replica &= state.role == Role::Replica;
        if session.of_replica && state.slots.is_none() && count > 0 {
            self.medium.ledger().misled += 1;
        }
        let now_us = self.medium.now_us();
        state.store.set_time(now_us);
        let digest = if name.starts_with("EVALSHA") {
            let digest = String::from_utf8_lossy(&words[1]).into_owned();
            if !state.scripts.contains(&digest) {
                return Answer::Error("NOSCRIPT No matching script. Please use EVAL.".into());
            }
            digest
        } else {
            match RUNNER.with_borrow_mut(|runner| runner.load(&words[1])) {
                Ok(digest) => digest,
                Err(error) => return Answer::Error(error),
            }
        };
        state.scripts.insert(digest.clone());
        let refusal = match state.role {
            Role::Replica => Some("READONLY You can't write against a read only replica."),
            _ => state.trouble.refusal,
        };
        // Keys that a script doesn't declare are among its arguments, and each is checked when it is used.
        let (used, own) = match arguments {
            [used, rest @ ..] if count == 0 => rest.split_at(number(used).expect("a number of keys")),
            _ => (keys, arguments),
        };
        let serves = state.slots.clone().filter(|_| count == 0).map(|slots| -> Serves {
            let primary = (state.role != Role::Replica).then_some(self.at);
            let down = state.trouble.refuses_scripts == Some(slots::DOWN);
            Box::new(move |keys, missing| {
                !down && slots.elsewhere(primary, keys, missing, false, |_| String::new()).is_none()
            })
        });
        let before: Vec<_> = used.iter().map(|key| state.store.shown(key)).collect();
        let run = |runner: &mut Runner| {
            let answer = runner.run(&digest, &mut state.store, (keys, arguments), refusal, serves);
            (answer, runner.wrote())
        };
        let (answer, wrote) = RUNNER.with_borrow_mut(run);
        let changed: Vec<_> = used.iter().zip(before).map(|(key, before)| state.store.shown(key) != before).collect();
        if changed.contains(&true) {
            state.unsynced.extend_from_slice(used);
        }
        if wrote {
            session.wrote_at = Some(Instant::now());
        }
        drop(state);
        self.medium.ledger().enter(used, own, &answer, &changed);
        answer
    }
}
