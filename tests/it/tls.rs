//! Redis by TLS: which certificates the client trusts, which it presents, and the errors. Every test here needs a
//! server that speaks TLS, which not every build does; `tls_settings` has what needs none.

mod cluster_and_sentinels;

use tollgate::redis::cmd;
use tollgate::{Charged, Error, Limiter, Redis, Rule, Tls};

use crate::support::certificates::{Authority, Pair, TlsFiles};
use crate::support::polling::PATIENCE;
use crate::support::redis_server::{Server, free_port};
use crate::support::tool::{code, command, stderr, stdout};

/// A server that listens by TLS too, and the files that it was given.
struct Secured {
    server: Server,
    tls_files: TlsFiles,
    port: u16,
}

impl Secured {
    fn start(authority: &Authority, name: &str, clients: &'static str) -> Self {
        Self::showing(authority.signs(&[name]), authority, clients)
    }

    fn showing(pair: Pair, authority: &Authority, clients: &'static str) -> Self {
        let (tls_files, port) = (TlsFiles::of(authority, pair, clients), free_port());
        let options = tls_files.at(port);
        let server = Server::with(&options.iter().map(String::as_str).collect::<Vec<_>>());
        Self { server, tls_files, port }
    }

    fn url(&self) -> String {
        format!("rediss://127.0.0.1:{}", self.port)
    }

    fn limiter(&self, tls: &Tls) -> Limiter {
        Limiter::new(Redis::open_with_tls(&self.url(), tls).expect("a good address")).deadline(PATIENCE)
    }
}

async fn refused(limiter: &Limiter) -> Error {
    limiter.acquire(&rule(), "key").await.expect_err("no decision")
}

fn rule() -> Rule {
    crate::support::rules::rule("gcra 5/30d")
}

#[tokio::test]
async fn a_decision_by_tls_is_one_round_trip_too() {
    let authority = Authority::new("ours");
    let secured = Secured::start(&authority, "127.0.0.1", "no");
    let limiter = secured.limiter(&authority.trusted());
    assert_eq!(limiter.acquire(&rule(), "key").await.expect("a decision").remaining, 4);
    let clients: String = cmd("CLIENT").arg("LIST").query(&mut secured.server.connection()).expect("a list");
    assert!(clients.contains(&format!("laddr=127.0.0.1:{} ", secured.port)), "{clients}");
    secured.server.reset_command_counts();
    for remaining in (0..4).rev() {
        assert_eq!(limiter.acquire(&rule(), "key").await.expect("a decision").remaining, remaining);
    }
    assert!(!limiter.acquire(&rule(), "key").await.expect("a decision").allowed);
    let commands = secured.server.commands();
    assert_eq!(commands["evalsha"], (5, 0));
    assert!(!commands.contains_key("ping") && !commands.contains_key("hello"), "{commands:?}");
}

#[tokio::test]
async fn a_certificate_by_an_unknown_authority_is_refused() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let secured = Secured::start(&theirs, "127.0.0.1", "no");
    let platforms = Limiter::new(Redis::open(&secured.url()).expect("a good address")).deadline(PATIENCE);
    for limiter in [secured.limiter(&ours.trusted()), secured.limiter(&Tls::new()), platforms] {
        let error = refused(&limiter).await;
        assert!(error.is_unreachable() && !error.is_deadline() && error.charged() == Charged::No, "{error:?}");
        let message = error.to_string();
        assert!(message.contains("UnknownIssuer") && message.contains(&secured.port.to_string()), "{message}");
    }
    let both = format!("{}{}", ours.pem(), theirs.pem());
    let both = secured.limiter(&Tls::new().authority(both.as_bytes()).expect("authorities"));
    assert!(both.acquire(&rule(), "key").await.expect("a decision").allowed);
}

#[tokio::test]
async fn a_certificate_for_another_host_is_refused() {
    let authority = Authority::new("ours");
    let secured = Secured::start(&authority, "redis.example.com", "no");
    let error = refused(&secured.limiter(&authority.trusted())).await;
    assert!(error.is_unreachable() && error.charged() == Charged::No, "{error:?}");
    let message = error.to_string();
    assert!(message.contains("not valid for name") && message.contains("redis.example.com"), "{message}");
}

