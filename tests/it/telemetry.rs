//! Metrics and traces: what is counted, by which labels, and what is said, without any key.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::{Router, http};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::{Account, Attributes, RuleSet};
use tollgate::{Embedded, Limiter, OnError, Redis, Rule};
use tollgate_testing::alone::alone;
use tollgate_testing::polling::{PATIENCE, wait_until};
use tollgate_testing::redis_server::{Server, patient};
use tower::{Layer, ServiceExt, service_fn};

/// Name and labels of each series, and its value or how many were recorded.
#[derive(Clone, Default)]
struct Counted(Arc<Mutex<BTreeMap<String, f64>>>);

/// One of them.
struct Series(Counted, String);

impl Counted {
    fn series(&self, key: &Key) -> Arc<Series> {
        let mut labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        labels.sort();
        Arc::new(Series(self.clone(), format!("{}{{{}}}", key.name(), labels.join(","))))
    }
}

impl Series {
    fn change(&self, change: impl Fn(f64) -> f64) {
        let mut all = self.0.0.lock().expect("it");
        let value = all.entry(self.1.clone()).or_default();
        *value = change(*value);
    }
}

impl CounterFn for Series {
    fn increment(&self, value: u64) {
        self.change(|count| count + value as f64);
    }

    fn absolute(&self, value: u64) {
        self.change(|_| value as f64);
    }
}

impl GaugeFn for Series {
    fn increment(&self, value: f64) {
        self.change(|now| now + value);
    }

    fn decrement(&self, value: f64) {
        self.change(|now| now - value);
    }

    fn set(&self, value: f64) {
        self.change(|_| value);
    }
}

impl HistogramFn for Series {
    fn record(&self, _: f64) {
        self.change(|count| count + 1.0);
    }
}

impl Recorder for Counted {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.series(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.series(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.series(key))
    }
}

/// Runs this on one thread, on which all that is counted is recorded.
fn recorded(work: impl AsyncFnOnce()) -> BTreeMap<String, f64> {
    let counted = Counted::default();
    metrics::with_local_recorder(&counted, || {
        tollgate::describe_metrics();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(work());
    });
    let all = counted.0.lock().expect("it");
    all.clone()
}

fn rule(text: &str, name: &str) -> Rule {
    Rule::new(name, text).expect(name)
}

const SECRET: &str = "user:alice@example.com";

#[test]
fn decisions_are_counted_by_rule_algorithm_outcome_and_source_and_never_by_key() {
    let server = Server::start();
    let seen = recorded(async || {
        let limiter = patient(&server.tcp_url());
        let (one, two) = (rule("gcra 2/1h", "one"), rule("gcra 9/1h, fixed-window 9/1h", "two"));
        for _ in 0..3 {
            limiter.acquire(&one, SECRET).await.expect("a decision");
        }
        limiter.acquire(&two, SECRET).await.expect("a decision");
        limiter.acquire_many(&one, [SECRET, "user:bob"]).await;
        let away =
            Limiter::builder(Redis::open("redis://127.0.0.1:1/").expect("an address")).deadline(PATIENCE).build();
        away.acquire(&one, SECRET).await.expect_err("nobody listens");
        let open = rule("gcra 2/1h", "open").on_error(OnError::Open).expect("a policy");
        away.acquire(&open, SECRET).await.expect("a decision");
        for _ in 0..10 {
            let _ = away.acquire(&one, SECRET).await;
        }
    });
    let count = |labels: &str| seen.get(&format!("tollgate_decisions_total{{{labels}}}")).copied().unwrap_or_default();
    assert_eq!(count("algorithm=token-bucket,outcome=allowed,rule=one,source=redis"), 3.0, "{seen:?}");
    assert_eq!(count("algorithm=token-bucket,outcome=denied,rule=one,source=redis"), 2.0);
    assert_eq!(count("algorithm=several,outcome=allowed,rule=two,source=redis"), 1.0);
    assert_eq!(count("algorithm=token-bucket,outcome=error,rule=one,source=none"), 11.0);
    assert_eq!(count("algorithm=token-bucket,outcome=allowed,rule=open,source=policy"), 1.0);
    assert_eq!(seen["tollgate_decision_duration_seconds{source=redis}"], 4.0, "{seen:?}");
    assert_eq!(seen["tollgate_errors_total{class=unreachable}"], 11.0, "{seen:?}");
    // Three of one limit by themselves, and two together; and that of two limits.
    assert_eq!(seen["tollgate_batch_keys{}"], 5.0, "{seen:?}");
    assert_eq!(seen["tollgate_breakers_open{}"], 0.0, "it is gone with its Redis: {seen:?}");
    assert!(!format!("{seen:?}").contains("alice"), "{seen:?}");
}

