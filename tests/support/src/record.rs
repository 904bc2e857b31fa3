//! A system of record of a test's own, and what decides by it.

use tollgate::{Embedded, Limiter};
use tollgate_record::Postgres as Database;

use crate::postgres_server::PostgresServer;

pub fn database(server: &PostgresServer) -> Database {
    Database::open(&server.url()).expect("an address")
}

/// A server with the tables, and what a tool changes them by.
pub async fn prepared() -> (PostgresServer, Database) {
    let server = PostgresServer::start();
    let database = database(&server);
    database.migrate().await.expect("made");
    (server, database)
}

/// Without a Redis, so without a cache.
pub fn limiter() -> Limiter {
    Limiter::new(Embedded::new())
}

/// A rule, as in a file, that limits each user of the tier of its name.
pub fn rule_of_tier(name: &str, limit: &str) -> String {
    format!("[[rule]]\nname = \"{name}\"\nkey = \"user\"\nmatch = {{ tier = \"{name}\" }}\nlimits = [\"{limit}\"]\n")
}
