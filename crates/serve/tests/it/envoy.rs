//! Envoy's protocol, by a client of gRPC.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use envoy_types::pb::google::protobuf::{UInt64Value, value::Kind};
use futures_util::future::join_all;
use tollgate::middleware::HeaderStyle;
use tollgate::rules::Descriptors;
use tollgate::{Limiter, OnError, Redis};
use tollgate_serve::{Service, Tokens, Unmatched};
use tollgate_testing::polling::in_time;
use tollgate_testing::redis_server::Server;
use tonic::transport::Channel;
use tonic::{Code as Status, Request};

use crate::client::{Connection, post};
use crate::running::{Running, builder};

const RULES: &str = r#"
    [[rule]]
    name = "watched"
    shadow = true
    match = { user = "*" }
    key = "user"
    limits = ["fixed-window 3/30d"]

    [[rule]]
    name = "nobody"
    match = { user = "mallory" }
    action = "block"
    message = "not you"

    [[rule]]
    name = "users"
    match = { domain = "shop", user = "*" }
    key = "user"
    limits = ["fixed-window 10/30d"]
    message = "slow down"

    [[rule]]
    name = "addresses"
    match = { remote_address = "*" }
    key = "ip"
    limits = ["token-bucket 100/1m burst 20"]

    [[rule]]
    name = "large"
    match = { kind = "large" }
    key = "domain"
    limits = ["token-bucket 5000000000/1h"]

    [[rule]]
    name = "month"
    match = { kind = "month" }
    key = "domain"
    limits = ["fixed-window 70/month"]

    [[rule]]
    name = "jobs"
    match = { kind = "job" }
    key = "domain"
    limits = ["concurrency 2 ttl 30s"]
"#;

type Client = RateLimitServiceClient<Channel>;

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).into(), value: (*value).into() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

fn hits(units: u64, entries: &[(&str, &str)]) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(UInt64Value { value: units }), ..descriptor(entries) }
}

async fn ask(client: &mut Client, descriptors: &[RateLimitDescriptor], hits_addend: u32) -> RateLimitResponse {
    let request = RateLimitRequest { domain: "shop".into(), descriptors: descriptors.to_vec(), hits_addend };
    in_time(client.should_rate_limit(request)).await.expect("a response").into_inner()
}

async fn refused(client: &mut Client, request: RateLimitRequest) -> (Status, String) {
    let status = in_time(client.should_rate_limit(request)).await.expect_err("no response");
    (status.code(), status.message().to_owned())
}

/// Of each status: whether it is within its limit, and what remains.
fn codes(response: &RateLimitResponse) -> Vec<(bool, u32)> {
    let of = |status: &DescriptorStatus| (status.code() == Code::Ok, status.limit_remaining);
    response.statuses.iter().map(of).collect()
}

fn over(response: &RateLimitResponse) -> bool {
    response.overall_code() == Code::OverLimit
}

#[tokio::test]
async fn each_descriptor_has_a_status_and_all_are_charged_or_none() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    let (ada, bob) = (descriptor(&[("user", "ada")]), descriptor(&[("user", "bob")]));
    let address = descriptor(&[("remote_address", "192.0.2.1")]);

    let response = ask(client, &[ada.clone(), address.clone()], 0).await;
    assert_eq!((over(&response), codes(&response)), (false, vec![(true, 9), (true, 19)]));
    let limit = response.statuses[0].current_limit.clone().expect("a limit");
    // 10 in 30 days are 121 in a year, rounded down.
    assert_eq!((limit.requests_per_unit, limit.unit()), (121, Unit::Year));
    assert_eq!(limit.name, "fixed-window 10/30d");
    let limit = response.statuses[1].current_limit.clone().expect("a limit");
    assert_eq!((limit.requests_per_unit, limit.unit()), (100, Unit::Minute));
    let reset = response.statuses[1].duration_until_reset.expect("a time");
    assert_eq!((reset.seconds, reset.nanos), (1, 0), "600 ms, rounded up");

    // Nothing is taken of the address, since the user has too little left.
    let response = ask(client, &[ada.clone(), address.clone()], 10).await;
    assert_eq!((over(&response), codes(&response)), (true, vec![(false, 9), (true, 19)]));
    assert_eq!(response.raw_body, b"slow down");
    // A descriptor's own number of hits comes before the request's; two of one key take the sum.
    let response = ask(client, &[hits(4, &[("user", "ada")]), hits(5, &[("user", "ada")]), bob.clone()], 2).await;
    assert_eq!(codes(&response), [(true, 0), (true, 0), (true, 8)]);
    // What a rule blocks takes nothing of the others.
    let response = ask(client, &[descriptor(&[("user", "mallory")]), bob.clone()], 1).await;
    assert_eq!((over(&response), codes(&response)), (true, vec![(false, 0), (true, 8)]));
    assert_eq!(response.raw_body, b"not you");
    running.end().await;
}

