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
use tollgate::rules::Attributes;
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
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// However a target is spelled, the rule of the route that axum serves it by applies, and no other.
    #[test]
    fn the_rule_of_the_route_that_axum_serves_applies(segments in vec(segment(), 0..=5)) {
        thread_local! {
            static RUNTIME: tokio::runtime::Runtime =
                tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
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
        let served = ROUTER.with(|router| {
            let request = Request::get(&target).body(Body::empty()).expect("a request");
            RUNTIME.with(|runtime| runtime.block_on(async {
                let response = router.clone().oneshot(request).await.expect("infallible");
                let found = response.status().is_success();
                let body = response.into_body().collect().await.expect("a body").to_bytes();
                found.then(|| String::from_utf8(body.to_vec()).expect("text"))
            }))
        });
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
