//! Known ways to bypass limits.

use std::net::IpAddr;

use tollgate::rules::{Attributes, Effect, RuleSet};

use super::{applies, rule_set};

const LOGIN: &str = r#"
    [[rule]]
    name = "login"
    match = { path = "/api/v1/login", method = "POST" }
    key = "ip"
    limits = ["gcra 5/15m"]
"#;

/// Spellings of one path, all of which some server takes for it.
#[test]
fn no_spelling_of_a_path_leads_around_its_rule() {
    let rules = rule_set(LOGIN);
    for target in [
        "/api/v1/login",
        "/api/v1/login/",
        "/api/v1/login?next=/",
        "/api/v1/login#top",
        "/api/v1/login/?",
        "//api//v1///login",
        "/./api/v1/./login",
        "/api/v1/x/../login",
        "/api/v1/login/.",
        "/api/v1/login/x/..",
        "/../api/v1/login",
        "/api%2Fv1%2flogin",
        "/api/v1/%6Cogin",
        "/%61%70%69/v1/login",
        "/api/v1/%2e/login",
        "/api/v1/x/%2e%2E/login",
        "/api/v1%5Clogin",
        "/api\\v1\\login",
        "http://api.example.com/api/v1/login",
        "HTTPS://api.example.com:443//api/v1/login?x=y",
        "http://user@[::1]:80/api/v1/login/",
    ] {
        let request = Attributes::new().method("POST").path(target);
        assert_eq!(applies(&rules, &request).as_deref(), Some("login"), "{target}");
    }
    for target in ["/api/v1/login/x", "/api/v1", "/api/v1/loginx", "/api/v1/Login", "/api/v1/%256Cogin", "/"] {
        let request = Attributes::new().method("POST").path(target);
        assert_eq!(applies(&rules, &request), None, "{target}");
    }
}

/// Targets that axum 0.8 serves by the route `/users/{id}/items`, and the path for a router that decodes first.
#[test]
fn a_router_that_splits_first_has_rules_that_do() {
    let text = |top: &str| {
        rule_set(&format!(
            "{top}\n[[rule]]\nname = \"items\"\nmatch = {{ path = \"/users/*/items\" }}\naction = \"block\"\n\
             [[rule]]\nname = \"x\"\nmatch = {{ path = \"/x/*\" }}\naction = \"allow\"\n"
        ))
    };
    let (decoded, segments) = (text(""), text("paths = \"segments\""));
    let of = |rules: &RuleSet, target: &str| applies(rules, &Attributes::new().path(target));
    for (target, as_sent, first) in [
        ("/users/a%2Fb/items", Some("items"), None),
        ("/users/a%5Cb/items", Some("items"), None),
        ("/users/./items", Some("items"), None),
        ("/users/../items", Some("items"), None),
        ("/users/%2e%2E/items", Some("items"), None),
        ("/users/..%2F..%2Fx/items", Some("items"), Some("x")),
        ("/users/%37/items?x", Some("items"), Some("items")),
        // axum has no such route, or another one.
        ("/users//7/items", None, Some("items")),
        ("/users//items", Some("items"), None),
        ("/users/7/items/", None, Some("items")),
        ("/users/7/%69tems", None, Some("items")),
        ("/%75sers/7/items", None, Some("items")),
    ] {
        assert_eq!(of(&segments, target).as_deref(), as_sent, "{target}");
        assert_eq!(of(&decoded, target).as_deref(), first, "{target}");
    }
    assert_eq!(of(&segments, "/users/7%2Fitems"), None);
    assert_eq!(of(&decoded, "/users/7%2Fitems").as_deref(), Some("items"));
    // A list of keys by path reads as the requests do.
    let rules = rule_set(
        "paths = \"segments\"\nignore_case = true\n[[rule]]\nname = \"r\"\nkey = \"path\"\nlimits = [\"gcra 5/1s\"]\n\
         block = [\"path:/A%2fb\"]",
    );
    let effect = rules.applies(&Attributes::new().path("/a%2FB")).expect("a rule").effect;
    assert!(matches!(effect, Effect::Block), "{effect:?}");
    // Whatever spelling of a parameter its handler is given, a key by path counts them as one.
    let rules = rule_set("paths = \"segments\"\n[[rule]]\nname = \"r\"\nkey = \"path\"\nlimits = [\"gcra 5/1s\"]");
    assert_eq!(key(&rules, &Attributes::new().path("/users/%37")), key(&rules, &Attributes::new().path("/users/7")));
}