#[tokio::test]
async fn each_descriptor_by_itself_takes_what_it_may() {
    let server = Server::start();
    let both = [hits(11, &[("user", "ada")]), descriptor(&[("remote_address", "2001:db8::1")])];
    let each = format!("descriptors = \"each\"\n{RULES}");
    for (service, remaining) in [
        (builder(&server, RULES), 20),
        (builder(&server, &each), 19),
        (builder(&server, &each).descriptors(Descriptors::Together), 19),
        (builder(&server, RULES).descriptors(Descriptors::Each), 18),
    ] {
        let running = Running::start(service.build()).await;
        let client = &mut running.client().await;
        let response = ask(client, &both, 0).await;
        assert_eq!((over(&response), codes(&response)), (true, vec![(false, 10), (true, remaining)]));
        running.end().await;
    }
}

#[tokio::test]
async fn no_hits_only_look_and_negative_ones_are_given_back() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    let look = || hits(0, &[("user", "ada")]);
    assert_eq!(codes(&ask(client, &[look()], 0).await), [(true, 10)]);
    assert_eq!(codes(&ask(client, &[hits(10, &[("user", "ada")])], 0).await), [(true, 0)]);
    assert_eq!(codes(&ask(client, &[look()], 7).await), [(false, 0)], "no unit is left");
    // What a look denies takes nothing of the others.
    let response = ask(client, &[look(), hits(1, &[("user", "bob")])], 0).await;
    assert_eq!(codes(&response), [(false, 0), (true, 10)]);
    let back = RateLimitDescriptor { is_negative_hits: true, ..hits(3, &[("user", "ada")]) };
    // Nor is anything given back where another descriptor denies, or is an error.
    let response = ask(client, &[back.clone(), hits(11, &[("user", "bob")])], 0).await;
    assert_eq!((over(&response), response.statuses[0].limit_remaining), (true, 0));
    let descriptors = vec![back.clone(), descriptor(&[("kind", "job")])];
    let (code, _) = refused(client, RateLimitRequest { domain: "shop".into(), descriptors, hits_addend: 0 }).await;
    assert_eq!(code, Status::InvalidArgument);
    assert_eq!(codes(&ask(client, &[back], 0).await), [(true, 3)]);
    let response = ask(client, &[look(), hits(1, &[("user", "bob")])], 0).await;
    assert_eq!(codes(&response), [(true, 3), (true, 9)]);
    running.end().await;
}

#[tokio::test]
async fn a_descriptor_may_bring_a_limit_of_its_own() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    let own = |requests_per_unit, unit: RateLimitUnit| {
        let limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into() });
        RateLimitDescriptor { limit, ..descriptor(&[("user", "ada")]) }
    };
    for (unit, of_status) in [
        (RateLimitUnit::Hour, Unit::Hour),
        (RateLimitUnit::Day, Unit::Day),
        (RateLimitUnit::Month, Unit::Month),
        (RateLimitUnit::Year, Unit::Year),
    ] {
        let response = ask(client, &[own(2, unit)], 0).await;
        let limit = response.statuses[0].current_limit.clone().expect("a limit");
        assert_eq!((codes(&response), limit.requests_per_unit), (vec![(true, 1)], 2), "{unit:?}");
        assert_eq!(limit.unit(), of_status);
        assert_eq!(codes(&ask(client, &[own(2, unit)], 2).await), [(false, 1)]);
    }
    let response = ask(client, &[own(0, RateLimitUnit::Second)], 0).await;
    let limit = response.statuses[0].current_limit.clone().expect("a limit");
    assert_eq!((codes(&response), limit.requests_per_unit), (vec![(false, 0)], 0));
    let request =
        |descriptor| RateLimitRequest { domain: "shop".into(), descriptors: vec![descriptor], hits_addend: 0 };
    let (code, why) = refused(client, request(own(1, RateLimitUnit::Unknown))).await;
    assert_eq!((code, why.as_str()), (Status::InvalidArgument, "limit: expected a unit from SECOND to YEAR, got 0"));
    running.end().await;
}

