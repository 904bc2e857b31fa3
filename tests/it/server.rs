//! A redis-server of a test's own: in a temporary directory, on a unix socket, stopped when the test ends.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::redis::{self, Client, Connection, cmd};

pub(crate) struct Server {
    process: Child,
    directory: TempDir,
    port: u16,
    /// What it wants to know of who looks behind the scenes.
    password: Option<String>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// With further options, as on redis-server's command line.
    pub(crate) fn with(options: &[&str]) -> Self {
        Self::launched(|directory, port| spawn(directory, port, options))
    }

    /// By this configuration file, but for where it listens.
    pub(crate) fn with_file(file: &str) -> Self {
        Self::launched(|directory, port| launch(directory, port, &[file], &[]))
    }

    /// By the configuration that this writes into its directory, which it may rewrite.
    pub(crate) fn with_text(text: &str, options: impl Fn(u16) -> Vec<String>) -> Self {
        Self::launched(|directory, port| {
            std::fs::write(directory.path().join("own.conf"), text).expect("a file");
            let options = options(port);
            launch(directory, port, &["own.conf"], &options.iter().map(String::as_str).collect::<Vec<_>>())
        })
    }

    /// Looked behind by this password, if any.
    pub(crate) fn known_by(mut self, password: Option<&str>) -> Self {
        self.password = password.map(str::to_owned);
        self
    }

    /// On another port where somebody else was quicker to take the one that was free, or one that an option names.
    pub(crate) fn launched(launch: impl Fn(&TempDir, u16) -> Child) -> Self {
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
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.start_again(&[]);
        self.wait_until_it_answers();
    }

    /// Starts one in the place of one that was stopped, on what that left on its disk.
    pub(crate) fn start_again(&mut self, options: &[&str]) {
        self.process = spawn(&self.directory, self.port, options);
    }

    /// Where it listens by TCP.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Where it keeps what it writes.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Kills it.
    pub(crate) fn stop(&mut self) {
        self.process.kill().expect("the server was running");
        self.process.wait().expect("the server ends when killed");
    }

    pub(crate) fn url(&self) -> String {
        let password = self.password.as_ref().map(|password| format!("?pass={password}")).unwrap_or_default();
        format!("unix://{}{password}", self.socket())
    }

    /// The same server by TCP.
    pub(crate) fn tcp_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends it a signal by kill's name for it, such as `-STOP`.
    pub(crate) fn signal(&self, signal: &str) {
        let done = Command::new("kill").arg(signal).arg(self.process.id().to_string()).status();
        assert!(done.expect("kill runs").success());
    }

    /// Makes a user, and the address to be that user by.
    pub(crate) fn user(&self, name: &str, rights: &str) -> String {
        let mut command = cmd("ACL");
        command.arg("SETUSER").arg(name).arg("reset").arg("on").arg(">sesame");
        command.arg(rights.split_whitespace().collect::<Vec<_>>());
        command.exec(&mut self.connection()).expect("a user");
        self.tcp_url().replace("redis://", &format!("redis://{name}:sesame@"))
    }

    pub(crate) fn forget_commands(&self) {
        cmd("CONFIG").arg("RESETSTAT").exec(&mut self.connection()).expect("reset");
    }

    /// How often each command was called since they were forgotten, and how often it failed. Without CLIENT SETINFO, by
    /// which each connection tells its name to servers that know the command, this test's own too.
    pub(crate) fn commands(&self) -> HashMap<String, (u64, u64)> {
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

    /// A connection for looking behind the scenes.
    pub(crate) fn connection(&self) -> Connection {
        Client::open(self.url()).and_then(|client| client.get_connection()).expect("the server answers")
    }

    pub(crate) fn wait_until_it_answers(&self) {
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

/// Waits until a server answers here, or it is over.
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

pub(crate) fn spawn(directory: &TempDir, port: u16, options: &[&str]) -> Child {
    launch(directory, port, &[], &[&["--save", "", "--appendonly", "no", "--daemonize", "no"], options].concat())
}

fn launch(directory: &TempDir, port: u16, file: &[&str], options: &[&str]) -> Child {
    Command::new("redis-server")
        .current_dir(directory)
        .args(file)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--unixsocket", "redis.sock"])
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

/// The address of a server that answers HELLO with this, and everything else with OK.
pub(crate) fn fake_server(hello: &'static str) -> String {
    answering(move |words| {
        let reply = if words[0].eq_ignore_ascii_case(b"HELLO") { hello } else { "+OK\r\n" };
        Some(reply.into())
    })
}

/// The address of a server that answers each request with what this makes of its words, and hangs up where that is
/// nothing.
pub(crate) fn answering(answer: impl Fn(&[Vec<u8>]) -> Option<Vec<u8>> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut replies, answer) = (client.expect("a client"), Arc::clone(&answer));
            std::thread::spawn(move || {
                let mut requests = BufReader::new(replies.try_clone().expect("a second handle"));
                while let Some(reply) = request(&mut requests).and_then(|words| answer(&words)) {
                    if replies.write_all(&reply).is_err() {
                        break;
                    }
                }
                let _ = replies.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    format!("redis://{address}")
}

/// The words of the next request; none when the client has gone.
fn request(from: &mut impl BufRead) -> Option<Vec<Vec<u8>>> {
    let words = number(from)?;
    let word = |_| {
        let mut word = vec![0; number(from)? + 2];
        from.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        Some(word)
    };
    (0..words).map(word).collect()
}

/// The number in a line such as `*3` or `$5`.
fn number(from: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    from.read_line(&mut line).ok()?;
    line.get(1..)?.trim_end().parse().ok()
}