/// A key by path is that of every spelling, some of which such a router serves by another route.
#[test]
fn a_key_by_path_may_be_banned_and_not_favoured_where_a_router_splits_first() {
    for key in ["\"path\"", "[\"user\", \"path\"]"] {
        let listed = if key.contains("user") { "user:42|path:/api/health" } else { "path:/api/health" };
        let text = |paths: &str, more: &str| {
            format!("{paths}[[rule]]\nname = \"r\"\nkey = {key}\nlimits = [\"gcra 5/1s\"]\n{more}\n")
        };
        let favours = [
            format!("allow = [\"{listed}\"]"),
            format!("overrides = {{ \"{listed}\" = \"allow\" }}"),
            format!("overrides = {{ \"{listed}\" = \"gcra 500/1s\" }}"),
        ];
        for favour in &favours {
            let error = text("paths = \"segments\"\n", favour).parse::<RuleSet>().expect_err(favour).to_string();
            let expected =
                "under paths = \"segments\", a key with a path can only be listed in block (to allow it, or to give it";
            assert!(error.contains(expected) && error.ends_with(&format!("got {listed:?}")), "{error}");
            rule_set(&text("", favour));
            rule_set(&text("paths = \"decoded\"\n", favour));
        }
        rule_set(&text("paths = \"segments\"\n", &format!("block = [\"{listed}\"]")));
    }
}

#[test]
fn an_empty_path_is_the_root() {
    let rules = rule_set("[[rule]]\nname = \"all\"\nmatch = { path = \"/*\" }\naction = \"block\"");
    for request in [Attributes::new().path(""), Attributes::new().set("path", "")] {
        assert_eq!(applies(&rules, &request).as_deref(), Some("all"));
    }
    assert_eq!(applies(&rules, &Attributes::new()), None);
}

#[test]
fn case_counts_unless_it_is_said_not_to() {
    let rules = rule_set(&format!("ignore_case = true\n{}", LOGIN.replace("/login", "/Login")));
    for target in ["/API/V1/LOGIN", "/api/v1/login", "/Api/v1/%4Cogin/"] {
        let request = Attributes::new().method("POST").path(target);
        assert_eq!(applies(&rules, &request).as_deref(), Some("login"), "{target}");
    }
    // Counted by path, too, they are one.
    let rules = rule_set("ignore_case = true\n[[rule]]\nname = \"paths\"\nkey = \"path\"\nlimits = [\"gcra 5/1s\"]");
    assert_eq!(key(&rules, &Attributes::new().path("/A/b")), key(&rules, &Attributes::new().path("/a/B/")));
}

#[test]
fn a_method_in_another_case_and_head_in_place_of_get_are_limited_alike() {
    let rules = rule_set(LOGIN);
    for method in ["POST", "post", "Post"] {
        let request = Attributes::new().method(method).path("/api/v1/login");
        assert_eq!(applies(&rules, &request).as_deref(), Some("login"), "{method}");
    }
    let rules = rule_set(&LOGIN.replace("POST", "get"));
    for (method, name) in [("GET", Some("login")), ("HEAD", Some("login")), ("POST", None)] {
        let request = Attributes::new().method(method).path("/api/v1/login");
        assert_eq!(applies(&rules, &request).as_deref(), name, "{method}");
    }
    let rules = rule_set(&LOGIN.replace("POST", "HEAD"));
    let request = Attributes::new().method("GET").path("/api/v1/login");
    assert_eq!(applies(&rules, &request), None);
}

