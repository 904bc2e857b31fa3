//! The options that the servers of a cluster, or of a primary with its replicas and Sentinels, have in common. Each is
//! a redis-server of the test's own on loopback, and ends with the test.

use crate::certificates::{Authority, TlsFiles};
use crate::redis_server::{Server, spawn};

/// TLS and passwords: none by default.
#[derive(Default)]
pub struct ServerSetup {
    /// They listen by TLS alone, also among each other, with these certificates.
    pub tls_files: Option<TlsFiles>,
    /// The password of primaries and replicas, also among each other.
    pub password: Option<&'static str>,
    /// The password of the Sentinels.
    pub of_sentinels: Option<&'static str>,
}

impl ServerSetup {
    /// All of them require certificates of clients.
    pub fn by_tls(authority: &Authority) -> Self {
        let tls_files = TlsFiles::of(authority, authority.signs(&["127.0.0.1", "localhost"]), "yes");
        Self { tls_files: Some(tls_files), ..Self::default() }
    }

    pub(super) fn of_sentinel(&self, port: u16) -> Vec<String> {
        self.tls_files.as_ref().map(|tls_files| tls_files.alone_at(port)).unwrap_or_default()
    }

    pub(super) fn of_server(&self, port: u16) -> Vec<String> {
        let password = self.password.iter().flat_map(|word| ["--requirepass", word, "--masterauth", word]);
        self.of_sentinel(port).into_iter().chain(password.map(str::to_owned)).collect()
    }

    pub(super) fn scheme(&self) -> &'static str {
        if self.tls_files.is_some() { "rediss" } else { "redis" }
    }
}

/// Starts one with these options and those of the setup.
pub(super) fn server(setup: &ServerSetup, options: &[&str]) -> Server {
    let start = |directory: &_, port| spawn(directory, port, &words(options, &setup.of_server(port)));
    Server::launched(start).with_password(setup.password)
}

pub(super) fn words<'a>(own: &[&'a str], of_setup: &'a [String]) -> Vec<&'a str> {
    own.iter().copied().chain(of_setup.iter().map(String::as_str)).collect()
}