/// Each by what its own limits say: the sum over rules is more than the requests.
#[test]
fn rules_that_apply_together_are_each_counted() {
    let rule = |name: &str, most: u32| {
        format!(
            "[[rule]]\nname = \"{name}\"\nkey = \"global\"\nlimits = [\"fixed-window {most}/1h start first-hit\"]\n\
             continue = true\n"
        )
    };
    let rules = tollgate_testing::rules::rule_set(&(rule("all", 9) + &rule("few", 2)));
    let seen = recorded(async || {
        let limiter = Limiter::new(tollgate::Embedded::new());
        for _ in 0..3 {
            limiter.acquire_by(&rules, &Attributes::new()).await.expect("a verdict");
        }
    });
    let count = |labels: &str| seen.get(labels).copied().unwrap_or_default();
    let decisions = |outcome: &str, rule: &str| {
        let labels = format!("algorithm=fixed-window,outcome={outcome},rule={rule},source=embedded");
        count(&format!("tollgate_decisions_total{{{labels}}}"))
    };
    assert_eq!((decisions("allowed", "all"), decisions("denied", "all")), (3.0, 0.0), "{seen:?}");
    assert_eq!((decisions("allowed", "few"), decisions("denied", "few")), (2.0, 1.0), "{seen:?}");
    let verdicts: Vec<_> = seen.iter().filter(|(name, _)| name.starts_with("tollgate_verdicts")).collect();
    let of = |rule: &str| {
        let own = verdicts.iter().filter(|(name, _)| name.contains(&format!("rule={rule}")));
        own.map(|(_, count)| **count).sum::<f64>()
    };
    assert_eq!((of("all"), of("few")), (2.0, 1.0), "by the one that decided: {verdicts:?}");
}

/// The runtime that asks no more may be the only one that was refused.
#[test]
fn a_breaker_is_open_no_longer_than_its_runtime_lives() {
    let counted = Counted::default();
    metrics::with_local_recorder(&counted, || {
        let limiter = Limiter::new(Redis::open("redis://127.0.0.1:1/").expect("an address"));
        let rule = rule("gcra 2/1h", "one");
        let asked = |times: usize| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                for _ in 0..times {
                    limiter.acquire(&rule, SECRET).await.expect_err("nobody listens");
                }
            });
            runtime
        };
        let open = || counted.0.lock().expect("it").get("tollgate_breakers_open{}").copied().unwrap_or_default();
        let _lasting = asked(1);
        assert!(open() == 0.0);
        let (one, other) = (asked(10), asked(10));
        assert!(open() == 2.0);
        drop(one);
        assert!(open() == 1.0);
        drop(other);
        assert!(open() == 0.0);
        drop(limiter);
        assert!(open() == 0.0);
    });
}

#[test]
fn verdicts_and_shadow_rules_are_counted() {
    let text = "[[rule]]\nname = \"trial\"\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]\nshadow = true\n\
                [[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"gcra 1/1h\"]\nblock = [\"user:eve\"]\n";
    let seen = recorded(async || {
        let rules: RuleSet = text.parse().expect("rules");
        let limiter = Limiter::new(Embedded::new());
        for user in ["alice", "alice", "eve"] {
            limiter.acquire_by(&rules, &Attributes::new().user(user)).await.expect("a verdict");
        }
        limiter.acquire_by(&rules, &Attributes::new()).await.expect("a verdict");
        let away =
            Limiter::builder(Redis::open("redis://127.0.0.1:1/").expect("an address")).deadline(PATIENCE).build();
        away.acquire_by(&rules, &Attributes::new().user("bob")).await.expect_err("nobody listens");
    });
    let count = |series: &str| seen.get(series).copied().unwrap_or_default();
    assert_eq!(count("tollgate_verdicts_total{outcome=allowed,reason=limits,rule=users}"), 1.0, "{seen:?}");
    assert_eq!(count("tollgate_verdicts_total{outcome=denied,reason=limits,rule=users}"), 1.0, "{seen:?}");
    assert_eq!(count("tollgate_verdicts_total{outcome=denied,reason=blocked,rule=users}"), 1.0, "{seen:?}");
    assert_eq!(count("tollgate_verdicts_total{outcome=denied,reason=missing,rule=users}"), 1.0, "{seen:?}");
    // No answer came from a shadow rule.
    assert!(!seen.keys().any(|series| series.contains("decisions_total") && series.contains("rule=trial")), "{seen:?}");
    assert_eq!(count("tollgate_verdicts_total{outcome=error,reason=unreachable,rule=users}"), 1.0, "{seen:?}");
    assert_eq!(count("tollgate_shadow_verdicts_total{outcome=allowed,rule=trial}"), 1.0, "{seen:?}");
    assert_eq!(count("tollgate_shadow_verdicts_total{outcome=denied,rule=trial}"), 3.0, "{seen:?}");
    assert!(!format!("{seen:?}").contains("alice"), "{seen:?}");
}

