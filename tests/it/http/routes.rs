//! Paths and routes as a real axum router sees them.

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::extract::MatchedPath;
use axum::http::{Request, Response, Uri};
use axum::routing::get;
use http_body_util::BodyExt;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tollgate::rules::{Attributes, Effect};
use tollgate_testing::effort::cases;
use tower::{ServiceExt, service_fn};

use super::{embedded, rule_set};

const ROUTES: [&str; 7] =
    ["/", "/api/health", "/api/{name}", "/api/{name}/items", "/api/%20", "/files/{*rest}", "/login/"];

/// For each route, the rule named so, as the documentation says to write them.
const RULES: [(&str, &str); 7] = [
    ("/api/health", "/api/health"),
    ("/api/%20", "/api/%20"),
    ("/api/{name}/items", "/api/*/items"),
    ("/api/{name}", "/api/*"),
    ("/files/{*rest}", "/files/*"),
    ("/login/", "/login/"),
    ("/", "/"),
];

fn segment() -> impl Strategy<Value = String> {
    let known = ["api", "health", "items", "files", "login", "%20", "", "a"].map(str::to_owned).to_vec();
    let other = ["%68ealth", "%61pi", "heal%74h", "item%73", "Health", ".", "..", "%2e", "a%2Fb", "%2F", "%5C", "%zz"];
    prop_oneof![3 => select(known), 1 => select(other.map(str::to_owned).to_vec())]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(5_000), failure_persistence: None, ..ProptestConfig::default() })]

    /// However a target is spelled, the rule of the route that axum serves it by applies, and no other.
    #[test]
    fn the_rule_of_the_route_that_axum_serves_applies(segments in vec(segment(), 0..=5)) {
        thread_local! {
            static ROUTER: Router = ROUTES.into_iter().fold(Router::new(), |router, route| {
                router.route(route, get(|path: MatchedPath| async move { path.as_str().to_owned() }))
            });
            static RULE_SET: tollgate::rules::RuleSet = rule_set(&RULES.iter().enumerate().fold(
                "paths = \"segments\"\n".to_owned(),
                |text, (at, (_, path))| text + &format!("[[rule]]\nname = \"r{at}\"\nmatch = {{ path = \"{path}\" }}\naction = \"block\"\n"),
            ));
        }
        let target = format!("/{}", segments.join("/"));
        prop_assume!(target.parse::<Uri>().is_ok());
        let served = ROUTER.with(|router| on_runtime(served(router, &target)));
        let applies = RULE_SET.with(|rules| {
            let applies = rules.applies(&Attributes::new().path(&target)).expect("a rule or none");
            applies.rule.map(|rule| RULES[rule[1..].parse::<usize>().expect("a number")].0)
        });
        if let Some(served) = served {
            prop_assert_eq!(applies, Some(served.as_str()), "{}", target);
        } else {
            // A final star stands for more than one segment, and for none.
            prop_assert!(matches!(applies, None | Some("/api/{name}" | "/files/{*rest}")), "{}: {:?}", target, applies);
        }
    }
}

/// A target by a router's rules: the route that serves it, and what its handler is given of it.
async fn served(router: &Router, target: &str) -> Option<String> {
    let request = Request::get(target).body(Body::empty()).expect("a request");
    let response = router.clone().oneshot(request).await.expect("infallible");
    let found = response.status().is_success();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    found.then(|| String::from_utf8(body.to_vec()).expect("text"))
}

fn on_runtime<T>(work: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| runtime.block_on(work))
}

/// Each character as it is, or encoded in one of two ways.
fn spelled(text: &'static str) -> impl Strategy<Value = String> {
    vec(0_u8..6, text.len()).prop_map(move |ways| {
        let spell = |(byte, way): (u8, u8)| match way {
            0 => format!("%{byte:02X}"),
            1 => format!("%{byte:02x}"),
            _ => char::from(byte).to_string(),
        };
        text.bytes().zip(ways).map(spell).collect()
    })
}

const LITERALS: [&str; 8] = ["@me", "a:b", "x,y;z", "$1+2", "hi!(it's)", "c=d&e", "f~g", "[0]"];

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(1_500), failure_persistence: None, ..ProptestConfig::default() })]

    /// Of a set that doesn't say how paths are read: what isn't refused comes under the rule of the route that serves
    /// it.
    #[test]
    fn a_spelling_that_is_not_refused_comes_under_the_rule_of_its_route(
        target in select(LITERALS.to_vec()).prop_flat_map(spelled)
    ) {
        thread_local! {
            static ROUTER: Router = LITERALS.into_iter().chain(["{name}"]).fold(Router::new(), |router, name| {
                router.route(&format!("/users/{name}"), get(|path: MatchedPath| async move { path.as_str().to_owned() }))
            });
            static RULE_SET: tollgate::rules::RuleSet = rule_set(&LITERALS.iter().chain(&["*"]).enumerate().fold(
                String::new(),
                |text, (at, name)| text + &format!("[[rule]]\nname = \"r{at}\"\nmatch = {{ path = \"/users/{name}\" }}\naction = \"block\"\n"),
            ));
        }
        let target = format!("/users/{target}");
        let route = ROUTER.with(|router| on_runtime(served(router, &target))).expect("each is served");
        RULE_SET.with(|rules| {
            let request = Attributes::new().path(&target);
            if !rules.reads_two_ways(&request) {
                let rule = rules.applies(&request).expect("a rule").rule.expect("a rule")[1..].to_owned();
                let name = LITERALS.get(rule.parse::<usize>().expect("a number")).unwrap_or(&"{name}");
                prop_assert_eq!(route, format!("/users/{name}"), "{}", target);
            }
            Ok(())
        })?;
    }

    /// Whatever spelling of it a handler is given, a key by path counts what it sees once.
    #[test]
    fn a_key_by_path_counts_what_a_handler_is_given(segments in vec(vec(segment(), 1..=4), 2..=6)) {
        thread_local! {
            static ROUTER: Router = Router::new()
                .route("/files/{*rest}", get(|axum::extract::Path(rest): axum::extract::Path<String>| async move {
                    format!("rest {rest}")
                }))
                .route("/names/{name}", get(|axum::extract::Path(name): axum::extract::Path<String>| async move {
                    format!("name {name}")
                }));
            static RULE_SET: tollgate::rules::RuleSet = rule_set(
                "paths = \"segments\"\n[[rule]]\nname = \"each\"\nkey = \"path\"\nlimits = [\"gcra 1/1h\"]",
            );
        }
        let mut keys = std::collections::HashMap::new();
        for segments in segments {
            for separator in ["/", "%2F", "%2f"] {
                for prefix in ["/files/", "/names/"] {
                    let target = format!("{prefix}{}", segments.join(separator));
                    if target.parse::<Uri>().is_err() {
                        continue;
                    }
                    let Some(seen) = ROUTER.with(|router| on_runtime(served(router, &target))) else { continue };
                    let key = RULE_SET.with(|rules| {
                        let applies = rules.applies(&Attributes::new().path(&target)).expect("a rule");
                        let Effect::Limit(charge) = applies.effect else { panic!("it has limits") };
                        charge.key().to_vec()
                    });
                    let before = keys.entry(seen).or_insert_with(|| key.clone());
                    prop_assert_eq!(before, &key, "{}", target);
                }
            }
        }
    }
}

