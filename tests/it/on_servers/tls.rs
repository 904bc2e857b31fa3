//! Redis by TLS: which certificates the client trusts, which it presents, and the errors. Every test here needs a
//! server that speaks TLS, which not every build does; `tls_settings` has what needs none.

mod cluster_and_sentinels;

use tollgate::redis::cmd;
use tollgate::{Charged, Error, ErrorKind, Limiter, Redis, Rule, Tls};
use tollgate_testing::certificates::Authority;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::tls_server::Secured;

async fn refused(limiter: &Limiter) -> Error {
    limiter.acquire(&rule(), "key").await.expect_err("no decision")
}

fn rule() -> Rule {
    tollgate_testing::rules::rule("gcra 5/30d")
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
    assert!(!commands.contains_key("ping"), "{commands:?}");
}

#[tokio::test]
async fn a_certificate_by_an_unknown_authority_is_refused() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let secured = Secured::start(&theirs, "127.0.0.1", "no");
    let platforms = Limiter::builder(Redis::open(&secured.url()).expect("a good address")).deadline(PATIENCE).build();
    for limiter in [secured.limiter(&ours.trusted()), secured.limiter(&Tls::new()), platforms] {
        let error = refused(&limiter).await;
        assert!(
            error.is_unreachable() && error.kind() != ErrorKind::Deadline && error.charged() == Charged::No,
            "{error:?}"
        );
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
        assert!(
            error.is_unreachable() && error.kind() != ErrorKind::Deadline && error.charged() == Charged::No,
            "{error:?}"
        );
    }
}
