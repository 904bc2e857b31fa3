//! Requests that say what they cost, and several that are decided as one.

use std::time::{Duration, UNIX_EPOCH};

use tollgate::rules::{Attributes, Reason, RuleRequest, RuleSet, Verdict};
use tollgate::{Clock, Embedded, ErrorKind, Limit, Limiter, Operation};
use tollgate_testing::polling::in_time;
use tollgate_testing::redis_server::{Server, patient};

use super::rule_set;

/// On the embedded engine and on a Redis.
fn limiters(server: &Server) -> [Limiter; 2] {
    let clock = Clock::new(UNIX_EPOCH + Duration::from_secs(1));
    [Limiter::new(Embedded::with_clock(clock)), patient(&server.url())]
}

async fn left(limiter: &Limiter, rules: &RuleSet, attributes: &Attributes<'_>) -> u64 {
    let verdict = in_time(limiter.call_by(Operation::Peek, rules, attributes)).await.expect("a verdict");
    verdict.decision.expect("limits").remaining
}

async fn asked(limiter: &Limiter, rules: &RuleSet, request: RuleRequest<'_>) -> Verdict {
    in_time(limiter.acquire_by(rules, request)).await.expect("a verdict")
}

const MODEL: &str = r#"
    [[rule]]
    name = "watched"
    shadow = true
    key = "user"
    limits = ["fixed-window 40/30d"]

    [[rule]]
    name = "models"
    match = { model = "*" }
    key = "user"
    limits = [
        { name = "requests", limit = "fixed-window 30/30d" },
        { name = "use", limit = "fixed-window 1000/30d", cost = "tokens" },
    ]

    [[rule]]
    name = "others"
    key = "user"
    limits = ["fixed-window 10/30d"]
    continue = true

    [[rule]]
    name = "everybody"
    key = "global"
    limits = ["fixed-window 100/30d"]
"#;

#[tokio::test]
async fn a_request_may_say_what_it_costs() {
    let (server, rules) = (Server::start(), rule_set(MODEL));
    for limiter in limiters(&server) {
        let ask = async |request: RuleRequest<'_>| asked(&limiter, &rules, request).await;
        let attributes = Attributes::new().user("ada").set("model", "large");
        let request = RuleRequest::new(&attributes);
        assert_eq!(ask(request).await.reason, Reason::Missing("tokens".into()));
        // By the attribute's name, which the request then needn't have, or by the limit's.
        for (name, units, of_rule, remaining) in
            [("tokens", 900, None, [29, 100]), ("use", 40, Some(4), [25, 60]), ("tokens", 60, Some(0), [25, 0])]
        {
            let with_tokens = attributes.clone().set("tokens", "1");
            let (costs, own) = ([(name, units)], if name == "use" { &with_tokens } else { &attributes });
            let request = RuleRequest::new(own).costs(&costs);
            let verdict = ask(of_rule.map_or(request, |units| request.cost(units))).await;
            let limits = verdict.decision.expect("limits").limits;
            assert_eq!([limits[0].remaining, limits[1].remaining], remaining, "{name}");
        }
        let error = in_time(limiter.acquire_by(&rules, request.costs(&[("tokens", 1), ("tokins", 1)]))).await;
        let error = error.expect_err("no such limit");
        assert_eq!((error.kind(), error.to_string().contains("tokins")), (ErrorKind::Input, true), "{error}");

        // Of several rules that apply, each takes it.
        let attributes = Attributes::new().user("bob");
        let verdict = ask(RuleRequest::new(&attributes).cost(7)).await;
        let remaining: Vec<_> = verdict.decision.expect("limits").limits.iter().map(|own| own.remaining).collect();
        assert_eq!(remaining, [3, 93]);
        let decided = verdict.shadows[0].decision.as_ref().expect("asked").as_ref().expect("a decision");
        assert_eq!((&*verdict.shadows[0].rule, decided.remaining), ("watched", 33));
        assert!(!ask(RuleRequest::new(&attributes).cost(4)).await.allowed);
        let applies = rules.applies(RuleRequest::new(&attributes).cost(4)).expect("rules");
        let tollgate::rules::Effect::Limit(charge) = applies.effect else { panic!("it has limits") };
        assert_eq!(charge.costs(None), [4, 4]);
    }
}

