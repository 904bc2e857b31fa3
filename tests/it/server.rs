//! A redis-server of a test's own: in a temporary directory, on a unix socket, stopped when the test ends.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::redis::{self, Client, Connection};

pub(crate) struct Server {
    process: Child,
    directory: TempDir,
    port: u16,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// With further options, as on redis-server's command line.
    pub(crate) fn with(options: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let port = free_port();
        let process = spawn(&directory, port, options);
        let server = Self { process, directory, port };
        server.wait_until_it_answers();
        server
    }

    /// Stops it and starts an empty one in its place.
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.process = spawn(&self.directory, self.port, &[]);
        self.wait_until_it_answers();
    }

    fn stop(&mut self) {
        self.process.kill().expect("the server was running");
        self.process.wait().expect("the server ends when killed");
    }

    pub(crate) fn url(&self) -> String {
        format!("unix://{}", self.socket())
    }

    /// The same server by TCP.
    pub(crate) fn tcp_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    fn socket(&self) -> String {
        format!("{}/redis.sock", self.directory.path().display())
    }

    /// A connection for looking behind the scenes.
    pub(crate) fn connection(&self) -> Connection {
        Client::open(self.url()).and_then(|client| client.get_connection()).expect("the server answers")
    }

    fn wait_until_it_answers(&self) {
        let started = Instant::now();
        let client = Client::open(self.url()).expect("an address");
        loop {
            let answer =
                client.get_connection().and_then(|mut connection| redis::cmd("PING").query::<String>(&mut connection));
            match answer {
                Ok(_) => return,
                Err(error) if error.code() == Some("NOAUTH") => return,
                Err(_) if started.elapsed() < Duration::from_secs(20) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => panic!("redis-server does not answer: {error}"),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn spawn(directory: &TempDir, port: u16, options: &[&str]) -> Child {
    Command::new("redis-server")
        .current_dir(directory)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--unixsocket", "redis.sock"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server 7.0 or newer on the PATH: tests/run.sh installs it")
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}
