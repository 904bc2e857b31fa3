//! Servers that belong together: a cluster, and a primary with replicas under sentinels. Each is a redis-server of the
//! test's own on loopback, and ends with the test.

mod cluster;
mod sentinels;

use std::time::{Duration, Instant};

use tollgate::redis::{Client, RedisResult, Value, cmd};

pub(crate) use cluster::ClusterServers;
pub(crate) use sentinels::Sentinels;

use crate::certificates::Papers;
use crate::server::{Server, spawn};

/// No machine is so slow that servers of one host take longer to agree.
const PATIENCE: Duration = Duration::from_secs(30);

/// How servers differ from those that talk to everybody, and plainly.
#[derive(Default)]
pub(crate) struct Setup {
    /// They talk by TLS alone, to each other too, and show these.
    pub(crate) papers: Option<Papers>,
    /// What primaries and replicas want to hear from everybody, each other included.
    pub(crate) password: Option<&'static str>,
    /// What Sentinels want to hear.
    pub(crate) of_sentinels: Option<&'static str>,
}

impl Setup {
    #[cfg(feature = "tls")]
    pub(crate) fn by_tls(papers: Papers) -> Self {
        Self { papers: Some(papers), ..Self::default() }
    }

    fn of_sentinel(&self, port: u16) -> Vec<String> {
        self.papers.as_ref().map(|papers| papers.alone_at(port)).unwrap_or_default()
    }

    fn of_server(&self, port: u16) -> Vec<String> {
        let password = self.password.iter().flat_map(|word| ["--requirepass", word, "--masterauth", word]);
        self.of_sentinel(port).into_iter().chain(password.map(str::to_owned)).collect()
    }

    fn scheme(&self) -> &'static str {
        if self.papers.is_some() { "rediss" } else { "redis" }
    }
}

/// Starts one with these options and those of the setup.
fn server(setup: &Setup, options: &[&str]) -> Server {
    let start = |directory: &_, port| spawn(directory, port, &words(options, &setup.of_server(port)));
    Server::launched(start).known_by(setup.password)
}

fn words<'a>(own: &[&'a str], of_setup: &'a [String]) -> Vec<&'a str> {
    own.iter().copied().chain(of_setup.iter().map(String::as_str)).collect()
}

/// Waits until this holds, which servers tell nobody.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What this one answers, which may be dead or frozen.
pub(crate) fn asked(server: &Server, words: &[&str]) -> RedisResult<Value> {
    const SOON: Duration = Duration::from_millis(500);
    let mut connection = Client::open(server.url())?.get_connection_with_timeout(SOON)?;
    connection.set_read_timeout(Some(SOON))?;
    cmd(words[0]).arg(&words[1..]).query(&mut connection)
}

/// The same as text; empty where it doesn't answer.
pub(crate) fn told(server: &Server, words: &[&str]) -> String {
    asked(server, words).ok().and_then(|value| tollgate::redis::from_redis_value(value).ok()).unwrap_or_default()
}

/// The same where it must be done.
pub(crate) fn ordered(server: &Server, words: &[&str]) -> Value {
    asked(server, words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}