#[tokio::test]
async fn what_an_id_took_is_settled_and_given_back_by_the_rules_that_took_it_and_by_shadow_rules() {
    let (server, rules) = (Server::start(), rule_set(MODEL));
    for limiter in limiters(&server) {
        let attributes = Attributes::new().user("ada").set("model", "large");
        let call = async |operation, id: &'static str, tokens| {
            let costs = [("tokens", tokens)];
            let request = RuleRequest::new(&attributes).costs(&costs).id(id).id_ttl(Duration::from_secs(60));
            let verdict = in_time(limiter.call_by(operation, &rules, request)).await?;
            let decision = verdict.decision.expect("limits");
            let shadow = verdict.shadows[0].decision.as_ref().expect("asked").as_ref().map(|own| own.remaining);
            Ok::<_, tollgate::Error>((decision.limits[1].remaining, shadow.ok()))
        };
        assert_eq!(call(Operation::Acquire, "a", 100).await, Ok((900, Some(39))));
        assert_eq!(call(Operation::Acquire, "a", 100).await, Ok((900, Some(39))), "the same again");
        assert_eq!(call(Operation::Settle, "a", 30).await, Ok((970, Some(39))));
        assert_eq!(call(Operation::Acquire, "b", 70).await, Ok((900, Some(38))));
        assert_eq!(call(Operation::Cancel, "b", 70).await, Ok((970, Some(39))), "of shadow rules too");
        assert_eq!(call(Operation::Cancel, "b", 70).await.expect_err("forgotten").kind(), ErrorKind::UnknownId);
        assert_eq!(call(Operation::Refund, "c", 10).await, Ok((980, Some(40))));
    }
}

#[tokio::test]
async fn permits_are_held_by_a_requests_id() {
    let rules = rule_set("[[rule]]\nname = \"jobs\"\nkey = \"user\"\nlimits = [\"concurrency 1 ttl 30s\"]");
    let server = Server::start();
    for limiter in limiters(&server) {
        let attributes = Attributes::new().user("ada");
        let call = async |operation, id: &'static str| {
            let request = RuleRequest::new(&attributes).id(id);
            in_time(limiter.call_by(operation, &rules, request)).await.map(|verdict| verdict.allowed)
        };
        assert_eq!(call(Operation::Acquire, "a").await, Ok(true));
        assert_eq!(call(Operation::Acquire, "b").await, Ok(false));
        assert_eq!(call(Operation::Renew, "a").await, Ok(true));
        assert_eq!(call(Operation::Renew, "b").await.expect_err("none").kind(), ErrorKind::UnknownId);
        assert_eq!(call(Operation::Release, "a").await, Ok(true));
        assert_eq!(call(Operation::Acquire, "b").await, Ok(true));
    }
}

/// A limit of the request's own takes the place of the rule's: it counts in the key of the same name if there is one.
#[tokio::test]
async fn a_request_may_bring_a_limit_of_its_own() {
    let (server, rules) = (Server::start(), rule_set(MODEL));
    for limiter in limiters(&server) {
        let attributes = Attributes::new().user("ada");
        let acquire = async |limit: &Limit, units| {
            let request = RuleRequest::new(&attributes).limit(limit).cost(units);
            let verdict = in_time(limiter.acquire_by(&rules, request)).await.expect("a verdict");
            let decision = verdict.decision.expect("limits");
            (verdict.allowed, decision.capacity, decision.remaining, decision.limits.len())
        };
        let (same, other) = ("fixed-window 50/30d", "token-bucket 3/1h");
        let [same, other] = [same, other].map(|text| text.parse::<Limit>().expect("a limit"));
        assert_eq!(acquire(&same, 20).await, (true, 50, 30, 1));
        assert_eq!(acquire(&other, 3).await, (true, 3, 0, 1));
        assert!(!acquire(&other, 1).await.0);
        assert_eq!(left(&limiter, &rules, &attributes).await, 0, "20 of the rule's 10 are used");
    }
}

