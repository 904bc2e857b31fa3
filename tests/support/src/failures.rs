//! The failures that can be caused on each kind of deployment: one node, a primary under Sentinels, and a cluster.

use std::time::Duration;

use fastrand::Rng;

use crate::cluster::ClusterServers;
use crate::polling::block_until;
use crate::redis_server::{Server, command_text, run_command, try_command};
use crate::sentinels::Sentinels;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    LoseScripts,
    LoseKeys,
    KillConnections,
    /// For less time than others take to notice.
    Freeze,
    /// Until another is in its place.
    FreezeForLong,
    /// It starts again with nothing.
    Restart,
    /// Another is put in its place, as it is.
    FailOver,
    /// Another is put in its place once it has all that was counted.
    HandOver,
    /// Another takes its place.
    Kill,
}

use Event::*;

impl Event {
    /// Whether counts may be lost.
    pub fn loses_counts(self) -> bool {
        !matches!(self, LoseScripts | KillConnections | Freeze | HandOver)
    }

    /// About how long it takes until all is well again: events that don't fit into what is left are not begun.
    pub fn takes(self) -> Duration {
        Duration::from_millis(match self {
            LoseScripts | LoseKeys => 200,
            KillConnections | Freeze | Restart | HandOver => 500,
            FailOver => 1000,
            FreezeForLong | Kill => 4000,
        })
    }
}

pub enum Servers {
    One(Box<Server>),
    Sentinel(Sentinels),
    Cluster(ClusterServers),
}

impl Servers {
    /// Each kind, started at the same time.
    pub fn all() -> [Self; 3] {
        std::thread::scope(|scope| {
            let sentinels = scope.spawn(Sentinels::start);
            let cluster = scope.spawn(ClusterServers::start);
            let one = Self::One(Box::new(Server::start()));
            let sentinels = Self::Sentinel(sentinels.join().expect("sentinels"));
            [one, sentinels, Self::Cluster(cluster.join().expect("a cluster"))]
        })
    }

    pub fn name(&self, anything: bool) -> &'static str {
        match (self, anything) {
            (Self::One(_), false) => "one node, no loss",
            (Self::One(_), true) => "one node, anything",
            (Self::Sentinel(_), false) => "sentinels, no loss",
            (Self::Sentinel(_), true) => "sentinels, anything",
            (Self::Cluster(_), false) => "cluster, no loss",
            (Self::Cluster(_), true) => "cluster, anything",
        }
    }

    pub fn url(&self) -> String {
        match self {
            Self::One(server) => server.tcp_url(),
            Self::Sentinel(fleet) => fleet.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    /// After which `all_run_scripts` means scripts that were run since.
    pub fn reset_command_counts(&self) {
        self.primaries().into_iter().for_each(|at| self.server(at).reset_command_counts());
    }

    /// Whether each primary has run some.
    pub fn all_run_scripts(&self) -> bool {
        self.primaries().into_iter().all(|at| self.server(at).commands().contains_key("evalsha"))
    }

    pub fn events(&self) -> &'static [Event] {
        match self {
            Self::One(_) => &[LoseScripts, LoseKeys, KillConnections, Freeze, Restart],
            Self::Sentinel(_) => &[LoseScripts, LoseKeys, KillConnections, Freeze, FreezeForLong, FailOver, Kill],
            Self::Cluster(_) => &[LoseScripts, LoseKeys, KillConnections, Freeze, FreezeForLong, HandOver, Kill],
        }
    }

    /// Causes it on a primary, and returns when all is well again: whether counts may be lost.
    pub fn meet(&mut self, event: Event, rng: &mut Rng) -> bool {
        let before = self.primaries();
        let Some(primary) = rng.choice(before.iter().copied()) else { return false };
        match event {
            LoseScripts => drop(run_command(self.server(primary), &["SCRIPT", "FLUSH"])),
            LoseKeys => drop(run_command(self.server(primary), &["FLUSHALL"])),
            KillConnections => {
                for _ in 0..5 {
                    // Its own connection is one of them.
                    let _ = try_command(self.server(primary), &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"]);
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            Freeze => {
                self.server(primary).signal("-STOP");
                std::thread::sleep(Duration::from_millis(250));
                self.server(primary).signal("-CONT");
            }
            FreezeForLong => {
                match self {
                    Self::One(_) => {}
                    Self::Sentinel(fleet) => fleet.replace_soon(),
                    Self::Cluster(cluster) => cluster.replace_soon(),
                }
                self.server(primary).signal("-STOP");
                self.wait_until_replaced(primary);
                self.server(primary).signal("-CONT");
            }
            Restart => {
                if let Self::One(server) = self {
                    server.restart();
                }
            }
            FailOver | HandOver => {
                match self {
                    Self::One(_) => {}
                    Self::Sentinel(fleet) => fleet.fail_over(),
                    Self::Cluster(cluster) => cluster.hand_over(primary),
                }
                self.wait_until_replaced(primary);
            }
            Kill => {
                match self {
                    Self::One(_) => {}
                    Self::Sentinel(fleet) => fleet.kill(primary),
                    Self::Cluster(cluster) => cluster.kill(primary),
                }
                self.wait_until_replaced(primary);
                match self {
                    Self::One(_) => {}
                    Self::Sentinel(fleet) => fleet.start_again(primary),
                    Self::Cluster(cluster) => cluster.start_again(primary),
                }
            }
        }
        match self {
            Self::One(_) => {}
            Self::Sentinel(fleet) => fleet.wait_until_whole(),
            Self::Cluster(cluster) => cluster.wait_until_whole(),
        }
        // A machine so busy that a short freeze is a long one has failed over.
        event.loses_counts() || event != HandOver && self.primaries() != before
    }

    fn wait_until_replaced(&self, primary: usize) {
        block_until("another primary", || match self {
            Self::One(_) => true,
            Self::Sentinel(fleet) => fleet.primary().is_some_and(|at| at != primary),
            Self::Cluster(cluster) => is_primary(cluster.node(cluster.partner_of(primary))),
        });
    }

    fn primaries(&self) -> Vec<usize> {
        match self {
            Self::One(_) => vec![0],
            Self::Sentinel(fleet) => fleet.primary().into_iter().collect(),
            Self::Cluster(cluster) => (0..cluster.nodes().len()).filter(|at| is_primary(cluster.node(*at))).collect(),
        }
    }

    fn server(&self, at: usize) -> &Server {
        match self {
            Self::One(server) => server,
            Self::Sentinel(fleet) => fleet.server(at),
            Self::Cluster(cluster) => cluster.node(at),
        }
    }
}

fn is_primary(server: &Server) -> bool {
    command_text(server, &["INFO", "replication"]).contains("role:master")
}
