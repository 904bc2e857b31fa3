//! Grants: the rights that the guide names suffice, and a service can change no configuration.

use tollgate::postgres::{KeyTerms, OwnLimits, Postgres as Database};
use tollgate::rules::Attributes;

use super::{limiter, prepared};
use crate::support::polling::wait_until;

#[tokio::test]
async fn a_service_needs_few_rights() {
    let (server, tool) = prepared().await;
    tool.set_user("1", Some("paid"), OwnLimits::default(), "").await.expect("set");
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    server
        .run(
            "CREATE ROLE service LOGIN;
            GRANT USAGE ON SCHEMA tollgate TO service;
            GRANT SELECT ON tollgate.configuration, tollgate.rate_limit_rules, tollgate.user_quotas, tollgate.api_keys,
                tollgate.deletions, tollgate.versions TO service;
            GRANT INSERT, UPDATE ON tollgate.user_quotas TO service;
            GRANT UPDATE (total, last_used_at) ON tollgate.api_keys TO service;
            GRANT SELECT, INSERT, UPDATE, DELETE ON tollgate.writers TO service",
        )
        .await;
    let as_service = Database::open(&server.url_of("service", "postgres")).expect("an address");
    let service = as_service.follow(&limiter()).await.expect("a configuration");
    let account = service.account_of_key(key.secret()).await.expect("valid");
    service.count(&Attributes::new().account(&account), true);
    service.count(&Attributes::new().user("1"), true);
    service.finish().await.expect("written");
    assert_eq!(tool.key(&stored.id).await.expect("an answer").expect("known").total, 1);
    tool.block_user("1", None, None, "").await.expect("blocked");
    wait_until("it is followed", async || service.account_of_user("1").is_some_and(|user| user.block().is_some()))
        .await;
    for error in [
        as_service.revoke_key(&stored.id, "").await.map(drop),
        as_service.create_key("1", &KeyTerms::default(), "").await.map(drop),
        as_service.unblock_user("1", "").await.map(drop),
        as_service.push_rules(&service.rules(), "").await.map(drop),
        as_service.migrate().await.map(drop),
    ] {
        let error = error.expect_err("no right");
        assert!(error.to_string().contains("permission denied") && error.to_string().contains("42501"), "{error}");
    }
}
