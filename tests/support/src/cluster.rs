//! A Redis Cluster: three primaries, and a replica of each if it is wanted; or a single node.

use std::ops::Range;
use std::time::{Duration, Instant};

use tollgate::redis::from_redis_value;

use crate::polling::block_until;
use crate::redis_server::{Server, command_text, free_port, run_command, spawn, try_command};
use crate::server_setup::{ServerSetup, words};

const SLOTS: u16 = 16384;
const PRIMARIES: usize = 3;
/// How long a node may be silent before the others count it as failed, in milliseconds: longer than a busy machine
/// keeps one waiting, so that none is replaced that is well.
const NODE_TIMEOUT: &str = "15000";
/// The same where a test is about a node that is lost.
const SHORT_NODE_TIMEOUT: &str = "1000";

/// Nodes 0, 1 and 2 begin as primaries, each with a third of the slots; nodes 3, 4 and 5 as their replicas.
pub struct ClusterServers {
    nodes: Vec<Server>,
    /// Where the nodes talk to each other.
    buses: Vec<String>,
    ids: Vec<String>,
    setup: ServerSetup,
}

impl ClusterServers {
    pub fn start() -> Self {
        Self::of(2 * PRIMARIES, ServerSetup::default())
    }

    /// Without replicas: a primary that is lost isn't replaced.
    pub fn of_primaries() -> Self {
        Self::of_primaries_with(ServerSetup::default())
    }

    pub fn of_primaries_with(setup: ServerSetup) -> Self {
        Self::of(PRIMARIES, setup)
    }

