//! A redis-server of the run's own.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Listens on loopback and on a unix socket, keeps nothing, and is stopped when dropped.
#[derive(Debug)]
pub struct Server {
    process: Child,
    port: u16,
    directory: PathBuf,
}

impl Server {
    pub fn start() -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
        let port = free.port();
        let directory = std::env::temp_dir().join(format!("tollgate-benches-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a folder for redis-server");
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"])
            .arg(&directory)
            .arg("--unixsocket")
            .arg(directory.join("redis.sock"))
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

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
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
