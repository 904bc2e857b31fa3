//! API keys: made, looked up, rotated and revoked, in every process.

use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::http::{HeaderName, Request, Response};
use futures_util::future::join_all;
use tollgate::middleware::{ApiKeyLayer, RateLimitLayer};
use tollgate::rules::{Account, ApiKeyError, RuleSet};
use tollgate_record::{KeyTerms, OwnLimits};
use tollgate_testing::api_keys::Forger;
use tollgate_testing::polling::wait_until;
use tollgate_testing::record::{database, limiter, prepared};
use tollgate_testing::redis_server::{Server, patient};
use tower::{Layer, ServiceExt, service_fn};

fn terms(name: &str) -> KeyTerms {
    let mut terms = KeyTerms::default();
    terms.name = name.to_owned();
    terms
}

#[tokio::test]
async fn a_key_identifies_its_user_until_it_is_revoked() {
    let redis = Server::start();
    let (mut server, tool) = prepared().await;
    let forger = Forger::of(&server).await;
    let mut paid = terms("backend");
    paid.tier = Some("paid".to_owned());
    let (key, stored) = tool.create_key("42", &paid, "me").await.expect("made");
    assert!(stored.is_valid() && (stored.user.as_str(), stored.terms.name.as_str()) == ("42", "backend"));
    assert!(key.secret().starts_with(&format!("tg_{}_", stored.id)) && key.secret().len() == 46);
    assert!(!format!("{key:?}{stored:?}").contains(key.secret()));
    let mut services = Vec::new();
    for _ in 0..2 {
        let limiter = patient(&redis.tcp_url());
        services.push(database(&server).follow(&limiter).await.expect("a configuration"));
    }
    for service in &services {
        let account = service.account_of_key(key.secret()).await.expect("valid");
        assert_eq!((account.user(), account.key_id(), account.paid_tier()), ("42", Some(&*stored.id), Some("paid")));
    }
    // The second process has found it in Redis.
    let look_ups = |at: usize| services[at].status().key_look_ups;
    wait_until("it is cached", async || services[1].account_of_key(key.secret()).await.is_ok()).await;
    assert_eq!(look_ups(0), 1);
    // Another secret of the same id, also with a right checksum, is none.
    let mut forged = key.secret()[..40].to_owned();
    forged.replace_range(20..21, if &forged[20..21] == "x" { "y" } else { "x" });
    let before = (look_ups(0), look_ups(1));
    for (sent, expected) in [
        (forger.whole(forged.clone()), ApiKeyError::Unknown),
        (format!("{forged}000000"), ApiKeyError::Malformed),
        (key.secret()[..45].to_owned(), ApiKeyError::Malformed),
        (String::new(), ApiKeyError::Malformed),
        (key.secret().replace('_', "\0"), ApiKeyError::Malformed),
        (key.secret().replace('_', "\u{202e}"), ApiKeyError::Malformed),
        ("x".repeat(1 << 20), ApiKeyError::Malformed),
    ] {
        assert_eq!(services[0].account_of_key(&sent).await.expect_err("not valid"), expected);
    }
    assert_eq!(services[0].account_of_key([0xff; 46]).await.expect_err("no text"), ApiKeyError::Malformed);
    assert_eq!((look_ups(0), look_ups(1)), before, "none of them is looked up");
    // What the user is denied, the key is.
    tool.block_user("42", None, None, "").await.expect("blocked");
    wait_until("the user is blocked", async || {
        join_all(services.iter().map(|service| service.account_of_key(key.secret())))
            .await
            .iter()
            .all(|account| account.as_ref().is_ok_and(|account| account.block().is_some()))
    })
    .await;
    // Revoked after PostgreSQL was unreachable.
    server.stop();
    wait_until("PostgreSQL is missed", async || services.iter().all(|service| !service.status().is_connected)).await;
    assert!(services[0].account_of_key(key.secret()).await.is_ok());
    server.start_again();
    let revoked = tool.revoke_key(key.secret(), "me").await.expect("revoked");
    assert!(!revoked.is_valid() && revoked.revoked_by.as_deref() == Some("me"));
    let took = wait_until("the key is revoked everywhere", async || {
        let all = join_all(services.iter().map(|service| service.account_of_key(key.secret()))).await;
        all.iter().all(|account| matches!(account, Err(ApiKeyError::Revoked)))
    })
    .await;
    println!("revoked after {took:?}");
    assert_eq!(tool.revoke_key(&stored.id, "you").await.expect("again").revoked_by.as_deref(), Some("me"));
    // Nothing of the key stands anywhere.
    let all = server.run("SELECT row_to_json(k)::text FROM tollgate.api_keys AS k").await.concat();
    assert!(all.contains(&stored.id) && !all.contains(&key.secret()[16..40]), "{all}");
}