/// Each spelling of a file's path is one more request for it.
#[tokio::test]
async fn spellings_of_a_rest_are_one_count() {
    let layer = embedded(
        "paths = \"segments\"\n[[rule]]\nname = \"each\"\nmatch = { path = \"/files/*\" }\nkey = \"path\"\n\
         limits = [\"fixed-window 2/1h start first-hit\"]\nblock = [\"path:/files/secret/plan\"]\n",
    );
    let app = Router::new().route("/files/{*rest}", get(|| async {})).layer(layer);
    let address = super::serve(app).await;
    let status = async |target: &str| {
        let request = format!("GET {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("connected");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        answer[9..12].parse::<u16>().expect("a status")
    };
    assert_eq!(status("/files/a/b/c").await, 200);
    assert_eq!(status("/files/a%2Fb%2fc").await, 200);
    for target in [
        "/files/a/b/c",
        "/files/a%2Fb/c",
        "/files/a/b%2fc",
        "/files/%61/b/c",
        "/files/a//b/c",
        "/files/a/./b/c",
        "/files/a/x/..%2Fb/c",
        "/files/a%5Cb/c",
        "/files/a/b/c/",
    ] {
        assert_eq!(status(target).await, 429, "{target}");
    }
    for target in ["/files/secret/plan", "/files/secret%2Fplan", "/files/%73ecret/plan", "/files/./secret//plan"] {
        assert_eq!(status(target).await, 403, "{target}");
    }
    assert_eq!(status("/files/a/b/d").await, 200);
}

/// An allow rule for a literal lets nothing else pass.
#[tokio::test]
async fn a_spelling_that_axum_serves_by_another_route_comes_under_its_limit() {
    let layer = embedded(
        "paths = \"segments\"\n\
         [[rule]]\nname = \"health\"\nmatch = { path = \"/api/health\" }\naction = \"allow\"\n\
         [[rule]]\nname = \"api\"\nmatch = { path = \"/api/*\" }\nkey = \"global\"\nlimits = [\"fixed-window 2/1h\"]\n",
    );
    let app = Router::new()
        .route("/api/health", get(|| async { "well" }))
        .route("/api/{name}", get(|| async { "work" }))
        .layer(layer);
    let mut statuses = Vec::new();
    for target in ["/api/%68ealth", "/api/h%65alth", "/api/heal%74h", "/api/health", "/api/health"] {
        let request = Request::get(target).body(Body::empty()).expect("a request");
        statuses.push(app.clone().oneshot(request).await.expect("infallible").status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 429, 200, 200]);
}

/// What no route takes is counted and answered as well: a rule by route denies nothing for want of one.
#[tokio::test]
async fn fallbacks_and_nested_services_have_the_route_none() {
    let layer = embedded(
        "[[rule]]\nname = \"unrouted\"\nmatch = { route = \"none\", path = \"/static/*\" }\nkey = \"global\"\n\
         limits = [\"fixed-window 2/1h\"]\n\
         [[rule]]\nname = \"all\"\nkey = \"route\"\nlimits = [\"fixed-window 3/1h\"]\n",
    );
    let files = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::from("file"))) });
    let inner = Router::new().route("/items", get(|| async { "items" }));
    let app = Router::new()
        .route("/users/{id}", get(|| async { "a user" }))
        .nest_service("/static", files)
        .nest("/api", inner)
        .layer(layer);
    let statuses = async |target: &str, times: usize| {
        let mut statuses = Vec::new();
        for _ in 0..times {
            let request = Request::get(target).body(Body::empty()).expect("a request");
            statuses.push(app.clone().oneshot(request).await.expect("infallible").status().as_u16());
        }
        statuses
    };
    assert_eq!(statuses("/static/a", 3).await, [200, 200, 429]);
    assert_eq!(statuses("/nowhere", 2).await, [404, 404]);
    assert_eq!(statuses("/api/nowhere", 2).await, [404, 429], "together with the other fallback");
    assert_eq!(statuses("/users/1", 4).await, [200, 200, 200, 429]);
    assert_eq!(statuses("/api/items", 1).await, [200]);
}
