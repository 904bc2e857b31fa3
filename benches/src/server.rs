//! The run's own Redis servers.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
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