/// As `tollgate rules import` names them.
#[tokio::test]
async fn a_key_that_comes_again_is_an_attribute_of_its_own() {
    let server = Server::start();
    let rules = "[[rule]]\nname = \"pairs\"\nmatch = { key = \"a\", \"key.2\" = \"b\" }\nkey = [\"key\", \"key.2\"]\nlimits = [\"fixed-window 2/30d\"]";
    let running = Running::start(builder(&server, rules).build()).await;
    let client = &mut running.client().await;
    assert_eq!(codes(&ask(client, &[descriptor(&[("key", "a"), ("key", "b")])], 0).await), [(true, 1)]);
    assert_eq!(codes(&ask(client, &[descriptor(&[("key", "b"), ("key", "a")])], 0).await), [(true, 0)], "no rule");
    running.end().await;
}

#[tokio::test]
async fn numbers_saturate_at_what_the_protocol_holds() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    let response = ask(client, &[descriptor(&[("kind", "large")]), descriptor(&[("kind", "month")])], 0).await;
    assert_eq!(codes(&response), [(true, u32::MAX), (true, 69)]);
    let limits: Vec<_> = response.statuses.iter().filter_map(|status| status.current_limit.clone()).collect();
    assert_eq!((limits[0].requests_per_unit, limits[0].unit()), (u32::MAX, Unit::Hour));
    assert_eq!((limits[1].requests_per_unit, limits[1].unit()), (70, Unit::Month));
    let reset = response.statuses[1].duration_until_reset.expect("a time").seconds;
    assert!((1..=31 * 86_400).contains(&reset), "{reset}");

    let request = |domain: &str, descriptors| RateLimitRequest { domain: domain.into(), descriptors, hits_addend: 1 };
    let user = || descriptor(&[("user", "ada")]);
    for (request, why) in [
        (request("", vec![user()]), "domain: it is missing: it names the set of limits that apply"),
        (request("shop", vec![]), "descriptors: expected 1 to 100, got 0"),
        (request("shop", vec![user(); 101]), "descriptors: expected 1 to 100, got 101"),
        (
            request("shop", vec![hits(u64::MAX, &[("user", "ada")])]),
            "hits_addend: expected at most 2^53 units, got 18446744073709551615",
        ),
    ] {
        assert_eq!(refused(client, request).await, (Status::InvalidArgument, why.to_owned()));
    }
    // A gateway has no ids, so nobody could give the permit back.
    let (code, why) = refused(client, request("shop", vec![descriptor(&[("kind", "job")])])).await;
    assert_eq!((code, why.contains("id")), (Status::InvalidArgument, true), "{why}");
    running.end().await;
}

#[tokio::test]
async fn where_no_rule_applies_the_answer_is_chosen() {
    let server = Server::start();
    for (unmatched, allowed) in [(Unmatched::Allow, true), (Unmatched::Deny, false)] {
        let running = Running::start(builder(&server, RULES).unmatched(unmatched).build()).await;
        let client = &mut running.client().await;
        let user = if allowed { "ada" } else { "bob" };
        let response = ask(client, &[descriptor(&[("usr", "ada")]), descriptor(&[("user", user)])], 0).await;
        assert_eq!(over(&response), !allowed);
        assert_eq!(codes(&response), [(allowed, 0), (true, if allowed { 9 } else { 10 })], "{unmatched:?}");
        // A client hears of what denies it, which has nothing to say here.
        assert_eq!(response.response_headers_to_add.is_empty(), !allowed);
        running.end().await;
    }
}

#[tokio::test]
async fn shadow_rules_are_counted_and_told_and_deny_nothing() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    for round in 1..=5 {
        let response = ask(client, &[descriptor(&[("user", "ada")]), descriptor(&[("user", "bob")])], 0).await;
        assert!(!over(&response), "round {round}");
        let told = &response.dynamic_metadata.expect("metadata").fields;
        let text = |name: &str| match told.get(name)?.kind.clone()? {
            Kind::StringValue(text) => Some(text),
            _ => None,
        };
        assert_eq!((text("rule").as_deref(), text("reason").as_deref()), (Some("users"), Some("limits")));
        let denied = match told.get("shadow_denied").and_then(|value| value.kind.clone()) {
            Some(Kind::ListValue(list)) => list.values.len(),
            _ => 0,
        };
        assert_eq!(denied, if round > 3 { 2 } else { 0 }, "round {round}");
    }
    running.end().await;
}