/// A key that was looked up before it was made is valid once it is made.
#[tokio::test]
async fn an_unknown_key_is_remembered_as_unknown_until_it_is_made() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let limiter = patient(&redis.tcp_url());
    let service = database(&server).follow(&limiter).await.expect("a configuration");
    let asked = Forger::of(&server).await.unknown(7);
    let answers = join_all((0..200).map(|_| service.account_of_key(&asked))).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(ApiKeyError::Unknown))), "{:?}", answers[0]);
    assert_eq!(service.status().key_look_ups, 1, "one look-up of a key at a time, and its answer is remembered");
    for _ in 0..50 {
        assert_eq!(service.account_of_key(&asked).await.expect_err("none"), ApiKeyError::Unknown);
    }
    assert_eq!(service.status().key_look_ups, 1);
    // Another process knows by Redis.
    wait_until("it is in Redis", async || cached(&redis) == 1).await;
    let limiter = patient(&redis.tcp_url());
    let other = database(&server).follow(&limiter).await.expect("a configuration");
    assert_eq!(other.account_of_key(&asked).await.expect_err("none"), ApiKeyError::Unknown);
    assert_eq!(other.status().key_look_ups, 0);
    // As if somebody had made just this one.
    let (made, stored) = tool.create_key("42", &terms(""), "").await.expect("made");
    server
        .run(&format!(
            "UPDATE tollgate.api_keys SET key_id = '{}', hash = sha256('{asked}') WHERE key_id = '{}'",
            &asked[3..15],
            stored.id
        ))
        .await;
    wait_until("it is valid in both", async || {
        service.account_of_key(&asked).await.is_ok() && other.account_of_key(&asked).await.is_ok()
    })
    .await;
    assert!(service.account_of_key(made.secret()).await.is_err());
}

/// How many API keys are cached in Redis.
fn cached(redis: &Server) -> usize {
    let keys: Vec<String> =
        tollgate::redis::cmd("KEYS").arg("tollgate:*:key:*").query(&mut redis.connection()).expect("keys");
    keys.len()
}

