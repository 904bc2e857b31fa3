//! A primary and two replicas under three sentinels.

use std::time::{Duration, Instant};

use tollgate::redis::from_redis_value;

use crate::polling::block_until;
use crate::redis_server::{Server, command_text, run_command, try_command};
use crate::server_setup::{ServerSetup, server, words};

/// What the sentinels call the primary.
const NAME: &str = "main";
/// How long the primary may be silent before it counts as failed, in milliseconds: longer than a busy machine keeps it
/// waiting, so that it isn't replaced while it is well.
const DOWN_AFTER: &str = "10000";
/// The same where a test is about a primary that is lost.
const SHORT_DOWN_AFTER: &str = "500";

/// Server 0 begins as the primary.
pub struct Sentinels {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
    setup: ServerSetup,
}

impl Sentinels {
    pub fn start() -> Self {
        Self::with(ServerSetup::default())
    }

    pub fn with(setup: ServerSetup) -> Self {
        let first = server(&setup, &["--repl-diskless-sync-delay", "0"]);
        let primary = format!("127.0.0.1 {}", first.port());
        let replica = || server(&setup, &["--replicaof", &primary, "--repl-diskless-sync-delay", "0"]);
        let servers = vec![first, replica(), replica()];
        // Sentinels that require a password send it to each other, too.
        let own = setup.of_sentinels.map(|word| format!("requirepass {word}\n")).unwrap_or_default();
        let primarys = setup.password.map(|word| format!("sentinel auth-pass {NAME} {word}\n")).unwrap_or_default();
        let text = format!(
            "sentinel monitor {NAME} {primary} 2\n\
             sentinel down-after-milliseconds {NAME} {DOWN_AFTER}\n\
             sentinel failover-timeout {NAME} 2000\n\
             sentinel parallel-syncs {NAME} 2\n\
             {primarys}{own}"
        );
        let options = |port| [vec!["--sentinel".to_owned()], setup.of_sentinel(port)].concat();
        let sentinel = || Server::with_text(&text, options).with_password(setup.of_sentinels);
        let sentinels: Vec<_> = std::iter::repeat_with(sentinel).take(3).collect();
        for sentinel in &sentinels {
            // They look and talk some times as often as they would. A replica of which a sentinel has heard nothing for
            // three times the first, or five times the second, isn't promoted.
            for (what, ms) in [("INFO", "1000"), ("PING", "300"), ("ASK", "100"), ("PUBLISH", "200")] {
                run_command(sentinel, &["SENTINEL", "DEBUG", &format!("{what}-PERIOD"), ms]);
            }
        }
        let fleet = Self { servers, sentinels, setup };
        fleet.wait_until_whole();
        fleet
    }

    /// Waits until every sentinel knows a primary that it takes for well, both replicas and the other sentinels.
    pub fn wait_until_whole(&self) {
        block_until("the sentinels know each other and the replicas", || {
            self.sentinels.iter().all(|sentinel| {
                let master: Vec<String> = try_command(sentinel, &["SENTINEL", "MASTER", NAME])
                    .and_then(|value| Ok(from_redis_value(value)?))
                    .unwrap_or_default();
                let says = |name: &str, value: &str| master.chunks(2).any(|pair| pair == [name, value]);
                says("flags", "master") && says("num-slaves", "2") && says("num-other-sentinels", "2")
            }) && self.servers.iter().enumerate().all(|(at, server)| {
                let info = command_text(server, &["INFO", "replication"]);
                Some(at) == self.primary() || info.contains("master_link_status:up")
            })
        });
    }

    pub fn url(&self) -> String {
        self.url_of(NAME)
    }

    pub fn url_of(&self, name: &str) -> String {
        let ports: Vec<_> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        format!("{}-sentinel://{}/{name}", self.setup.scheme(), ports.join(","))
    }

    pub fn server(&self, at: usize) -> &Server {
        &self.servers[at]
    }

    pub fn sentinel(&self, at: usize) -> &Server {
        &self.sentinels[at]
    }

    /// Which server most sentinels take for the primary, if it takes itself for one.
    pub fn primary(&self) -> Option<usize> {
        let port = |sentinel| {
            let address = try_command(sentinel, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]).ok()?;
            from_redis_value::<(String, u16)>(address).ok().map(|(_, port)| port)
        };
        let ports: Vec<_> = self.sentinels.iter().filter_map(port).collect();
        let most = |at: &usize| ports.iter().filter(|port| **port == self.servers[*at].port()).count() >= 2;
        let at = (0..self.servers.len()).find(most)?;
        command_text(&self.servers[at], &["INFO", "replication"]).contains("role:master").then_some(at)
    }

    /// Has the sentinels put a replica in the primary's place, which is left well.
    pub fn fail_over(&self) {
        // They give up where they haven't heard of a replica for a moment.
        const ATTEMPT: Duration = Duration::from_secs(3);
        let before = self.primary();
        let mut begun: Option<Instant> = None;
        block_until("another primary", || {
            let due = begun.is_none_or(|at| at.elapsed() > ATTEMPT);
            if due && try_command(&self.sentinels[0], &["SENTINEL", "FAILOVER", NAME]).is_ok() {
                begun = Some(Instant::now());
            }
            self.primary().is_some_and(|at| Some(at) != before)
        });
    }

    pub fn kill(&mut self, at: usize) {
        self.replace_soon();
        self.servers[at].stop();
    }

    /// From here on, a primary that is silent for half a second counts as failed. Before it is frozen.
    pub fn replace_soon(&self) {
        for sentinel in &self.sentinels {
            // Another may have been killed before.
            let _ = try_command(sentinel, &["SENTINEL", "SET", NAME, "down-after-milliseconds", SHORT_DOWN_AFTER]);
        }
    }

    /// Starts one again that was killed and replaced, as a replica.
    pub fn start_again(&mut self, at: usize) {
        let primary = self.primary().expect("another primary");
        let primary = format!("127.0.0.1 {}", self.servers[primary].port());
        let of_setup = self.setup.of_server(self.servers[at].port());
        let options = words(&["--replicaof", &primary, "--repl-diskless-sync-delay", "0"], &of_setup);
        self.servers[at].start_again(&options);
    }

    pub fn kill_sentinel(&mut self, at: usize) {
        self.sentinels[at].stop();
    }
}

#[test]
fn sentinels_replace_a_primary_when_asked_to_and_when_it_dies() {
    let mut fleet = Sentinels::start();
    assert_eq!(fleet.primary(), Some(0));
    fleet.fail_over();
    fleet.wait_until_whole();
    let second = fleet.primary().expect("a primary");
    fleet.kill(second);
    block_until("a third", || fleet.primary().is_some_and(|at| at != second));
    fleet.start_again(second);
    fleet.wait_until_whole();
}
