//! A redis-server of a test's own: in a temporary directory, on a unix socket, stopped when the test ends.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::redis::{self, Client, Connection, RedisResult, Value, cmd, from_redis_value};
use tollgate::{Limiter, Redis};

use crate::polling::PATIENCE;

/// A server keeps nothing on its disk unless a test says so.
const OWN: &[&str] = &["--save", "", "--appendonly", "no", "--daemonize", "no"];

pub struct Server {
    process: Child,
    directory: TempDir,
    port: u16,
    /// The password that the test's own connections give.
    password: Option<String>,
}

impl Server {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// With further options, as on redis-server's command line.
    pub fn with(options: &[&str]) -> Self {
        Self::launched(|directory, port| spawn(directory, port, options))
    }

    /// With further options, and variables of its environment.
    pub fn with_environment(options: &[&str], environment: &[(&str, &OsStr)]) -> Self {
        Self::launched(|directory, port| launch_with(directory, port, &[], &[OWN, options].concat(), environment))
    }

    /// With this configuration file; where it listens is set by options.
    pub fn with_file(file: &str) -> Self {
        Self::launched(|directory, port| launch(directory, port, &[file], &[]))
    }

    /// With a configuration file of this text in its own directory, which the server may rewrite.
    pub fn with_text(text: &str, options: impl Fn(u16) -> Vec<String>) -> Self {
        Self::launched(|directory, port| {
            std::fs::write(directory.path().join("own.conf"), text).expect("a file");
            let options = options(port);
            launch(directory, port, &["own.conf"], &options.iter().map(String::as_str).collect::<Vec<_>>())
        })
    }

    /// The test's own connections give this password, if any.
    pub fn with_password(mut self, password: Option<&str>) -> Self {
        self.password = password.map(str::to_owned);
        self
    }

    /// Tries another port if the free one, or one that an option names, has been taken since.
    pub fn launched(launch: impl Fn(&TempDir, u16) -> Child) -> Self {
        for _ in 0..5 {
            let directory = tempfile::tempdir().expect("a temporary directory");
            let port = free_port();
            let process = launch(&directory, port);
            let mut server = Self { process, directory, port, password: None };
            if server.comes_up() {
                return server;
            }
        }
        panic!("redis-server ends as soon as it is started");
    }

    /// Stops it and starts an empty one in its place.
    pub fn restart(&mut self) {
        self.stop();
        self.start_again(&[]);
        self.wait_until_it_answers();
    }

    /// Starts one in the place of one that was stopped, on what that left on its disk.
    pub fn start_again(&mut self, options: &[&str]) {
        self.process = spawn(&self.directory, self.port, options);
    }

    /// Where it listens by TCP.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where it keeps what it writes.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Kills it.
    pub fn stop(&mut self) {
        self.process.kill().expect("the server was running");
        self.process.wait().expect("the server ends when killed");
    }

    pub fn url(&self) -> String {
        let password = self.password.as_ref().map(|password| format!("?pass={password}")).unwrap_or_default();
        format!("unix://{}{password}", self.socket())
    }

    /// The address of the same server by TCP.
    pub fn tcp_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends it a signal by kill's name for it, such as `-STOP`.
    pub fn signal(&self, signal: &str) {
        let done = Command::new("kill").arg(signal).arg(self.process.id().to_string()).status();
        assert!(done.expect("kill runs").success());
    }

    /// Makes a user; returns the address to connect as that user.
    pub fn user(&self, name: &str, rights: &str) -> String {
        let mut command = cmd("ACL");
        command.arg("SETUSER").arg(name).arg("reset").arg("on").arg(">sesame");
        command.arg(rights.split_whitespace().collect::<Vec<_>>());
        command.exec(&mut self.connection()).expect("a user");
        self.tcp_url().replace("redis://", &format!("redis://{name}:sesame@"))
    }