/// However many keys arrive that were deleted, few are looked up, and known keys stay valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_unknown_keys_does_not_reach_postgres() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let (key, _) = tool.create_key("42", &terms(""), "").await.expect("made");
    let limiter = patient(&redis.tcp_url());
    let mut services = Vec::new();
    for _ in 0..2 {
        services.push(database(&server).follow(&limiter).await.expect("a configuration"));
    }
    for service in &services {
        wait_until("the key is known", async || service.account_of_key(key.secret()).await.is_ok()).await;
        wait_until("ids are known", async || service.status().keys_known == Some(1)).await;
    }
    let forger = Forger::of(&server).await;
    let began = Instant::now();
    let mut refused = 0;
    for wave in 0..20 {
        let keys: Vec<_> = (0..250).map(|number| forger.unknown(wave * 1000 + number)).collect();
        let answers = join_all(keys.iter().enumerate().map(|(at, key)| services[at % 2].account_of_key(key))).await;
        for answer in answers {
            match answer.expect_err("unknown") {
                ApiKeyError::Unknown => {}
                ApiKeyError::Unavailable { retry_after } => {
                    assert!(retry_after >= Duration::from_secs(1));
                    refused += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        // Known keys stay valid.
        for service in &services {
            assert!(service.account_of_key(key.secret()).await.is_ok());
        }
    }
    // Each service may have looked up the one that exists.
    let most = 12.0 + 90.0 * began.elapsed().as_secs_f64();
    let looked_up: u64 = services.iter().map(|service| service.status().key_look_ups).sum();
    println!("of 5,000 unknown keys in {:?}, {looked_up} were looked up, {refused} refused", began.elapsed());
    assert!((looked_up as f64) <= most && looked_up >= 10, "{looked_up} of at most {most}");
}

/// Other keys stay valid, whichever rows are deleted.
#[tokio::test]
async fn deleting_a_row_does_not_affect_other_keys() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let mut keys = Vec::new();
    for number in 0..150 {
        keys.push(tool.create_key(&number.to_string(), &terms(""), "").await.expect("made"));
    }
    tool.block_user("old", None, None, "").await.expect("blocked");
    let limiter = patient(&redis.tcp_url());
    let service = database(&server).follow(&limiter).await.expect("a configuration");
    for (key, _) in &keys {
        wait_until("it is known", async || service.account_of_key(key.secret()).await.is_ok()).await;
    }
    let looked_up = service.status().key_look_ups;
    let (gone, stored) = &keys[0];
    server.run("DELETE FROM tollgate.user_quotas").await;
    server.run(&format!("DELETE FROM tollgate.api_keys WHERE key_id = '{}'", stored.id)).await;
    wait_until("it is gone", async || {
        matches!(
            service.account_of_key(gone.secret()).await,
            Err(ApiKeyError::Unknown | ApiKeyError::Unavailable { .. })
        )
    })
    .await;
    for (key, _) in &keys[1..] {
        assert!(service.account_of_key(key.secret()).await.is_ok());
    }
    assert!(service.status().key_look_ups <= looked_up + 2);
    // Where all rows may have been deleted, those that exist stay valid, too.
    let left = &keys[1].1.id;
    server
        .run(&format!(
            "BEGIN; CREATE TEMP TABLE kept AS SELECT * FROM tollgate.api_keys WHERE key_id = '{left}';
            TRUNCATE tollgate.api_keys; INSERT INTO tollgate.api_keys SELECT * FROM kept; COMMIT"
        ))
        .await;
    wait_until("the others are gone", async || service.account_of_key(keys[2].0.secret()).await.is_err()).await;
    assert!(service.account_of_key(keys[1].0.secret()).await.is_ok());
}

/// Services of two databases share a Redis, and nothing else.
#[tokio::test]
async fn keys_of_one_database_open_no_other() {
    let redis = Server::start();
    let ((one, tool), (other, _)) = (prepared().await, prepared().await);
    // The other one as if it knew the first one's secret, so that its keys are looked up there, too.
    let secret = one.run("SELECT key_secret::text FROM tollgate.configuration").await.remove(0);
    let foreign = Forger::of(&other).await.unknown(1);
    other.run(&format!("UPDATE tollgate.configuration SET key_secret = '{secret}'")).await;
    let limiter = || patient(&redis.tcp_url());
    let first = database(&one).follow(&limiter()).await.expect("a configuration");
    let second = database(&other).follow(&limiter()).await.expect("a configuration");
    let (key, _) = tool.create_key("admin", &terms(""), "").await.expect("made");
    wait_until("it is valid", async || first.account_of_key(key.secret()).await.is_ok()).await;
    wait_until("it is cached", async || cached(&redis) > 0).await;
    assert_eq!(second.account_of_key(key.secret()).await.expect_err("of another"), ApiKeyError::Unknown);
    assert_eq!(second.account_of_key(&foreign).await.expect_err("by another secret"), ApiKeyError::Malformed);
    // Nor does the same database once another history has begun.
    one.run("TRUNCATE tollgate.api_keys; UPDATE tollgate.configuration SET history = gen_random_uuid()").await;
    wait_until("it is gone", async || first.account_of_key(key.secret()).await.is_err()).await;
    let again = database(&one).follow(&limiter()).await.expect("a configuration");
    assert_eq!(again.account_of_key(key.secret()).await.expect_err("it is gone"), ApiKeyError::Unknown);
}

#[tokio::test]
async fn a_rotated_key_stays_valid_for_a_while() {
    let (server, tool) = prepared().await;
    let mut own = terms("mobile");
    own.limits.per_second = Some(5);
    own.limits.per_day = Some(1000);
    own.limits.burst = Some(9);
    let (old, stored) = tool.create_key("42", &own, "me").await.expect("made");
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let (new, successor) = tool.rotate_key(&stored.id, Duration::from_secs(5), "me").await.expect("rotated");
    assert_eq!(
        (successor.user.as_str(), &successor.terms.limits, successor.replaces.as_deref()),
        ("42", &own.limits, Some(&*stored.id))
    );
    let valid = async |key: &str| service.account_of_key(key).await.map(|account| account.key_id().map(str::to_owned));
    assert_eq!(valid(old.secret()).await, Ok(Some(stored.id.clone())));
    assert_eq!(valid(new.secret()).await, Ok(Some(successor.id.clone())));
    wait_until("the old key has ended", async || valid(old.secret()).await == Err(ApiKeyError::Expired)).await;
    assert!(valid(new.secret()).await.is_ok());
    let again = tool.rotate_key(&stored.id, Duration::ZERO, "").await.expect_err("it has ended");
    assert_eq!(again.to_string(), format!("key: {} has expired, so it can't be rotated", stored.id));
    let (_, third) =
        tool.rotate_key(&format!("tg_{}", successor.id), Duration::from_secs(60), "").await.expect("rotated");
    let twice = tool.rotate_key(&successor.id, Duration::ZERO, "").await.expect_err("it has a successor");
    let expected = format!("key: {} was already rotated: {} replaces it", successor.id, third.id);
    assert_eq!(twice.to_string(), expected);
    tool.revoke_key(&third.id, "").await.expect("revoked");
    let revoked = tool.rotate_key(&third.id, Duration::ZERO, "").await.expect_err("it was revoked");
    assert!(revoked.to_string().contains("was revoked, so it"), "{revoked}");
    assert_eq!(tool.keys(Some("42")).await.expect("keys").len(), 3);
    assert!(tool.keys(Some("43")).await.expect("keys").is_empty() && tool.keys(None).await.expect("keys").len() == 3);
}

/// What the layers make of it, together.
#[tokio::test]
async fn a_service_behind_keys_counts_by_them() {
    let (server, tool) = prepared().await;
    let rules: RuleSet = r#"
        [[rule]]
        name = "paid"
        match = { tier = "paid" }
        key = "user"
        limits = ["fixed-window 3/1h"]
    "#
    .parse()
    .expect("rules");
    tool.push_rules(&rules, "").await.expect("pushed");
    let mut paid = terms("");
    paid.tier = Some("paid".to_owned());
    let (plain, _) = tool.create_key("42", &paid, "").await.expect("made");
    paid.limits.per_hour = Some(2);
    let (limited, stored) = tool.create_key("42", &paid, "").await.expect("made");
    paid.expires_at = Some(SystemTime::now() - Duration::from_secs(1));
    let (ended, _) = tool.create_key("42", &paid, "").await.expect("made");
    let configuration = database(&server).follow(&limiter()).await.expect("a configuration");
    let limits = RateLimitLayer::new(limiter(), configuration.clone());
    let ask = async |keys: ApiKeyLayer, header: &'static str, sent: &str| {
        let whose = service_fn(|request: Request<Body>| async move {
            let user = request.extensions().get::<Account>().map_or("nobody", |account| account.user()).to_owned();
            Ok::<_, std::convert::Infallible>(Response::new(Body::from(user)))
        });
        let mut request = Request::builder().uri("/items");
        if !sent.is_empty() {
            request = request.header(header, sent);
        }
        let service = keys.layer(limits.layer(whose));
        service.oneshot(request.body(Body::empty()).expect("a request")).await.expect("infallible")
    };
    let bearer = async |key: &str| {
        let layer = ApiKeyLayer::new(configuration.clone());
        ask(layer, "authorization", &if key.is_empty() { String::new() } else { format!("Bearer {key}") }).await
    };
    let answer = bearer(plain.secret()).await;
    assert!(answer.headers()["ratelimit"].to_str().expect("text").starts_with("\"paid\";r=2;t="), "{answer:?}");
    let own = bearer(limited.secret()).await;
    assert!(own.headers()["ratelimit"].to_str().expect("text").starts_with("\"key-quota\";r=1"), "{own:?}");
    assert_eq!(
        (bearer(limited.secret()).await.status().as_u16(), bearer(limited.secret()).await.status().as_u16()),
        (200, 429)
    );
    for (key, error) in [
        ("", None),
        ("tg_nonsense", Some(ApiKeyError::Malformed)),
        (&Forger::of(&server).await.unknown(1), Some(ApiKeyError::Unknown)),
        (ended.secret(), Some(ApiKeyError::Expired)),
    ] {
        let answer = bearer(key).await;
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["www-authenticate"]),
            (401, &"Bearer".parse().expect("a value"))
        );
        assert_eq!(answer.headers()["content-type"], "application/problem+json");
        assert_eq!(answer.extensions().get::<ApiKeyError>().copied(), error);
    }
    let named = ApiKeyLayer::new(configuration.clone()).header(HeaderName::from_static("x-api-key"));
    assert_eq!(ask(named.clone(), "x-api-key", plain.secret()).await.status().as_u16(), 200);
    let other = ask(named.clone(), "authorization", plain.secret()).await;
    assert_eq!(
        (other.status().as_u16(), &other.headers()["www-authenticate"]),
        (401, &"ApiKey header=\"x-api-key\"".parse().expect("a value"))
    );
    assert_eq!(ask(named.clone().optional(), "x-api-key", "").await.status().as_u16(), 200);
    assert_eq!(ask(named.optional(), "x-api-key", "wrong").await.status().as_u16(), 401);
    configuration.finish().await.expect("written");
    let key = tool.key(&stored.id).await.expect("an answer").expect("known");
    assert_eq!((key.total, key.last_used_at.is_some()), (2, true));
    let user = tool.user("42").await.expect("an answer").expect("known");
    assert_eq!((user.total_today, user.times_exceeded), (4, 1));
}

