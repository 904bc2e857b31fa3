//! nginx: places with their limits, and a model of its arithmetic: a bucket that leaks in whole milliseconds, and
//! counts in thousandths of a request.

use fastrand::Rng;
use tollgate_testing::effort::cases;

use super::*;

const SITE: &str = r#"user www;
http {
    limit_req_zone $binary_remote_addr zone=one:10m rate=10r/s;
    limit_req_zone $http_x_api_key$request_method zone=key:1m rate=100r/m;
    limit_conn_zone $binary_remote_addr zone=addr:10m;
    limit_req_status 429;
    include conf.d/*.conf;
    server {
        listen 443 ssl; server_name example.com *.example.com;
        limit_req zone=one burst=20 nodelay;
        location / {
            proxy_pass http://backend;
            proxy_set_header Authorization "Bearer of-a-secret";
        }
        location /search/ {
            limit_req zone=one burst=5;
            limit_req zone=key burst=10 delay=3;
        }
        location /d/ { limit_conn addr 2; }
        location = /health {
            limit_req_dry_run on;
            limit_req_log_level warn;
        }
        location ~ \.php$ {
            fastcgi_pass backend;
        }
    }
}
"#;

#[test]
fn each_line_of_a_site_is_a_rule_or_told() {
    let imported = import("nginx", SITE);
    let delayed = |after: &str, burst: u8, wait: &str| {
        format!(
            "nginx delays requests above the rate{after}; here they are let through at once. To delay them, set burst \
             {burst} and let the middleware wait up to {wait} s (RateLimitLayer::wait)"
        )
    };
    let include = "include: the included text is missing; nginx -T prints all files as one";
    let php = "location ~ \\\\.php$: a path has no such pattern; its requests are counted by the limits of other \
               locations";
    let shared = "zone one: counts by itself here, and in nginx together with the limit of line";
    let differs = [
        format!("line 7: {include}"),
        format!("line 10: {shared} 10"),
        format!("line 16: {shared} 10"),
        format!("line 16: {}", delayed("", 1, "0.500")),
        format!("line 17: {}", delayed(" after 3 of the burst", 4, "4.200")),
        format!("line 24: {php}"),
    ];
    assert_eq!(list(&imported.rules, "What differs"), differs);
    let warnings = differs.map(|line| line.replacen("line ", "-:", 1).replacen(": ", ": warning: ", 1));
    assert_eq!(imported.warnings, warnings);
    let left = [
        "line 1: user: limits nothing",
        &format!("line 7: {include}"),
        "line 9: listen: limits nothing",
        "line 12: proxy_pass: limits nothing",
        "line 13: proxy_set_header: limits nothing",
        "line 22: is about logging",
        "line 25: fastcgi_pass: limits nothing",
    ];
    assert_eq!(list(&imported.rules, "What isn't translated"), left);
    assert!(!imported.rules.contains("of-a-secret"), "{}", imported.rules);

    let mut service = Service::new(&imported.rules);
    let from = |address: &str, path: &str| request([("ip", address), ("path", path)]);
    assert_eq!(service.allowed_of(40, &from("192.0.2.1", "/")), 21);
    assert_eq!(service.allowed_of(40, &from("192.0.2.1", "/search/x")), 6);
    assert_eq!(service.allowed_of(40, &from("192.0.2.1", "/health")), 40);
    // The key has 11 of any addresses.
    let keyed = |address: &str| {
        let more = request([("http_x_api_key", "k"), ("method", "GET")]);
        Pairs::from_iter(from(address, "/search/x").into_iter().chain(more))
    };
    assert_eq!(["192.0.2.2", "192.0.2.3"].map(|address| service.allowed_of(40, &keyed(address))), [6, 5]);
}

#[test]
fn connections_are_permits_that_are_given_back() {
    let text = "limit_conn_zone $binary_remote_addr zone=a:1m;\nlimit_conn a 2;\nlimit_conn_dry_run off;\n";
    let rules: RuleSet = import_exactly("nginx", text).parse().expect("rules");
    let limiter = Limiter::new(Embedded::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let request = Attributes::new().ip("192.0.2.1".parse().expect("an address"));
        let applies = rules.applies(&request).expect("a rule");
        let tollgate::rules::Effect::Limit(charge) = applies.effect else { panic!("{applies:?}") };
        let hold = async || limiter.hold(charge.rule(), charge.request()).await.expect("a decision").into_result().ok();
        let (first, second) = (hold().await.expect("one"), hold().await.expect("another"));
        assert!(hold().await.is_none());
        first.release().await.expect("released");
        assert!(hold().await.is_some());
        drop(second);
    });
}

#[test]
fn servers_are_hosts_and_one_that_only_sends_on_is_nobodys() {
    let text = "limit_req_zone $binary_remote_addr zone=a:1m rate=1r/s;\nlimit_req_zone $host zone=b:1m rate=1r/s;\n\
                server { listen 80; server_name a.example b.example; return 301 https://$host; }\n\
                server { listen 443; server_name a.example; limit_req zone=a burst=3 nodelay; }\n\
                server { listen 443; server_name b.example; location /x/ { limit_req zone=b burst=1 nodelay; } }\n\
                server { listen 443; server_name c.example; }\n";
    let rules = import_exactly("nginx", text);
    let mut service = Service::new(&rules);
    let to = |host: &str, path: &str| request([("ip", "192.0.2.1"), ("host", host), ("path", path)]);
    let counts = [("a.example", "/"), ("b.example", "/x/y"), ("b.example", "/"), ("c.example", "/")];
    assert_eq!(counts.map(|(host, path)| service.allowed_of(9, &to(host, path))), [4, 2, 9, 9], "{rules}");
}

#[test]
fn what_decides_otherwise_than_in_nginx_is_a_warning() {
    let text = |rest: &str| {
        format!(
            "limit_req_zone $binary_remote_addr zone=a:1m rate=1r/s;\nlimit_req_zone $request_uri zone=u:1m rate=1r/s;\n{rest}\n"
        )
    };
    for (rest, expected) in [
        (
            "server { location /a { limit_req zone=a nodelay; } }",
            "3: warning: location /a: takes /a and /a/... here, and",
        ),
        ("server { limit_req zone=u nodelay; }", "2: warning: zone u: a path has no query, which $request_uri has"),
        (
            "server { location ~ x { limit_req zone=a nodelay; } location /b/ { limit_req zone=a; } }",
            "3: warning: location ~ x: a path has no such pattern, so its limits are left out",
        ),
        (
            "server { server_name a.x; limit_req zone=a; } server { server_name b.x; limit_req zone=a; location /q/ { limit_req zone=u; } }",
            "3: warning: zone a: in nginx, several servers share its counts; here, each has its own",
        ),
        (
            "server { location /a/ { limit_req zone=a; } location /a/b/ { limit_req zone=u; } location /c/ { limit_req zone=u; } location /c/d/ { limit_req zone=a; } }",
            "3: warning: zone a: in nginx, several locations share its counts; here, each has its own",
        ),
        (
            "server { server_name a.x *.a.x; limit_req zone=a; } server { server_name b.x; }",
            "3: warning: server_name *.a.x: hosts have no patterns",
        ),
        (
            "limit_zone x $binary_remote_addr 1m; server { limit_req zone=a; }",
            "3: warning: limit_zone: not in nginx since 1.7.6",
        ),
        (
            "stream { server { limit_conn x 1; } } server { limit_req zone=a; }",
            "3: warning: stream: connections that aren't HTTP",
        ),
    ] {
        let warnings = import("nginx", &text(rest)).warnings;
        assert!(warnings.iter().any(|line| line.starts_with(&format!("-:{expected}"))), "{rest}\n{warnings:?}");
    }
}

/// A zone's rate in thousandths of a request a second, and its states: excess and last time, by key.
#[derive(Default)]
struct Zone {
    rate: u64,
    states: BTreeMap<String, (u64, u64)>,
}

impl Zone {
    /// The excess that a request would leave: what leaks is cut to a thousandth.
    fn excess(&self, key: &str, now_ms: u64) -> u64 {
        match self.states.get(key) {
            Some((excess, last)) => (excess + 1000).saturating_sub(self.rate * (now_ms - last) / 1000),
            None => 0,
        }
    }

    /// Charges it. Within one millisecond, the time stays.
    fn account(&mut self, key: &str, now_ms: u64, excess: u64) {
        let last = self.states.get(key).map_or(now_ms, |(_, last)| *last).max(now_ms);
        self.states.insert(key.to_owned(), (excess, last));
    }
}

/// A place with its limits: zone and burst.
#[derive(Debug)]
struct Location {
    path: &'static str,
    is_exact: bool,
    /// None of its own if empty: then those of the server.
    limits: Vec<(usize, u64)>,
    dry_run: bool,
}

const PLACES: [(&str, bool); 6] =
    [("/", false), ("/a/", false), ("/a/b/", false), ("/c/", false), ("/a/b/x", true), ("/c/d/", false)];
const PATHS: [&str; 7] = ["/", "/a/q", "/a/b/q", "/a/b/x", "/c/q", "/c/d/q", "/e"];

fn random_limits(random: &mut Rng) -> Vec<(usize, u64)> {
    let zones: Vec<usize> = (0..2).filter(|_| random.u8(..3) > 0).collect();
    let mut limits: Vec<_> = zones.into_iter().map(|zone| (zone, [0, 2, 5][random.usize(..3)])).collect();
    random.shuffle(&mut limits);
    limits
}

fn write_limits(limits: &[(usize, u64)], dry_run: bool) -> String {
    let limits = limits.iter().map(|(zone, burst)| format!(" limit_req zone=z{zone} burst={burst} nodelay;"));
    limits.collect::<String>() + if dry_run { " limit_req_dry_run on;" } else { "" }
}

/// All limits allow, and are charged; or none is.
fn allows(zones: &mut [Zone], limits: &[(usize, u64)], key: &[&str; 2], now_ms: u64) -> bool {
    let excesses: Vec<_> = limits.iter().map(|(zone, _)| zones[*zone].excess(key[*zone], now_ms)).collect();
    let fits = limits.iter().zip(&excesses).all(|((_, burst), excess)| *excess <= burst * 1000);
    if fits {
        limits.iter().zip(excesses).for_each(|((zone, _), excess)| zones[*zone].account(key[*zone], now_ms, excess));
    }
    fits
}

/// nginx's choice: the exact path, then the longest prefix.
fn chosen<'l>(locations: &'l [Location], path: &str) -> Option<&'l Location> {
    let exact = locations.iter().find(|location| location.is_exact && location.path == path);
    let prefixes = locations.iter().filter(|location| !location.is_exact && path.starts_with(location.path));
    exact.or_else(|| prefixes.max_by_key(|location| location.path.len()))
}

#[test]
fn random_sites_decide_as_the_model_does() {
    let mut random = Rng::with_seed(13);
    let (mut exact, mut places, mut verdicts) = (0_u32, 0_usize, [0, 0]);
    let all = cases(60);
    for _ in 0..all {
        let rates = [random.u64(1..=20), random.u64(1..=3) * 7];
        let of_server = random_limits(&mut random);
        let locations: Vec<_> = PLACES.into_iter().filter(|_| random.u8(..3) == 0).collect();
        let locations: Vec<_> = locations
            .into_iter()
            .map(|(path, is_exact)| {
                let limits = if random.bool() { random_limits(&mut random) } else { Vec::new() };
                Location { path, is_exact, limits, dry_run: random.u8(..6) == 0 }
            })
            .collect();
        let mut text = format!(
            "limit_req_zone $binary_remote_addr zone=z0:1m rate={}r/s;\nlimit_req_zone $uri zone=z1:1m rate={}r/s;\nserver {{{}\n",
            rates[0],
            rates[1],
            write_limits(&of_server, false)
        );
        for location in &locations {
            let sign = if location.is_exact { "= " } else { "" };
            text += &format!(
                "  location {sign}{} {{{} }}\n",
                location.path,
                write_limits(&location.limits, location.dry_run)
            );
        }
        text += "}\n";
        // No limit at all is an error.
        if !text.contains("limit_req zone") {
            continue;
        }
        let imported = import("nginx", &text);
        if !imported.warnings.is_empty() {
            continue;
        }
        (exact, places) = (exact + 1, places + locations.len());
        let rules = imported.rules;
        let mut zones = rates.map(|rate| Zone { rate: rate * 1000, ..Zone::default() });
        let (mut service, mut now_ms) = (Service::new(&rules), START_MS);
        for _ in 0..150 {
            now_ms += [0, 0, 1, 33, 101, 1500][random.usize(..6)];
            let (address, path) = (["192.0.2.1", "192.0.2.2"][random.usize(..2)], PATHS[random.usize(..7)]);
            let location = chosen(&locations, path);
            let own = location.map(|location| &location.limits).filter(|limits| !limits.is_empty());
            let limits = own.unwrap_or(&of_server);
            let dry_run = location.is_some_and(|location| location.dry_run);
            let expected = allows(&mut zones, limits, &[address, path], now_ms) || dry_run;
            let got = service.allows(now_ms, &request([("ip", address), ("path", path)]));
            assert_eq!(got, expected, "{address} {path} at {now_ms}\n{text}\n{rules}");
            verdicts[usize::from(got)] += 1;
        }
    }
    println!("{exact} of {all} configurations without a warning, with {places} locations: {verdicts:?}");
    assert!(
        exact > all / 4 && places > exact as usize && verdicts.iter().all(|count| *count > 1000),
        "{exact} {places} {verdicts:?}"
    );
}

/// What leaks in nginx is cut to a thousandth of a request each time, and a rate by the minute to a thousandth of a
/// request a second.
#[test]
fn a_rate_by_the_minute_allows_what_nginx_cuts_and_no_more() {
    for per_minute in [1, 21, 33, 90, 100, 300] {
        let text = format!("limit_req_zone $uri zone=a:1m rate={per_minute}r/m;\nlimit_req zone=a burst=4 nodelay;\n");
        let mut service = Service::new(&import_exactly("nginx", &text));
        let mut zone = Zone { rate: per_minute * 1000 / 60, ..Zone::default() };
        let (mut random, mut now_ms, mut counts) = (Rng::with_seed(14), START_MS, (0_u32, 0_u32));
        for _ in 0..3000 {
            now_ms += random.u64(..80_000 / per_minute);
            let excess = zone.excess("/", now_ms);
            if excess <= 4000 {
                zone.account("/", now_ms, excess);
                counts.0 += 1;
            }
            counts.1 += u32::from(service.allows(now_ms, &request([("path", "/")])));
        }
        println!("{per_minute} a minute: {} in nginx, {} here", counts.0, counts.1);
        let more = counts.1.checked_sub(counts.0).expect("no fewer than in nginx");
        // What the cut of the rate takes of those that were allowed.
        let (whole, cut) = (per_minute * 1000, per_minute * 1000 / 60 * 60);
        let by_rate = u64::from(counts.0) * (whole - cut) / cut;
        let bound = 1 + counts.0.div_ceil(1000) + by_rate as u32 + u32::from(by_rate > 0);
        assert!(counts.0 > 1000 && more <= bound, "{per_minute}: {counts:?}");
    }
}
