//! The run's own Redis servers.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use tollgate::redis::{Client, Connection, cmd};

/// Listens on loopback and on a Unix socket, persists nothing, and is stopped on drop.
#[derive(Debug)]
pub struct Server {
    process: Child,
    port: u16,
    directory: PathBuf,
}

/// A cluster of primaries without replicas; each has an equal share of the slots.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    pub fn start(primaries: u16) -> Self {
        let options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"];
        let nodes: Vec<_> = (0..primaries).map(|_| Server::with(&options)).collect();
        let mut connections: Vec<_> = nodes.iter().map(Server::connection).collect();
        for (number, connection) in (0..primaries).zip(&mut connections) {
            let slots = |number: u16| (u32::from(number) * 16_384 / u32::from(primaries)).to_string();
            let (first, next) = (slots(number), slots(number + 1));
            let last = (next.parse::<u32>().expect("a number") - 1).to_string();
            cmd("CLUSTER").arg(&["ADDSLOTSRANGE", &first, &last]).exec(connection).expect("slots");
            let other = nodes[0].port.to_string();
            cmd("CLUSTER").arg(&["MEET", "127.0.0.1", &other]).exec(connection).expect("met");
        }
        let well = |connection: &mut Connection| {
            let info: String = cmd("CLUSTER").arg("INFO").query(connection).expect("a state");
            info.contains("cluster_state:ok") && info.contains(&format!("cluster_known_nodes:{primaries}"))
        };
        let up = (0..400).any(|_| {
            sleep(Duration::from_millis(25));
            connections.iter_mut().all(well)
        });
        assert!(up, "the cluster didn't come up");
        Self { nodes }
    }

    /// Each node's address.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    pub fn url(&self) -> String {
        format!("redis-cluster://127.0.0.1:{}", self.nodes[0].port)
    }

    /// Moves the slots of the first of two nodes to the second, with their keys, one after the other until it is over.
    /// 64 of them are moving at any time, so that keys which they lack are looked for at the other node.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn move_slots(&self, over: &AtomicBool) {
        const AT_ONCE: usize = 64;
        let [first, second] = &self.nodes[..] else { panic!("expected two nodes") };
        let (port, mut from, mut to) = (second.port, first.connection(), second.connection());
        let [from_id, to_id]: [String; 2] =
            [&mut from, &mut to].map(|node| cmd("CLUSTER").arg("MYID").query(node).expect("an id"));
        let set = |node: &mut Connection, slot: u16, state: &str, id: &str| {
            cmd("CLUSTER").arg(&["SETSLOT", &slot.to_string(), state, id]).exec(node).expect("a slot's state");
        };
        let mut moving = VecDeque::new();
        let mut next = 0..16_384 / 2;
        loop {
            while moving.len() < AT_ONCE && !over.load(Ordering::Relaxed) {
                let Some(slot) = next.next() else { break };
                set(&mut to, slot, "IMPORTING", &from_id);
                set(&mut from, slot, "MIGRATING", &to_id);
                moving.push_back(slot);
            }
            let Some(slot) = moving.pop_front() else { break };
            loop {
                let keys = cmd("CLUSTER").arg("GETKEYSINSLOT").arg(slot).arg(100).query(&mut from);
                let keys: Vec<Vec<u8>> = keys.expect("keys");
                if keys.is_empty() {
                    break;
                }
                let mut migrate = cmd("MIGRATE");
                migrate.arg("127.0.0.1").arg(port).arg("").arg(0).arg(5000).arg("KEYS").arg(keys);
                migrate.exec(&mut from).expect("keys that were moved");
            }
            set(&mut to, slot, "NODE", &to_id);
            set(&mut from, slot, "NODE", &to_id);
        }
    }
}

/// A free port whose bus port, 10,000 above it, is free too.
fn free_port() -> u16 {
    let mut free = (0..100).filter_map(|_| {
        let port = TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok()?.port();
        TcpListener::bind(("127.0.0.1", port.checked_add(10_000)?)).ok().map(|_| port)
    });
    free.next().expect("a free port")
}

impl Server {
    pub fn start() -> Self {
        Self::with(&[])
    }

    pub fn with(options: &[&str]) -> Self {
        let port = free_port();
        let directory = std::env::temp_dir().join(format!("tollgate-benches-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a folder for redis-server");
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"])
            .arg(&directory)
            .arg("--unixsocket")
            .arg(directory.join("redis.sock"))
            .args(options)
            .stdout(Stdio::null())
            .spawn()
            .expect("expected redis-server on the PATH: install Redis 7.0 or newer");
        let server = Self { process, port, directory };
        let up = (0..200).any(|_| {
            sleep(Duration::from_millis(25));
            std::os::unix::net::UnixStream::connect(server.socket()).is_ok()
        });
        assert!(up, "redis-server didn't come up on port {port}");
        server
    }

    /// Sends its process this signal, such as STOP.
    ///
    /// # Panics
    /// If it can't be sent.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.process.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill -{name}");
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    fn connection(&self) -> Connection {
        Client::open(self.url()).and_then(|client| client.get_connection()).expect("a connection")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.join("redis.sock")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
