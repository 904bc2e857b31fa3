//! PostgreSQL by TLS: when it is used, which certificates the client trusts, which it presents, and the errors.

use std::io::Read;
use std::net::TcpListener;
use std::time::Duration;

use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, PKCS_RSA_SHA512};
use tollgate::rules::RuleSet;
use tollgate::{Embedded, Limiter, Tls};
use tollgate_record::{Configuration, Postgres as Database, PostgresError};
use tollgate_testing::certificates::Authority;
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::rules::rule_set_of_one;

/// Whom the server lets in by TLS alone.
const LIMITER: &str = "hostssl all limiter all trust";

/// One that anybody may use by TLS, whose certificate is for this host.
async fn started_for(host: &str, authority: &Authority) -> PostgresServer {
    PostgresServer::start_by_tls(&authority.signs(&[host]), authority, LIMITER).await
}

fn url(server: &PostgresServer) -> String {
    server.url_of("limiter:sesame", "postgres")
}

fn by_tls(server: &PostgresServer, tls: &Tls) -> Database {
    Database::open_with_tls(&url(server), tls).expect("an address")
}

/// What comes of the first connection, which must be nothing, said in one line.
async fn refused(database: &Database) -> PostgresError {
    let error = database.schema().await.map(|_| ()).expect_err("no connection");
    let message = error.to_string();
    assert!(message.starts_with(&format!("postgres at {}: ", database.address())), "{message}");
    assert!(message.lines().count() == 1 && !message.contains("sesame"), "{message}");
    assert!(!format!("{error:?}").contains("sesame"));
    error
}

/// Whether each connection of tollgate's is one of TLS.
async fn connections(server: &PostgresServer) -> Vec<String> {
    let of = "pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'tollgate'";
    server.run(&format!("SELECT ssl FROM {of}")).await
}

async fn until_in_force(rules: &Configuration, limit: &str) {
    let first = |rules: RuleSet| rules.definitions().first().map(|rule| rule.limits[0].limit.clone());
    wait_until(limit, async || first(rules.rules()).as_deref() == Some(limit)).await;
}

#[tokio::test]
async fn rules_are_written_and_followed_by_tls_and_each_new_connection_is_verified() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let mut server = started_for("127.0.0.1", &ours).await;
    let database = by_tls(&server, &ours.trusted());
    database.migrate().await.expect("made");
    database.push_rules(&rule_set_of_one("gcra 1/1s"), "").await.expect("pushed");
    let rules = database.follow(&Limiter::new(Embedded::new())).await.expect("rules");
    database.push_rules(&rule_set_of_one("gcra 2/1s"), "").await.expect("pushed");
    until_in_force(&rules, "gcra 2/1s").await;
    let all = connections(&server).await;
    assert!(all.len() >= 2 && all.iter().all(|ssl| ssl == "t"), "the pool's and the follower's: {all:?}");

    // Somebody else at the same address.
    server.stop();
    server.shows(&theirs.signs(&["127.0.0.1"]));
    server.start_again();
    wait_until("noticed", async || !rules.status().is_connected).await;
    assert!(refused(&database).await.to_string().contains("UnknownIssuer"));
    server.run("UPDATE tollgate.rate_limit_rules SET enabled = false").await;
    // Time enough to connect several times.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!rules.status().is_connected && rules.rules().len() == 1 && connections(&server).await.is_empty());

    server.stop();
    server.shows(&ours.signs(&["127.0.0.1"]));
    server.start_again();
    database.push_rules(&rule_set_of_one("gcra 3/1s"), "").await.expect("pushed");
    until_in_force(&rules, "gcra 3/1s").await;
    wait_until("connected", async || rules.status().is_connected).await;
}

#[tokio::test]
async fn a_certificate_by_an_unknown_authority_or_for_another_host_is_refused() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let server = started_for("127.0.0.1", &theirs).await;
    let platforms = Database::open(&format!("{}?sslmode=require", url(&server))).expect("an address");
    for database in [by_tls(&server, &ours.trusted()), by_tls(&server, &Tls::new()), platforms] {
        let error = refused(&database).await;
        assert!(error.is_unreachable() && error.to_string().contains("UnknownIssuer"), "{error}");
    }
    let elsewhere = started_for("db.example.com", &ours).await;
    let error = refused(&by_tls(&elsewhere, &ours.trusted())).await;
    let message = error.to_string();
    assert!(error.is_unreachable() && message.contains("not valid for name"), "{message}");
    assert!(message.contains("127.0.0.1") && message.contains("db.example.com"), "{message}");
    // Where the address says both, it is the name that counts.
    let named =
        format!("host=db.example.com hostaddr=127.0.0.1 port={} user=limiter dbname=postgres", elsewhere.port());
    let named = Database::open_with_tls(&named, &ours.trusted()).expect("an address");
    assert!(!named.schema().await.expect("an answer").is_complete());
}

#[tokio::test]
async fn no_password_is_sent_to_a_server_without_tls() {
    let server = PostgresServer::start();
    let required = Database::open(&format!("{}?sslmode=require", server.url())).expect("an address");
    let offered = Database::open_with_tls(&server.url(), &Tls::new()).expect("an address");
    for database in [required, offered] {
        let error = refused(&database).await;
        assert!(error.is_unreachable() && error.to_string().ends_with(": server does not support TLS"), "{error}");
    }
}