/// A client may invent as many methods as it likes.
#[test]
fn methods_that_are_not_standard_count_as_one() {
    let rules = rule_set(
        "[[rule]]\nname = \"purge\"\nmatch = { method = \"PURGE\" }\naction = \"block\"\n\
         [[rule]]\nname = \"others\"\nmatch = { method = \"other\", tier = \"x\" }\naction = \"block\"\n\
         [[rule]]\nname = \"all\"\nkey = [\"user\", \"method\"]\nlimits = [\"gcra 5/1s\"]\n\
         block = [\"user:7|method:OTHER\"]",
    );
    let request = |method| Attributes::new().user("8").method(method);
    let counted = |method| match rules.applies(&request(method)).expect("a rule").effect {
        Effect::Limit(charge) => String::from_utf8(charge.key().to_vec()).expect("text"),
        other => panic!("{method}: {other:?}"),
    };
    for method in ["PROPFIND", "propfind", "X1", "X2", "OTHER", "GETT", "\u{e9}"] {
        assert_eq!(counted(method), "user:8|method:OTHER", "{method}");
        // In conditions by its own name, or as one of these.
        let tiered = request(method).tier("x");
        assert_eq!(applies(&rules, &tiered).as_deref(), Some("others"), "{method}");
        let effect = rules.applies(&request(method).user("7")).expect("a rule").effect;
        assert!(matches!(effect, Effect::Block), "{method}");
    }
    for method in ["GET", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "patch"] {
        assert_eq!(counted(method), format!("user:8|method:{}", method.to_uppercase()));
        assert_eq!(applies(&rules, &request(method).tier("x")).as_deref(), Some("all"), "{method}");
    }
    for method in ["PURGE", "purge"] {
        assert_eq!(applies(&rules, &request(method)).as_deref(), Some("purge"));
    }
    let listed = "[[rule]]\nname = \"r\"\nkey = \"method\"\nlimits = [\"gcra 5/1s\"]\nblock = [\"method:PURGE\"]";
    let error = listed.parse::<RuleSet>().expect_err("it would block all of them").to_string();
    let expected = "expected a standard method, or OTHER, which all others count as, got \"method:PURGE\"";
    assert!(error.ends_with(expected), "{error}");
}