#[tokio::test]
async fn an_authoritys_own_certificate_is_refused() {
    let authority = Authority::new("ours");
    let secured = Secured::showing(authority.itself(), &authority, "no");
    let error = refused(&secured.limiter(&authority.trusted())).await;
    assert!(error.is_unreachable() && error.to_string().contains("CaUsedAsEndEntity"), "{error:?}");
}

#[tokio::test]
async fn a_server_that_requires_client_certificates_is_shown_one() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let secured = Secured::start(&ours, "127.0.0.1", "yes");
    let limiter = secured.limiter(&ours.trusted_by(&ours));
    assert!(limiter.acquire(&rule(), "key").await.expect("a decision").allowed);
    for tls in [ours.trusted(), ours.trusted_by(&theirs)] {
        // The server closes as it says why, so its reason may be lost.
        let error = refused(&secured.limiter(&tls)).await;
        assert!(error.is_unreachable() && !error.is_deadline() && error.charged() == Charged::No, "{error:?}");
    }
}

#[test]
fn the_tool_decides_by_tls() {
    let authority = Authority::new("ours");
    let secured = Secured::start(&authority, "127.0.0.1", "yes");
    let Pair { certificate, key } = authority.signs(&["tool"]);
    for (file, text) in [("tool.pem", &certificate), ("tool.key", &key)] {
        secured.tls_files.write(file, text);
    }
    let (url, ca) = (secured.url(), secured.tls_files.file("ca.pem"));
    let (cert, key) = (secured.tls_files.file("tool.pem"), secured.tls_files.file("tool.key"));
    let probe = |options: &[&str]| {
        let mut command = command(&[&["probe", "gcra 5/30d", "key", "--deadline", "30s"], options].concat());
        for variable in ["TOLLGATE_TLS_CA", "TOLLGATE_TLS_CERT", "TOLLGATE_TLS_KEY"] {
            command.env_remove(variable);
        }
        command
    };
    let all = ["--url", &url, "--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key];
    let output = probe(&all).output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("\"remaining\":4") && stdout(&output).contains("\"by\":\"redis\""));

    let output = command(&[&["doctor", "--deadline", "30s"], &all[..]].concat()).output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));

    // The same by the environment, the authority as one of the platform's.
    let mut command = probe(&[]);
    command.env("TOLLGATE_URL", &url).env("SSL_CERT_FILE", &ca).env("TOLLGATE_TLS_CA", "");
    let output = command.env("TOLLGATE_TLS_CERT", &cert).env("TOLLGATE_TLS_KEY", &key).output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("\"remaining\":3"));

    let missing = secured.tls_files.file("missing.pem");
    for (options, told) in [
        (vec!["--url", &url, "--tls-ca", &missing], format!("--tls-ca {missing}: No such file")),
        (vec!["--url", &url, "--tls-ca", &key], format!("--tls-ca {key}: authority: expected")),
        (vec!["--url", &url, "--tls-cert", &cert, "--tls-key", &cert], format!("--tls-key {cert}: key: expected")),
        (vec!["--url", &url, "--tls-cert", &cert], "--tls-cert: expected --tls-key".into()),
        (vec!["--url", &url, "--tls-key", &key], "--tls-key: expected --tls-cert".into()),
        (vec!["--tls-ca", &ca], "expected --url rediss://".into()),
        (vec!["--url", "redis://127.0.0.1:1", "--tls-ca", &ca], "expected rediss://".into()),
        (vec!["--url", &url], "UnknownIssuer".into()),
    ] {
        let output = probe(&options).output().expect("the tool runs");
        let told_so = stderr(&output);
        assert_eq!(code(&output), 2, "{told_so}");
        assert!(told_so.contains(&told) && told_so.lines().count() == 1, "{told_so}");
        assert!(stdout(&output).is_empty() && !told_so.contains("PRIVATE"), "{told_so}");
    }
}