/// However many calls it takes.
#[test]
fn an_operation_of_several_calls_is_counted_as_one_decision() {
    let (hundredth, second) = (Duration::from_millis(10), Duration::from_secs(1));
    let seen = recorded(async || {
        let limiter = Limiter::new(Embedded::new());
        for text in ["gcra 1/50ms", "gcra 1/50ms burst 0 max-debt 5"] {
            let rule = rule(text, "waits");
            limiter.acquire_wait(&rule, text, second).await.expect("a decision");
            limiter.acquire_wait(&rule, text, second).await.expect("a decision");
        }
        let (hourly, owed) = (rule("gcra 1/1h", "waits"), rule("gcra 1/1h burst 0 max-debt 5", "waits"));
        for (rule, most) in [(&hourly, second), (&hourly, hundredth), (&owed, hundredth)] {
            limiter.acquire_wait(rule, "key", most).await.expect("a decision");
        }
        let permits = rule("concurrency 1 ttl 1m", "permits");
        let held = limiter.hold_wait(&permits, "key", second).await.expect("an answer");
        let denied = limiter.hold_wait(&permits, "key", hundredth * 4).await.expect("an answer");
        assert!(held.permit.is_some() && denied.permit.is_none());
        let leased = rule("token-bucket 1000/1h", "leased");
        let lease = limiter.lease(&leased, "key", std::num::NonZeroU32::MIN).expect("a lease");
        for _ in 0..100 {
            lease.acquire(1).await.expect("a decision");
        }
        let refused = limiter.acquire_many(&rule("gcra 1/1s", "many"), ["", "key"]).await;
        assert!(refused[0].is_err() && refused[1].is_ok());
    });
    let count = |rule: &str, outcome: &str| -> f64 {
        let of = |series: &&String| {
            series.starts_with("tollgate_decisions_total")
                && series.contains(&format!("outcome={outcome},rule={rule},"))
        };
        seen.keys().filter(of).map(|series| seen[series]).sum()
    };
    assert_eq!((count("waits", "allowed"), count("waits", "denied")), (5.0, 2.0), "{seen:?}");
    assert_eq!((count("permits", "allowed"), count("permits", "denied")), (1.0, 1.0), "{seen:?}");
    assert_eq!(count("leased", "allowed"), 100.0, "{seen:?}");
    assert_eq!((count("many", "allowed"), count("many", "error")), (1.0, 1.0), "{seen:?}");
}

/// Whatever is written to it.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("it").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("it").clone()).expect("text")
    }
}

/// An earlier layer puts no account into the requests of strangers, of which the first may be one.
#[test]
fn attributes_of_accounts_are_reported_only_where_no_account_comes() {
    if alone("telemetry::attributes_of_accounts_are_reported_only_where_no_account_comes", &[]).is_some() {
        return;
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let rules = "[[rule]]\nname = \"paid\"\nmatch = { tier = \"paid\" }\nkey = \"user\"\nlimits = [\"gcra 1/1h\"]";
    tracing::subscriber::with_default(subscriber, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let layer = || RateLimitLayer::new(Limiter::new(Embedded::new()), rules.parse::<RuleSet>().expect("rules"));
            let hello =
                || service_fn(|_: http::Request<()>| async { Ok::<_, Infallible>(http::Response::new(Body::empty())) });
            let with_user = layer().attribute("user", |_| None::<String>);
            for (service, account_comes) in
                [(layer().layer(hello()), true), (layer().layer(hello()), false), (with_user.layer(hello()), false)]
            {
                for number in 0..250 {
                    let mut request = http::Request::new(());
                    if number == 99 && account_comes {
                        request.extensions_mut().insert(Account::new("42"));
                    }
                    service.clone().oneshot(request).await.expect("infallible");
                }
            }
        });
    });
    let text = log.text();
    for (attribute, times) in [("tier", 2), ("user", 1)] {
        let line = format!("rules use an attribute that no request has attribute=\"{attribute}\"");
        assert_eq!(text.matches(&line).count(), times, "once where none comes, and nobody reads it: {text}");
    }
}

