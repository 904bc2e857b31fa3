//! Rules between files and the database: nothing is lost, and nothing is half there.

use tollgate::rules::{Attributes, RuleSet};
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, rule_of_tier as rule};
use tollgate_testing::repository::read;
use tollgate_testing::rules::rule_set;

#[tokio::test]
async fn pushed_rules_are_read_back_unchanged() {
    let server = PostgresServer::start();
    let database = database(&server);
    database.migrate().await.expect("made");
    assert!(database.rules().await.expect("an empty set").rules.is_empty());
    let everything = rule_set(&read("examples/rules.toml"));
    let changes = database.push_rules(&everything, "me").await.expect("pushed");
    assert_eq!((changes.added.len(), changes.changed.len(), changes.settings), (everything.len(), 0, true));
    let stored = database.rules().await.expect("rules");
    let toml = |rules: &RuleSet| toml::to_string(rules).expect("TOML");
    assert_eq!(toml(&stored.rules), toml(&everything));
    assert!(stored.version > 1);
    // Once more, nothing changes: neither versions nor times.
    let times = async || server.run("SELECT updated_at FROM tollgate.rate_limit_rules ORDER BY name").await;
    let before = times().await;
    assert!(database.push_rules(&everything, "you").await.expect("pushed").is_empty());
    assert_eq!((times().await, database.rules().await.expect("rules").version), (before, stored.version));
    assert_eq!(server.run("SELECT DISTINCT updated_by FROM tollgate.rate_limit_rules").await, ["me"]);
}

#[tokio::test]
async fn each_kind_of_change_is_reported_and_made() {
    let server = PostgresServer::start();
    let database = database(&server);
    database.migrate().await.expect("made");
    let [a, b, c] = ["a", "b", "c"].map(|name| rule(name, "gcra 1/1s"));
    let texts = |parts: &[&str]| rule_set(&parts.concat());
    database.push_rules(&texts(&[&a, &b]), "").await.expect("pushed");
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let faster = rule("b", "gcra 2/1s");
    for (parts, added, changed, removed, reordered, settings) in [
        (&[&*a, &b, &c][..], &["c"][..], &[][..], &[][..], false, false),
        (&[&a, &faster, &c], &[], &["b"], &[], false, false),
        (&[&c, &a, &faster], &[], &[], &[], true, false),
        (&[&c, &faster], &[], &[], &["a"], false, false),
        (&["ignore_case = true\n", &c, &faster], &[], &[], &[], false, true),
        (&["ignore_case = true\n", &a, &b], &["a"], &["b"], &["c"], false, true),
    ] {
        let rules = texts(parts);
        let compared = database.compare_rules(&rules).await.expect("compared");
        let made = database.push_rules(&rules, "").await.expect("pushed");
        assert_eq!(compared, made);
        assert_eq!((&made.added, &made.changed, &made.removed), (&names(added), &names(changed), &names(removed)));
        let settings = settings && !parts.contains(&&*b);
        assert_eq!((made.reordered, made.settings), (reordered, settings), "{parts:?}");
        let stored = database.rules().await.expect("rules").rules;
        let stored: Vec<_> = stored.definitions().iter().map(|rule| rule.name.clone()).collect();
        let expected: Vec<_> = rules.definitions().iter().map(|rule| rule.name.clone()).collect();
        assert_eq!(stored, expected);
    }
    // A rule that somebody has disabled is none, and is enabled where a file has it again.
    server.run("UPDATE tollgate.rate_limit_rules SET enabled = false WHERE name = 'a'").await;
    assert_eq!(database.rules().await.expect("rules").rules.len(), 1);
    let both = texts(&["ignore_case = true\n", &a, &b]);
    assert_eq!(database.push_rules(&both, "").await.expect("pushed").added, names(&["a"]));
    assert_eq!(database.rules().await.expect("rules").rules.len(), 2);
}

/// Eight concurrent pushes of one of two sets leave one of them, whole.
#[tokio::test]
async fn concurrent_pushes_are_serialised() {
    let server = PostgresServer::start();
    database(&server).migrate().await.expect("made");
    let many = |limit: &str| rule_set(&(0..50).map(|at| rule(&format!("r{at}"), limit)).collect::<String>());
    let sets = [many("gcra 1/1s"), many("gcra 2/1s")];
    let pushes = (0..8).map(|at| {
        let (database, rules) = (database(&server), sets[at % 2].clone());
        async move { database.push_rules(&rules, "").await }
    });
    for pushed in futures_util::future::join_all(pushes).await {
        pushed.expect("pushed");
    }
    let stored = toml::to_string(&database(&server).rules().await.expect("rules").rules).expect("TOML");
    assert!(sets.iter().any(|rules| toml::to_string(rules).expect("TOML") == stored));
}

#[tokio::test]
async fn hostile_text_is_stored_or_refused() {
    let server = PostgresServer::start();
    let database = database(&server);
    let error = database.rules().await.expect_err("no tables");
    assert!(error.is_schema(), "{error}");
    database.migrate().await.expect("made");
    for text in ["'; DROP TABLE tollgate.rate_limit_rules; --", "\\u0001 \u{202e} \u{1f600}", "$1 %s {}"] {
        let mut rules = rule_set(&rule("a", "gcra 1/1s")).definitions().to_vec();
        rules[0].message = Some(text.to_owned());
        rules[0].block = vec![format!("user:{text}")];
        let rules = RuleSet::new(rules).expect("rules");
        database.push_rules(&rules, text).await.expect("stored");
        let stored = database.rules().await.expect("rules").rules;
        assert_eq!(stored.definitions(), rules.definitions());
        let denied = stored.applies(&Attributes::new().user(text).tier("a")).expect("a rule");
        assert!(matches!(denied.effect, tollgate::rules::Effect::Block), "{denied:?}");
    }
    let mut nul = rule_set(&rule("a", "gcra 1/1s")).definitions().to_vec();
    nul[0].message = Some("\0".to_owned());
    let error = database.push_rules(&RuleSet::new(nul).expect("rules"), "").await.expect_err("NUL");
    assert!(error.to_string().contains("(SQLSTATE 22P05)") && error.to_string().lines().count() == 1, "{error}");
    let error = database.push_rules(&rule_set(&rule("a", "gcra 1/1s")), &"x".repeat(257)).await.expect_err("too long");
    assert_eq!(error.to_string(), "by: expected at most 256 bytes, got 257");
    // Rules that somebody has written by hand.
    server.run(r#"UPDATE tollgate.rate_limit_rules SET definition = '{"name": "a", "limits": ["gcra"]}'"#).await;
    let error = database.rules().await.expect_err("no rule");
    assert!(error.is_input() && error.to_string().starts_with("rules in the database: "), "{error}");
}