#[tokio::test]
async fn clients_get_the_header_fields_of_the_chosen_style() {
    let server = Server::start();
    for (style, expected) in [
        (HeaderStyle::Draft, ["retry-after", "ratelimit-policy", "ratelimit"].as_slice()),
        (HeaderStyle::XRateLimit, &["retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]),
        (HeaderStyle::RateLimit, &["retry-after", "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"]),
        (HeaderStyle::Off, &["retry-after"]),
    ] {
        let running = Running::start(builder(&server, RULES).header_style(style).build()).await;
        let response = ask(&mut running.client().await, &[descriptor(&[("remote_address", "192.0.2.9")])], 1000).await;
        // A cost that never fits has no time at which to come back.
        let never: Vec<_> = response.response_headers_to_add.iter().map(|field| field.key.as_str()).collect();
        assert!(!never.contains(&"retry-after"), "{never:?}");
        let user = format!("{style:?}");
        let full = [hits(10, &[("user", &user)])];
        let response = ask(&mut running.client().await, &full, 0).await;
        assert!(!over(&response));
        let response = ask(&mut running.client().await, &full, 0).await;
        let fields: Vec<_> = response.response_headers_to_add.iter().map(|field| field.key.as_str()).collect();
        assert_eq!(fields, expected, "{style:?}");
        running.end().await;
    }
}

#[tokio::test]
async fn without_redis_the_policy_answers() {
    // Nobody listens there.
    let limiter = || Limiter::builder(Redis::open("redis://127.0.0.1:1").expect("an address"));
    let rules: tollgate::rules::RuleSet = RULES.parse().expect("rules");
    let closed = Running::start(Service::new(limiter().build(), rules.clone())).await;
    let request =
        RateLimitRequest { domain: "shop".into(), descriptors: vec![descriptor(&[("user", "ada")])], hits_addend: 0 };
    let (code, _) = refused(&mut closed.client().await, request).await;
    assert!([Status::Unavailable, Status::DeadlineExceeded].contains(&code), "{code:?}");
    let open = Running::start(Service::new(limiter().on_error(OnError::Open).build(), rules)).await;
    let response = ask(&mut open.client().await, &[descriptor(&[("user", "ada")])], 0).await;
    assert!(!over(&response));
    closed.end().await;
    open.end().await;
}

#[tokio::test]
async fn two_services_on_one_redis_admit_exactly_what_the_rule_does() {
    let server = Server::start();
    let rules = "[[rule]]\nname = \"all\"\nkey = \"domain\"\nlimits = [\"fixed-window 150/30d\"]";
    let services =
        [Running::start(builder(&server, rules).build()).await, Running::start(builder(&server, rules).build()).await];
    let mut clients = Vec::new();
    for at in 0..8 {
        clients.push(services[at % 2].client().await);
    }
    let calls = (0..400).map(|at| {
        let mut client = clients[at % 8].clone();
        async move { ask(&mut client, &[descriptor(&[("any", "thing")])], 0).await }
    });
    let allowed = join_all(calls).await.iter().filter(|response| !over(response)).count();
    assert_eq!(allowed, 150);
    for service in services {
        service.end().await;
    }
}

#[tokio::test]
async fn a_token_is_asked_of_gateways_too() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).tokens(Tokens::new(["secret"])).build()).await;
    let client = &mut running.client().await;
    let message = || RateLimitRequest {
        domain: "shop".into(),
        descriptors: vec![descriptor(&[("user", "ada")])],
        hits_addend: 0,
    };
    assert_eq!(refused(client, message()).await.0, Status::Unauthenticated);
    for (token, right) in [("Bearer secret", true), ("Bearer wrong", false)] {
        let mut request = Request::new(message());
        request.metadata_mut().insert("authorization", token.parse().expect("a value"));
        assert_eq!(in_time(client.should_rate_limit(request)).await.is_ok(), right, "{token}");
    }
    running.end().await;
}