    pub fn reset_command_counts(&self) {
        cmd("CONFIG").arg("RESETSTAT").exec(&mut self.connection()).expect("reset");
    }

    /// How often each command was called since the counts were reset, and how often it failed. CLIENT SETINFO is left
    /// out: every new connection sends it, this test's own too.
    pub fn commands(&self) -> HashMap<String, (u64, u64)> {
        let info: String = cmd("INFO").arg("commandstats").query(&mut self.connection()).expect("statistics");
        let number = |line: &str, name: &str| {
            let (_, rest) = line.split_once(name).unwrap_or_else(|| panic!("{name} in {line}"));
            rest.split([',', '\r']).next().and_then(|number| number.parse().ok()).expect("a number")
        };
        let lines = info.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(':'));
        let lines = lines.filter(|(name, _)| *name != "client|setinfo");
        lines.map(|(name, line)| (name.to_owned(), (number(line, "calls="), number(line, "failed_calls=")))).collect()
    }

    fn socket(&self) -> String {
        format!("{}/redis.sock", self.directory.path().display())
    }

    /// A connection of the test's own, past the limiter.
    pub fn connection(&self) -> Connection {
        Client::open(self.url()).and_then(|client| client.get_connection()).expect("the server answers")
    }

    pub fn wait_until_it_answers(&self) {
        answers_before(&self.url(), || false);
    }

    /// Whether it answers; if not, it has ended.
    fn comes_up(&mut self) -> bool {
        let (url, process) = (self.url(), &mut self.process);
        answers_before(&url, || process.try_wait().expect("a state").is_some())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Waits until a server answers here, or has ended.
fn answers_before(url: &str, mut over: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    let client = Client::open(url).expect("an address");
    loop {
        let answer =
            client.get_connection().and_then(|mut connection| redis::cmd("PING").query::<String>(&mut connection));
        match answer {
            Ok(_) => return true,
            Err(error) if error.code() == Some("NOAUTH") => return true,
            Err(_) if over() => return false,
            Err(_) if started.elapsed() < Duration::from_secs(20) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("redis-server does not answer: {error}"),
        }
    }
}

pub fn spawn(directory: &TempDir, port: u16, options: &[&str]) -> Child {
    launch(directory, port, &[], &[OWN, options].concat())
}

fn launch(directory: &TempDir, port: u16, file: &[&str], options: &[&str]) -> Child {
    launch_with(directory, port, file, options, &[])
}

fn launch_with(
    directory: &TempDir,
    port: u16,
    file: &[&str],
    options: &[&str],
    environment: &[(&str, &OsStr)],
) -> Child {
    Command::new("redis-server")
        .current_dir(directory)
        .args(file)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--unixsocket", "redis.sock"])
        .args(options)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server 7.0 or newer on the PATH: tests/run.sh installs it")
}

/// A limiter on the Redis at this address that waits for answers as long as any test: the machine may be busy.
pub fn patient(url: &str) -> Limiter {
    Limiter::builder(Redis::open(url).expect("a good address")).deadline(PATIENCE).build()
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// The reply to a command, or an error soon: the server may be dead or frozen.
pub fn try_command(server: &Server, words: &[&str]) -> RedisResult<Value> {
    reply_within(Duration::from_secs(2), server, words)
}

fn reply_within(patience: Duration, server: &Server, words: &[&str]) -> RedisResult<Value> {
    let mut connection = Client::open(server.url())?.get_connection_with_timeout(patience)?;
    connection.set_read_timeout(Some(patience))?;
    cmd(words[0]).arg(&words[1..]).query(&mut connection)
}

/// The reply as text; empty if there is none.
pub fn command_text(server: &Server, words: &[&str]) -> String {
    try_command(server, words).ok().and_then(|value| from_redis_value(value).ok()).unwrap_or_default()
}

/// The reply to a command that must succeed.
pub fn run_command(server: &Server, words: &[&str]) -> Value {
    reply_within(PATIENCE, server, words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}