#[tokio::test]
async fn hostile_text_is_stored_or_refused() {
    let (server, tool) = prepared().await;
    for text in ["'; DROP TABLE tollgate.api_keys; --", "\\u0000 $1 %s", "\u{202e}\u{1f600}"] {
        let mut hostile = terms(text);
        hostile.tier = Some(text.to_owned());
        let (_, stored) = tool.create_key(text, &hostile, text).await.expect("stored");
        let read = tool.key(&stored.id).await.expect("an answer").expect("stored");
        assert_eq!((read.user.as_str(), read.terms.name.as_str(), read.created_by.as_str()), (text, text, text));
        assert_eq!(tool.keys(Some(text)).await.expect("keys").len(), 1);
        assert_eq!(tool.revoke_key(&stored.id, text).await.expect("revoked").revoked_by.as_deref(), Some(text));
        // As an id.
        for error in [tool.key(text).await.map(drop), tool.revoke_key(text, "").await.map(drop)] {
            let expected = "key: expected the 12 digits and letters of its id, or the whole key, got another text";
            assert_eq!(error.expect_err("no id").to_string(), expected);
        }
    }
    let long = "x".repeat(600);
    let mut bad = terms("");
    bad.limits = OwnLimits::default();
    bad.limits.per_second = Some(u64::MAX);
    for (refused, expected) in [
        (tool.create_key("", &terms(""), "").await, "user: the name is empty"),
        (tool.create_key(&long, &terms(""), "").await, "user: expected at most 512 bytes, got 600"),
        (tool.create_key("a", &terms(&long), "").await, "name: expected at most 256 bytes, got 600"),
        (tool.create_key("a", &terms("\0"), "").await, "name: contains NUL, which PostgreSQL can't store"),
        (
            tool.create_key("a", &bad, "").await,
            "per_second: expected 1 to 9007199254740992 units, got 18446744073709551615",
        ),
        (
            tool.rotate_key("AAAAAAAAAAAA", Duration::from_secs(1 << 60), "").await,
            "overlap: expected an end before the year 10000, got 1152921504606846976s",
        ),
        (tool.rotate_key("AAAAAAAAAAAA", Duration::ZERO, "").await, "key: there is no key AAAAAAAAAAAA"),
    ] {
        assert_eq!(refused.expect_err(expected).to_string(), expected);
    }
    assert_eq!(server.run("SELECT count(*) FROM tollgate.api_keys").await, ["3"]);
}

/// Somebody may have written any time by hand.
#[tokio::test]
async fn a_key_without_end_is_replaced_by_one_that_ends_as_late_as_can_be() {
    let (server, tool) = prepared().await;
    let (_, stored) = tool.create_key("42", &terms(""), "").await.expect("made");
    server.run("UPDATE tollgate.api_keys SET expires_at = 'infinity', created_at = '-infinity'").await;
    let (_, successor) = tool.rotate_key(&stored.id, Duration::ZERO, "").await.expect("rotated");
    let years = server
        .run("SELECT extract(year FROM expires_at AT TIME ZONE 'UTC') FROM tollgate.api_keys ORDER BY created_at DESC");
    assert_eq!((years.await[0].as_str(), successor.replaces), ("9999", Some(stored.id)));
}