fn key(rules: &RuleSet, request: &Attributes<'_>) -> String {
    match rules.applies(request).expect("a rule").effect {
        Effect::Limit(charge) => format!("{:?}", charge.request()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_address_counts_once_however_it_is_written() {
    let rules = rule_set(LOGIN);
    let of = |address: &str| {
        let request = Attributes::new().method("POST").path("/api/v1/login");
        key(&rules, &request.ip(address.parse::<IpAddr>().expect("an address")))
    };
    assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.1"));
    assert_eq!(of("192.0.2.1"), of("::ffff:c000:201"));
    assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    // A client with one IPv6 address has 2^64.
    assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::1"));
    assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
    let rules = rule_set(&LOGIN.replace("key = ", "ipv6_prefix = 48\nkey = "));
    let of = |address: &str| {
        let request = Attributes::new().method("POST").path("/api/v1/login");
        key(&rules, &request.ip(address.parse::<IpAddr>().expect("an address")))
    };
    assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
    assert_ne!(of("2001:db8:1::1"), of("2001:db8:2::1"));
}

#[test]
fn a_network_covers_its_addresses_within_ipv6_too() {
    let office = |network: &str| {
        rule_set(&format!("[[rule]]\nname = \"office\"\nmatch = {{ ip = \"{network}\" }}\naction = \"allow\""))
    };
    for network in ["10.0.0.0/8", "::ffff:10.0.0.0/104"] {
        let rules = office(network);
        for (address, name) in [("10.1.2.3", Some("office")), ("::ffff:10.1.2.3", Some("office")), ("11.0.0.1", None)] {
            let request = Attributes::new().ip(address.parse().expect("an address"));
            assert_eq!(applies(&rules, &request).as_deref(), name, "{network} {address}");
        }
    }
}

/// Keys of several attributes can't be made to collide by what stands in them.
#[test]
fn no_value_reaches_into_the_next_attribute_of_a_key() {
    let rules = rule_set("[[rule]]\nname = \"pairs\"\nkey = [\"user\", \"org\"]\nlimits = [\"gcra 5/1s\"]");
    let values = ["a", "a|org:b", "a\\|org:b", "b", "a\\", "\\", "|", "a|", "|org:", "org:b"];
    let mut keys = Vec::new();
    for user in values {
        keys.extend(values.map(|org| key(&rules, &Attributes::new().user(user).set("org", org))));
    }
    let all = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), all);
}

/// A ban that no request could come under would be worse than none.
#[test]
fn keys_of_overrides_are_read_as_those_of_requests() {
    let request =
        || Attributes::new().user("4|2").ip("2001:db8::1".parse().expect("an address")).method("post").path("//Api/x/");
    for (key, top, banned) in [
        ("\"user\"", "", "user:4|2"),
        ("\"ip\"", "", "ip:2001:db8::7"),
        ("\"ip\"", "", "ip:2001:db8::/64"),
        ("\"method\"", "", "method:Post"),
        ("[\"method\", \"ip\"]", "", "method:Post|ip:2001:db8::"),
        ("\"path\"", "", "path:/Api/%78"),
        ("\"path\"", "ignore_case = true", "path:/aPI/x"),
        ("[\"user\", \"ip\"]", "", r"user:4\|2|ip:2001:db8::9"),
        ("[\"user\", \"path\"]", "", r"user:4\|2|path:/Api/./x/"),
        ("[\"user\", \"path\"]", "ignore_case = true", r"user:4\|2|path:/API/X"),
    ] {
        let rules = rule_set(&format!(
            "{top}\n[[rule]]\nname = \"r\"\nkey = {key}\nlimits = [\"gcra 5/1s\"]\nblock = ['{banned}']"
        ));
        let effect = rules.applies(&request()).expect("a rule").effect;
        assert!(matches!(effect, Effect::Block), "{banned}: {effect:?}");
    }
    for banned in ["user:42", "user:42|pth:/x", "path:/x|user:42", "user:42|path:", "user:42|path:/x|ip:::1", "|"] {
        let text = format!(
            "[[rule]]\nname = \"r\"\nkey = [\"user\", \"path\"]\nlimits = [\"gcra 5/1s\"]\nblock = [\"{banned}\"]"
        );
        let error = text.parse::<RuleSet>().expect_err(banned).to_string();
        let expected = "expected a value of the rule's own key, such as user:...|path:..., got ";
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn an_empty_attribute_is_one_that_is_missing() {
    let rules = rule_set("[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"gcra 5/1s\"]");
    for request in [Attributes::new(), Attributes::new().user(""), Attributes::new().user("42").user("")] {
        let effect = rules.applies(&request).expect("a rule").effect;
        assert!(matches!(effect, Effect::Missing("user")), "{effect:?}");
    }
}

#[test]
fn attributes_by_their_names_are_read_as_by_their_methods() {
    let rules = rule_set(LOGIN);
    let named = |address: &'static str| {
        Attributes::new().set("ip", address).set("method", "post").set("path", "//api/v1/login").set("org", "acme")
    };
    assert_eq!(key(&rules, &named("::ffff:192.0.2.1")), key(&rules, &named("192.0.2.1")));
    assert!(matches!(rules.applies(&named("nowhere")).expect("a rule").effect, Effect::Missing("ip")));
    for (name, value, told) in [
        ("ip", &b"nowhere"[..], "ip: expected an address such as 192.0.2.1 or 2001:db8::1, got \"nowhere\""),
        ("path", b"/\xff", "path: expected UTF-8, got "),
        ("method", b"\xff", "method: expected UTF-8, got "),
    ] {
        let error = Attributes::new().try_set(name, value).expect_err(name);
        assert!(error.is_input() && error.to_string().starts_with(told), "{error}");
    }
    assert!(Attributes::new().try_set("org", b"\xff").is_ok());
}

#[test]
fn long_and_deep_paths_are_read_in_time_that_grows_with_them() {
    let rules = rule_set("[[rule]]\nname = \"all\"\nmatch = { path = \"/*/*/*/a/*\" }\naction = \"block\"");
    for path in ["/a".repeat(500_000), "/%2e%2e".repeat(200_000), "/%2F".repeat(300_000), "%".repeat(1_000_000)] {
        let request = Attributes::new().path(&path);
        applies(&rules, &request);
    }
}

/// What GET is limited by, HEAD is too: by a key as by a condition.
#[test]
fn head_is_counted_as_get() {
    let rules = rule_set(
        "[[rule]]\nname = \"r\"\nmatch = { method = \"GET\" }\nkey = [\"user\", \"method\"]\nlimits = [\"gcra 5/1s\"]\n\
         block = [\"user:7|method:HEAD\"]",
    );
    for method in ["GET", "HEAD", "head"] {
        let effect = |user| rules.applies(&Attributes::new().user(user).method(method)).expect("a rule").effect;
        assert!(matches!(effect("7"), Effect::Block), "{method}");
        assert!(matches!(effect("8"), Effect::Limit(charge) if charge.key() == b"user:8|method:GET"), "{method}");
    }
}