    fn of(count: usize, setup: ServerSetup) -> Self {
        let (nodes, buses): (Vec<_>, Vec<_>) = (0..count).map(|_| node(&setup)).unzip();
        let id = |node| from_redis_value(run_command(node, &["CLUSTER", "MYID"])).expect("text");
        let ids = nodes.iter().map(id).collect();
        let cluster = Self { nodes, buses, ids, setup };
        // Before any of them knows another, which is when a node takes an epoch.
        for (at, node) in cluster.nodes.iter().enumerate() {
            run_command(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]);
        }
        for (at, node) in cluster.nodes.iter().enumerate() {
            if at < PRIMARIES {
                let Range { start, end } = first_slots(at);
                run_command(node, &["CLUSTER", "ADDSLOTSRANGE", &start.to_string(), &(end - 1).to_string()]);
            }
            for (other, bus) in cluster.nodes.iter().zip(&cluster.buses).skip(at + 1) {
                run_command(node, &["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string(), bus]);
            }
        }
        block_until("the nodes know each other", || cluster.on_each_node(|nodes| knows(nodes, &cluster.ids)));
        for (replica, primary) in cluster.nodes.iter().skip(PRIMARIES).zip(&cluster.ids) {
            run_command(replica, &["CLUSTER", "REPLICATE", primary]);
        }
        cluster.wait_until_whole();
        cluster
    }

    /// Waits until every slot is served, as every node knows, and replicas have caught up.
    pub fn wait_until_whole(&self) {
        block_until("the cluster is whole", || {
            let serves_all = |node| {
                let info = command_text(node, &["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
            };
            let replicas = self.nodes.len() - PRIMARIES;
            let is_synced = |node| {
                let info = command_text(node, &["INFO", "replication"]);
                info.contains("role:master") || info.contains("master_link_status:up")
            };
            self.nodes.iter().all(|node| serves_all(node) && is_synced(node))
                && self.on_each_node(|nodes| nodes.matches("slave").count() == replicas && !nodes.contains("fail"))
        });
    }

    /// With the addresses of all nodes.
    pub fn url(&self) -> String {
        let ports: Vec<_> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("{}-cluster://{}", self.setup.scheme(), ports.join(","))
    }

    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    pub fn node(&self, at: usize) -> &Server {
        &self.nodes[at]
    }

    pub fn kill(&mut self, at: usize) {
        self.replace_soon();
        self.nodes[at].stop();
    }

    /// Kills a primary under load and waits until its replica has taken over. It decides nothing between the last state
    /// that its replica has and its end, so that nobody is answered whose charge is lost.
    pub fn kill_without_loss(&self, primary: usize) {
        let (killed, replica) = (&self.nodes[primary], &self.nodes[self.partner_of(primary)]);
        run_command(killed, &["CLIENT", "PAUSE", "60000", "WRITE"]);
        block_until("the replica has everything", || {
            let info = command_text(killed, &["INFO", "replication"]);
            let offset = |after: &str| Some(info.split_once(after)?.1.split([',', '\r']).next()?.to_owned());
            offset("master_repl_offset:").is_some_and(|all| offset(",offset=") == Some(all))
        });
        killed.signal("-KILL");
        // Only now, so that the others are never taken for failed: it takes two primaries to say so.
        self.replace_soon();
        block_until("the replica takes over", || {
            command_text(replica, &["INFO", "replication"]).contains("role:master")
        });
    }

    /// From here on, a node that is silent for a second counts as failed. Before one is frozen.
    pub fn replace_soon(&self) {
        for node in &self.nodes {
            // Another may have been killed before.
            let _ = try_command(node, &["CONFIG", "SET", "cluster-node-timeout", SHORT_NODE_TIMEOUT]);
        }
    }

    /// Has the replica of a primary that is well take over from it, without loss.
    pub fn hand_over(&self, primary: usize) {
        // Redis gives up after five seconds.
        const ATTEMPT: Duration = Duration::from_secs(6);
        let replica = self.partner_of(primary);
        let mut begun: Option<Instant> = None;
        block_until("the replica takes over", || {
            if begun.is_none_or(|at| at.elapsed() > ATTEMPT) {
                let _ = try_command(&self.nodes[replica], &["CLUSTER", "FAILOVER"]);
                begun = Some(Instant::now());
            }
            command_text(&self.nodes[replica], &["INFO", "replication"]).contains("role:master")
        });
    }

    /// Starts one again that was killed, which is a replica then if another has taken its place.
    pub fn start_again(&mut self, at: usize) {
        let of_setup = self.setup.of_server(self.nodes[at].port());
        self.nodes[at].start_again(&words(&options(&self.buses[at]), &of_setup));
    }

    /// The node that has the same slots as this one: its replica, or its primary.
    pub fn partner_of(&self, at: usize) -> usize {
        (at + PRIMARIES) % self.nodes.len()
    }

    /// The slot of a key of Redis, or of a limiter's key, whose tag it is.
    pub fn slot_of(&self, key: &str) -> u16 {
        let answering = self.nodes.iter().find_map(|node| try_command(node, &["CLUSTER", "KEYSLOT", key]).ok());
        answering.and_then(|slot| from_redis_value(slot).ok()).expect("a node that answers")
    }

    /// The node that says that it serves this slot; none while there is none.
    pub fn primary_of(&self, slot: u16) -> Option<usize> {
        self.nodes.iter().position(|node| {
            let nodes = command_text(node, &["CLUSTER", "NODES"]);
            let own = nodes.lines().find(|line| line.contains("myself"));
            own.is_some_and(|line| line.contains("master") && serves(line, slot))
        })
    }

    /// This many limiter's keys in the slots that this node began with.
    pub fn keys_of(&self, primary: usize, count: usize) -> Vec<String> {
        let slots = first_slots(primary);
        let names = (0..).map(|number| format!("user-{number}"));
        names.filter(|name| slots.contains(&self.slot_of(name))).take(count).collect()
    }

    /// From here on, keys of the slot that aren't at the one are looked for at the other.
    pub fn begin_moving(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        run_command(&self.nodes[to], &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]]);
        run_command(&self.nodes[from], &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]]);
    }

    /// Moves the keys that are there now, and says how many.
    pub fn move_keys(&self, slot: u16, from: usize, to: usize) -> usize {
        let keys = run_command(&self.nodes[from], &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1000"]);
        let keys: Vec<String> = from_redis_value(keys).expect("keys");
        keys.iter().for_each(|key| self.move_key(key, from, to));
        keys.len()
    }

    pub fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.nodes[to].port().to_string();
        run_command(&self.nodes[from], &["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
    }

    /// The slot is the other's for good. Its new node first, so that it is never without one.
    pub fn finish_moving(&self, slot: u16, from: usize, to: usize) {
        let others = (0..self.nodes.len()).filter(|at| ![to, from].contains(at));
        for at in [to, from].into_iter().chain(others) {
            // Replicas learn it from their primaries.
            let words = ["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &self.ids[to]];
            let is_meant = [to, from].contains(&at);
            if is_meant {
                drop(run_command(&self.nodes[at], &words))
            } else {
                drop(try_command(&self.nodes[at], &words))
            }
        }
    }

    /// Waits until every node knows which slots this one has, and by which epoch: a replica that claims a slot of another
    /// primary's isn't elected, and asks again only after a minute; and a claim by an older epoch would lose later.
    pub fn wait_until_known(&self, at: usize) {
        let slots = |nodes: &str| {
            let line = nodes.lines().find(|line| line.starts_with(&self.ids[at])).unwrap_or_default().to_owned();
            let mut fields = line.split(' ').skip(6).map(str::to_owned);
            let epoch = fields.next();
            // The state of its link is each node's own, and slots that are being moved are in brackets.
            let slots: Vec<_> = fields.skip(1).filter(|slots| !slots.starts_with('[')).collect();
            (epoch, slots)
        };
        block_until("every node knows the slots", || {
            let own = slots(&command_text(&self.nodes[at], &["CLUSTER", "NODES"]));
            own.0.is_some() && self.on_each_node(|nodes| slots(nodes) == own)
        });
    }

    /// Makes this node announce that port, where a proxy to it is to listen.
    pub fn announce(&self, at: usize, port: u16) {
        run_command(&self.nodes[at], &["CONFIG", "SET", "cluster-announce-port", &port.to_string()]);
        let address = format!("127.0.0.1:{port}@");
        block_until("the nodes know the way", || self.on_each_node(|nodes| nodes.contains(&address)));
    }

    fn on_each_node(&self, holds: impl Fn(&str) -> bool) -> bool {
        self.nodes.iter().all(|node| holds(&command_text(node, &["CLUSTER", "NODES"])))
    }
}

/// A cluster of this one node, which has every slot.
pub fn cluster_of_one() -> Server {
    let (server, _) = node(&ServerSetup::default());
    run_command(&server, &["CLUSTER", "ADDSLOTSRANGE", "0", &(SLOTS - 1).to_string()]);
    block_until("the node serves every slot", || {
        command_text(&server, &["CLUSTER", "INFO"]).contains("cluster_state:ok")
    });
    server
}

/// Its address for clients.
pub fn cluster_url(of_one: &Server) -> String {
    format!("redis-cluster://127.0.0.1:{}", of_one.port())
}

/// A node, and the port of its own where other nodes talk to it.
fn node(setup: &ServerSetup) -> (Server, String) {
    let bus = std::cell::RefCell::default();
    let server = Server::launched(|directory, port| {
        *bus.borrow_mut() = free_port().to_string();
        spawn(directory, port, &words(&options(&bus.borrow()), &setup.of_server(port)))
    });
    (server.with_password(setup.password), bus.into_inner())
}

fn options(bus: &str) -> [&str; 14] {
    let [on, off] = ["yes", "no"];
    [
        ["--cluster-enabled", on],
        ["--cluster-port", bus],
        ["--cluster-node-timeout", NODE_TIMEOUT],
        ["--cluster-require-full-coverage", off],
        ["--cluster-replica-validity-factor", "0"],
        ["--cluster-allow-replica-migration", off],
        ["--repl-diskless-sync-delay", "0"],
    ]
    .as_flattened()
    .try_into()
    .expect("pairs")
}

fn first_slots(primary: usize) -> Range<u16> {
    let third = |number: usize| u16::try_from(number * usize::from(SLOTS) / PRIMARIES).expect("a slot");
    third(primary)..third(primary + 1)
}

/// Whether what CLUSTER NODES says has each of these, past their introduction.
fn knows(nodes: &str, ids: &[String]) -> bool {
    nodes.lines().count() == ids.len() && !nodes.contains("handshake") && ids.iter().all(|id| nodes.contains(id))
}

/// Whether a line of CLUSTER NODES has this slot, alone or in a range.
fn serves(line: &str, slot: u16) -> bool {
    line.split_whitespace().skip(8).any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let slots = first.parse::<u16>().ok().zip(last.parse::<u16>().ok());
        slots.is_some_and(|(first, last)| (first..=last).contains(&slot))
    })
}

#[test]
fn a_cluster_is_whole_moves_slots_and_replaces_its_primaries() {
    let mut cluster = ClusterServers::start();
    let slot = cluster.slot_of("user");
    let (from, to) = (cluster.primary_of(slot).expect("an owner"), 0);
    let to = if from == to { 1 } else { to };
    run_command(cluster.node(from), &["SET", "{user}", "1"]);
    cluster.begin_moving(slot, from, to);
    assert_eq!(cluster.move_keys(slot, from, to), 1);
    cluster.finish_moving(slot, from, to);
    assert_eq!(command_text(cluster.node(to), &["GET", "{user}"]), "1");
    assert_eq!(cluster.primary_of(slot), Some(to));
    cluster.kill(to);
    block_until("the replica takes over", || cluster.primary_of(slot) == Some(cluster.partner_of(to)));
    assert_eq!(command_text(cluster.node(cluster.partner_of(to)), &["GET", "{user}"]), "1");
    cluster.start_again(to);
    cluster.wait_until_whole();
}