#[tokio::test]
async fn a_server_that_requires_client_certificates_is_shown_one() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    // The name in the certificate must be the user's.
    let server = PostgresServer::start_by_tls(&ours.signs(&["127.0.0.1"]), &ours, "hostssl all limiter all cert").await;
    let shown = by_tls(&server, &ours.trusted_by(&ours));
    assert!(!shown.schema().await.expect("an answer").is_complete());
    let error = refused(&by_tls(&server, &ours.trusted())).await;
    assert!(error.to_string().contains("valid client certificate (SQLSTATE 28000)"), "{error}");
    assert!(!error.is_unreachable() && !error.is_input() && !error.is_schema(), "as a wrong password: {error:?}");
    // The server closes as it says why, so its reason may be lost.
    let error = refused(&by_tls(&server, &ours.trusted_by(&theirs))).await;
    assert!(error.is_unreachable(), "{error:?}");
}

/// Debian's servers speak TLS with a certificate that no client trusts: connections that don't require TLS don't use
/// it.
#[tokio::test]
async fn tls_is_used_only_where_it_is_required() {
    let authority = Authority::new("ours");
    let server = PostgresServer::start_by_tls(&authority.itself(), &authority, "host all limiter all trust").await;
    for mode in ["", "?sslmode=prefer", "?sslmode=disable", "?sslmode=prefer&sslnegotiation=direct"] {
        let database = Database::open(&(url(&server) + mode)).expect("an address");
        database.migrate().await.expect(mode);
        let rules = database.follow(&Limiter::new(Embedded::new())).await.expect(mode);
        wait_until(mode, async || connections(&server).await.len() >= 2).await;
        assert!(connections(&server).await.iter().all(|ssl| ssl == "f"), "{mode}");
        drop((database, rules));
        wait_until("closed", async || connections(&server).await.is_empty()).await;
    }
    let tls = authority.trusted();
    for (error, expected) in [
        (Database::open_with_tls(&(url(&server) + "?sslmode=disable"), &tls), "for TLS, got sslmode=disable"),
        (Database::open_with_tls("host=/run/postgresql password=sesame", &tls), "for TLS, got a Unix socket"),
        (Database::open("host=127.0.0.1,/run password=sesame sslmode=require"), "for TLS, got a Unix socket"),
        (Database::open(&(url(&server) + "?sslmode=verify-full")), "as libpq's verify-full does, or disable"),
    ] {
        let error = error.expect_err(expected);
        let message = error.to_string();
        assert!(
            error.is_input() && message.starts_with("postgres: expected ") && message.ends_with(expected),
            "{error}"
        );
        assert!(!message.contains("sesame") && !message.contains('\n'), "{message}");
    }
    for mode in ["", "?sslmode=prefer", "?sslmode=require"] {
        let database = Database::open_with_tls(&(url(&server) + mode), &tls).expect("an address");
        assert!(refused(&database).await.to_string().contains("CaUsedAsEndEntity"), "{mode}");
    }
}

/// The password's proof holds the certificate's hash, which the server makes by its own rules.
#[tokio::test]
async fn a_password_is_bound_to_the_connection() {
    let ours = Authority::new("ours");
    let mut server =
        PostgresServer::start_by_tls(&ours.signs(&["127.0.0.1"]), &ours, "hostssl all limiter all scram-sha-256").await;
    for (algorithm, binds) in [
        (&PKCS_ECDSA_P256_SHA256, true),
        (&PKCS_ECDSA_P384_SHA384, true),
        (&PKCS_RSA_SHA256, true),
        (&PKCS_RSA_SHA512, true),
        // For which there is no such hash.
        (&PKCS_ED25519, false),
    ] {
        let authority = Authority::signing_by("theirs", algorithm);
        server.stop();
        server.shows(&authority.signs(&["127.0.0.1"]));
        server.start_again();
        let at = |parameters: &str| {
            let url = format!("{}?{parameters}", url(&server));
            Database::open_with_tls(&url, &authority.trusted()).expect("an address")
        };
        assert!(at("channel_binding=prefer").schema().await.is_ok(), "{algorithm:?}");
        let bound = at("channel_binding=require");
        if binds {
            bound.schema().await.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
        } else {
            refused(&bound).await;
        }
    }
}

/// `sslnegotiation=direct` is PostgreSQL 17's: TLS at once, and the protocol named in the first message, which is in
/// the clear.
#[tokio::test]
async fn a_connection_that_is_tls_from_its_first_byte_names_the_protocol() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut said = [0; 4096];
        let length = stream.read(&mut said).expect("its first message");
        said[..length].to_vec()
    });
    let url = format!("postgres://u:sesame@127.0.0.1:{port}/x?sslmode=require&sslnegotiation=direct");
    let error = refused(&Database::open(&url).expect("an address")).await;
    assert!(error.is_unreachable(), "{error}");
    let said = asked.join().expect("no panic");
    assert!(said[0] == 22 && said.windows(11).any(|part| part == b"\x0apostgresql"), "a handshake: {said:?}");
}