#[test]
fn spans_and_events_report_outcomes_and_never_a_key() {
    // What one thread traces depends on which threads came by each place in the code before.
    if alone("telemetry::spans_and_events_report_outcomes_and_never_a_key", &[]).is_some() {
        return;
    }
    let mut server = Server::start();
    let log = Log::default();
    let (writer, level) = (log.clone(), tracing_subscriber::filter::LevelFilter::DEBUG);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_span_events(tracing_subscriber::fmt::format::FmtSpan::CLOSE)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let limiter =
                Limiter::builder(Redis::open(&server.tcp_url()).expect("an address")).deadline(PATIENCE).build();
            let open = rule("gcra 2/1h", "open").on_error(OnError::Open).expect("a policy");
            limiter.acquire(&open, SECRET).await.expect("a decision");
            let file = tempfile::NamedTempFile::new().expect("a file");
            let doubtful = "[[rule]]\nname = \"a\"\naction = \"allow\"\nmatch = { tier = \"fr*\" }\n";
            std::fs::write(file.path(), doubtful).expect("written");
            RuleSet::read(file.path()).expect("rules that can be used");
            // Rules by an attribute that no request has, and a user without the right to run scripts.
            let mistyped = "[[rule]]\nname = \"all\"\nkey = \"apikey\"\nlimits = [\"gcra 1/1h\"]".parse::<RuleSet>();
            let layer = RateLimitLayer::new(limiter.clone(), mistyped.expect("rules"));
            let service = layer.layer(service_fn(|_: http::Request<()>| async {
                Ok::<_, Infallible>(http::Response::new(Body::empty()))
            }));
            service.oneshot(http::Request::new(())).await.expect("infallible");
            // Rules by route, of a layer around a whole router or for outgoing calls. One within a router has it.
            let routes = "[[rule]]\nname = \"users\"\nmatch = { route = \"/users\" }\naction = \"block\"";
            let layer = || RateLimitLayer::new(limiter.clone(), routes.parse::<RuleSet>().expect("rules"));
            let router = || Router::new().route("/users", axum::routing::get(|| async {}));
            let request = || http::Request::get("/users").body(Body::empty()).expect("a request");
            let around = layer().layer(router());
            let (within, outgoing) = (router().layer(layer()), router().layer(layer().for_outgoing()));
            for _ in 0..2 {
                let status = around.clone().oneshot(request()).await.expect("infallible").status();
                assert_eq!(status.as_u16(), 200, "it has no route");
                for (service, expected) in [(&within, 403), (&outgoing, 200)] {
                    let status = service.clone().oneshot(request()).await.expect("infallible").status();
                    assert_eq!(status.as_u16(), expected);
                }
            }
            let reader = Redis::open(&server.user("reader", "+@all ~* -evalsha -eval")).expect("an address");
            let one = Rule::new("one", "gcra 1/1h").expect("a rule");
            let rules = RuleSet::single(&one, "global").expect("a set");
            let service =
                RateLimitLayer::new(Limiter::new(reader), rules).layer(service_fn(|_: http::Request<()>| async {
                    Ok::<_, Infallible>(http::Response::new(Body::empty()))
                }));
            assert_eq!(service.oneshot(http::Request::new(())).await.expect("infallible").status().as_u16(), 503);
            let permits = rule("concurrency 9 ttl 1h", "permits");
            tracing::info!("held: {:?}", limiter.hold(&permits, SECRET).await.expect("an answer").permit);
            server.stop();
            for _ in 0..8 {
                limiter.acquire(&open, SECRET).await.expect("a decision");
            }
            server.restart();
            let answers = async || limiter.acquire(&open, SECRET).await.expect("a decision").by.error().is_none();
            wait_until("redis answers again", answers).await;
        });
    });
    let text = log.text();
    for expected in [
        "DEBUG decision{rule=\"open\" operation=\"acquire\" allowed=true source=\"redis\"}: tollgate: close",
        "DEBUG",
        "the rule's policy answers in place of redis rule=\"open\" policy=\"open\" error=",
        "WARN",
        "the breaker is open: redis is not called for a while, since calls to it failed error=",
        "INFO",
        "redis answers again",
        "rules use an attribute that no request has attribute=\"apikey\"",
        "a rule probably does not match as meant warning=",
        ":4:18: rule a: tier: expected a whole value",
        "a request is refused: no decision could be made error=\"permission\"",
        "held: Some(Permit { rule: Some(\"permits\"), held: true, .. })",
    ] {
        assert!(text.contains(expected), "{expected}:\n{text}");
    }
    assert!(!text.contains("alice"), "{text}");
    let warnings = text.lines().filter(|line| line.contains(" WARN ") && !line.contains("the breaker is open"));
    assert_eq!(warnings.count(), 5, "one for the outage, not for each request: {text}");
    let without_route = "rules use an attribute that no request has attribute=\"route\"";
    assert_eq!(text.matches(without_route).count(), 2, "once for each of two layers: {text}");
}
