//! A redis-server that listens by TLS too.

use tollgate::{Limiter, Redis, Tls};

use crate::certificates::{Authority, Pair, TlsFiles};
use crate::polling::PATIENCE;
use crate::redis_server::{Server, free_port};

/// The server, and the files that it was given.
pub struct Secured {
    pub server: Server,
    pub tls_files: TlsFiles,
    pub port: u16,
}

impl Secured {
    pub fn start(authority: &Authority, name: &str, clients: &'static str) -> Self {
        Self::showing(authority.signs(&[name]), authority, clients)
    }

    pub fn showing(pair: Pair, authority: &Authority, clients: &'static str) -> Self {
        let (tls_files, port) = (TlsFiles::of(authority, pair, clients), free_port());
        let options = tls_files.at(port);
        let server = Server::with(&options.iter().map(String::as_str).collect::<Vec<_>>());
        Self { server, tls_files, port }
    }

    pub fn url(&self) -> String {
        format!("rediss://127.0.0.1:{}", self.port)
    }

    pub fn limiter(&self, tls: &Tls) -> Limiter {
        Limiter::builder(Redis::builder().tls(tls).open(&self.url()).expect("a good address"))
            .deadline(PATIENCE)
            .build()
    }
}