/// Whatever descriptors say, there is an answer, and the service goes on.
#[tokio::test]
async fn odd_descriptors_end_nothing() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    let long = "x".repeat(70_000);
    let mut outcomes = HashMap::new();
    let mut rng = fastrand::Rng::with_seed(51);
    let words =
        ["", "user", "ip", "path", "method", "remote_address", "domain", "\n", "\0", "é", "kind", long.as_str()];
    for _ in 0..500 {
        let entries: Vec<_> =
            (0..rng.usize(0..4)).map(|_| (words[rng.usize(0..12)], words[rng.usize(0..12)])).collect();
        let one = hits(rng.u64(0..4), &entries);
        let request =
            RateLimitRequest { domain: words[rng.usize(1..11)].into(), descriptors: vec![one], hits_addend: 0 };
        let code = match in_time(client.should_rate_limit(request)).await {
            Ok(_) => Status::Ok,
            Err(status) => status.code(),
        };
        *outcomes.entry(format!("{code:?}")).or_insert(0) += 1;
    }
    let known = ["Ok", "InvalidArgument", "OutOfRange"];
    assert!(outcomes.keys().all(|code| known.contains(&code.as_str())), "{outcomes:?}");
    assert_eq!(codes(&ask(client, &[descriptor(&[("user", "carol")])], 0).await), [(true, 9)]);
    tokio::time::timeout(Duration::from_secs(60), running.end()).await.expect("an end");
}

#[tokio::test]
async fn a_descriptor_of_very_many_entries_is_refused_at_once() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let client = &mut running.client().await;
    let names: Vec<_> = (0..100).map(|at| format!("k{at}")).collect();
    let most: Vec<_> = names.iter().map(|name| (name.as_str(), "a")).collect();
    assert_eq!(codes(&ask(client, &[descriptor(&most)], 0).await), [(true, 0)]);
    let descriptors = vec![RateLimitDescriptor { entries: vec![Entry::default(); 50_000], ..descriptor(&[]) }];
    let refusal = refused(client, RateLimitRequest { domain: "shop".into(), descriptors, hits_addend: 0 }).await;
    let expected = "entries: expected at most 100 in a descriptor, got 50000";
    assert_eq!(refusal, (Status::InvalidArgument, expected.to_owned()));
    running.end().await;
}

#[tokio::test]
async fn several_descriptors_have_one_deadline() {
    let server = Server::start();
    let deadline = Duration::from_secs(3);
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("an address")).deadline(deadline);
    let rules = RULES.parse::<tollgate::rules::RuleSet>().expect("rules");
    let running = Running::start(Service::new(limiter.on_error(OnError::Open).build(), rules)).await;
    let client = &mut running.client().await;
    let look = hits(0, &[("user", "ada")]);
    let back = RateLimitDescriptor { is_negative_hits: true, ..hits(1, &[("user", "eve")]) };
    let all = [look, descriptor(&[("user", "bob")]), back];
    assert!(!over(&ask(client, &all, 0).await));
    server.signal("-STOP");
    let began = Instant::now();
    assert!(!over(&ask(client, &all, 0).await), "the policy answers");
    assert!(began.elapsed() < deadline * 2, "{:?}", began.elapsed());
    server.signal("-CONT");
    running.end().await;
}

/// As Envoy hands on a header field or a query that a visitor wrote.
#[tokio::test]
async fn a_value_that_is_no_text_is_counted_and_a_message_that_is_none_is_told() {
    let server = Server::start();
    let rules = "[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"fixed-window 3/30d\"]";
    let running = Running::start(builder(&server, rules).build()).await;
    let send = async |message: &[u8]| {
        let mut connection = Connection::open(&running.grpc).await;
        let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
        let length = 5 + message.len();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: {length}");
        let frame = [&[0, 0, 0, 0, u8::try_from(message.len()).expect("short")], message].concat();
        connection.write(&[format!("{head}\r\n\r\n").as_bytes(), &frame].concat()).await.expect("a request");
        connection.answer().await.expect("an answer")
    };
    let entry = b"\x0a\x04user\x12\x02a\xff";
    let message = [b"\x0a\x04shop\x12\x0c\x0a\x0a", entry.as_slice()].concat();
    for _ in 0..2 {
        // Its status is behind the message.
        assert_eq!(send(&message).await.field("grpc-status"), None);
    }
    let left = post(&running.http, "/v1/peek", &serde_json::json!({ "attributes": { "user": "a%FF" } })).await;
    assert_eq!(left.json()["remaining"], 1, "{left:?}");
    let answer = send(b"\x0a\x7fshop").await;
    assert_eq!((answer.status, answer.field("grpc-status")), (200, Some("13")), "{answer:?}");
    running.end().await;
}