/// Random requests of random users against counting by hand: all are charged, or none.
#[tokio::test]
async fn requests_are_admitted_together_as_counting_by_hand_admits_them() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "nobody"
        match = { user = "mallory" }
        action = "block"

        [[rule]]
        name = "users"
        match = { user = "*" }
        key = "user"
        limits = ["fixed-window 20/30d"]

        [[rule]]
        name = "models"
        match = { model = "*" }
        key = "model"
        limits = ["token-bucket 30/30d"]
    "#,
    );
    let server = Server::start();
    for limiter in limiters(&server) {
        let names = ["ada", "bob", "mallory", "small", "large", "other"];
        let capacity = |name: usize| [20, 20, 0, 30, 30, u64::MAX][name];
        let (mut used, mut taken) = ([0; 6], 0);
        let mut rng = fastrand::Rng::with_seed(51);
        for round in 0..200 {
            let asked: Vec<(usize, u64)> = (0..rng.usize(1..5))
                .map(|_| (if rng.u8(0..20) == 0 { 2 } else { [0, 1, 3, 4, 5][rng.usize(0..5)] }, rng.u64(0..3)))
                .collect();
            let attributes: Vec<_> = asked
                .iter()
                .map(|(name, _)| match name {
                    0..=2 => Attributes::new().user(names[*name]),
                    5 => Attributes::new().set("nothing", "known"),
                    _ => Attributes::new().set("model", names[*name]),
                })
                .collect();
            let requests = attributes.iter().zip(&asked).map(|(own, (_, units))| RuleRequest::new(own).cost(*units));
            let verdicts = in_time(limiter.acquire_all_by(&rules, requests)).await.expect("verdicts");

            let sum = |name: usize| asked.iter().filter(|(own, _)| *own == name).map(|(_, units)| units).sum::<u64>();
            // Where a rule blocks, nothing is taken, so each is answered by itself.
            let blocked = asked.iter().any(|(name, _)| *name == 2) && asked.len() > 1;
            let fits = |(name, _): &(usize, u64)| match name {
                2 => false,
                5 => true,
                name => used[*name] + sum(*name) <= capacity(*name),
            };
            let allowed: Vec<_> = verdicts.iter().map(|verdict| verdict.allowed).collect();
            assert_eq!(allowed, asked.iter().map(fits).collect::<Vec<_>>(), "round {round}: {asked:?} of {used:?}");
            if asked.iter().all(fits) {
                (0..6).filter(|name| *name != 5).for_each(|name| used[name] += sum(name));
                taken += 1;
            }
            assert!(!blocked || verdicts.iter().any(|verdict| verdict.reason == Reason::Blocked));
            let own = verdicts.iter().zip(&asked).filter(|(verdict, _)| verdict.decision.is_some());
            for (verdict, (name, _)) in own {
                let remaining = verdict.decision.as_ref().map(|decision| decision.remaining);
                assert_eq!(remaining, Some(capacity(*name) - used[*name]), "round {round}: {asked:?}");
            }
        }
        assert!((10..190).contains(&taken), "{taken} of 200 were taken");
    }
}

#[tokio::test]
async fn shadow_rules_are_asked_beside_several_requests_and_errors_name_what_they_cant_take() {
    let (server, rules) = (Server::start(), rule_set(MODEL));
    for limiter in limiters(&server) {
        let attributes = ["ada", "bob"].map(|user| Attributes::new().user(user));
        let requests = || attributes.iter().map(|own| RuleRequest::new(own).cost(9));
        let verdicts = in_time(limiter.acquire_all_by(&rules, requests())).await.expect("verdicts");
        assert!(verdicts.iter().all(|verdict| verdict.allowed && verdict.shadows[0].allowed));
        let verdicts = in_time(limiter.acquire_all_by(&rules, requests())).await.expect("verdicts");
        let rules_that_deny: Vec<_> = verdicts.iter().map(|verdict| verdict.rule.as_deref()).collect();
        assert_eq!(rules_that_deny, [Some("others"), Some("others")]);
        let used = |verdict: &Verdict| {
            let decided = verdict.shadows[0].decision.as_ref().expect("asked").as_ref().expect("a decision");
            decided.remaining
        };
        assert_eq!(verdicts.iter().map(used).collect::<Vec<_>>(), [22, 22], "shadow rules are charged all the same");

        let none: [RuleRequest<'_>; 0] = [];
        assert!(in_time(limiter.acquire_all_by(&rules, none)).await.expect("verdicts").is_empty());
        let by_id = attributes.iter().map(|own| RuleRequest::new(own).id("a"));
        let error = in_time(limiter.acquire_all_by(&rules, by_id)).await.expect_err("ids");
        assert_eq!((error.kind(), error.to_string().contains("a call has an id")), (ErrorKind::Input, true), "{error}");
        let many = (0..1001).map(|_| RuleRequest::new(&attributes[0]));
        let error = in_time(limiter.acquire_all_by(&rules, many)).await.expect_err("too many");
        assert!(error.to_string().contains("1000 calls"), "{error}");
    }
}
