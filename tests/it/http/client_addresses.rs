//! The client's address: never one that the client can choose itself.

use std::net::{IpAddr, SocketAddr};

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderName, HeaderValue, Request};
use tollgate::middleware::{ClientAddress, RateLimitLayer};

use super::{ask, embedded, get};

const BY_ADDRESS: &str = "[[rule]]\nname = \"r\"\nkey = \"ip\"\nlimits = [\"fixed-window 1/1h\"]\nipv6_prefix = 128";

/// Whether both requests count as one client's: the second one is denied.
async fn alike(layer: &RateLimitLayer, one: Request<Body>, other: Request<Body>) -> bool {
    let allowed = ask(layer, one).await.status.as_u16();
    assert_eq!(allowed, 200, "the first request");
    ask(layer, other).await.status.as_u16() == 429
}

fn from(peer: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = get("/", headers);
    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(peer.parse().expect("an address"), 4711)));
    request
}

#[tokio::test]
async fn a_header_counts_only_where_a_named_proxy_wrote_it() {
    let forwarded = |value: &'static str| [("x-forwarded-for", value)];
    let behind = || ClientAddress::behind(["10.0.0.0/8", "2001:db8:1::1"]).expect("proxies");
    for (address, peer, header, expected) in [
        // No proxy is trusted: the connection's address counts.
        (ClientAddress::from_connection(), "10.0.0.1", Some("192.0.2.7"), Some("10.0.0.1")),
        // The client has no proxy's address.
        (behind(), "203.0.113.9", Some("192.0.2.7"), Some("203.0.113.9")),
        (behind(), "10.0.0.1", Some("192.0.2.7"), Some("192.0.2.7")),
        (behind(), "::ffff:10.0.0.1", Some("192.0.2.7"), Some("192.0.2.7")),
        (behind(), "2001:db8:1::1", Some("192.0.2.7"), Some("192.0.2.7")),
        // What the client has written itself stands before what the proxy saw.
        (behind(), "10.0.0.1", Some("198.51.100.1, 192.0.2.7"), Some("192.0.2.7")),
        (behind(), "10.0.0.1", Some("nonsense, 192.0.2.7"), Some("192.0.2.7")),
        // Through two proxies.
        (behind(), "10.0.0.1", Some("198.51.100.1, 192.0.2.7, 10.1.1.1"), Some("192.0.2.7")),
        (behind(), "10.0.0.1", Some("192.0.2.7:81"), Some("192.0.2.7")),
        (behind(), "10.0.0.1", Some("[2001:db8::7]:81"), Some("2001:db8::7")),
        (behind(), "10.0.0.1", Some("[2001:db8::7]"), Some("2001:db8::7")),
        (behind(), "10.0.0.1", Some("::ffff:192.0.2.7"), Some("192.0.2.7")),
        // The proxies themselves.
        (behind(), "10.0.0.1", Some("10.2.2.2"), Some("10.2.2.2")),
        (behind(), "10.0.0.1", None, Some("10.0.0.1")),
        // What a proxy has written can't be read: refused, not the client's choice.
        (behind(), "10.0.0.1", Some("192.0.2.7, unknown"), None),
        (behind(), "10.0.0.1", Some(""), Some("10.0.0.1")),
        (behind(), "10.0.0.1", Some("192.0.2.7, "), Some("192.0.2.7")),
    ] {
        let layer = embedded(BY_ADDRESS).client_address(address.clone());
        let headers = header.map(forwarded);
        let headers: &[_] = headers.as_ref().map_or(&[], |header| &header[..]);
        let request = || from(peer, headers);
        match expected {
            Some(expected) => {
                let plain = || {
                    let mut request = get("/", &[]);
                    let expected: IpAddr = expected.parse().expect("an address");
                    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(expected, 1)));
                    request
                };
                // The same as a direct connection from there to a layer that trusts no proxy.
                let direct = layer.clone().client_address(ClientAddress::from_connection());
                assert_eq!(ask(&layer, request()).await.status.as_u16(), 200);
                assert_eq!(ask(&direct, plain()).await.status.as_u16(), 429, "{peer} {header:?}");
            }
            None => assert_eq!(ask(&layer, request()).await.status.as_u16(), 400, "{peer} {header:?}"),
        }
    }
}

#[tokio::test]
async fn lines_of_a_header_are_read_as_one_list_and_other_headers_by_name() {
    let layer = embedded(BY_ADDRESS).client_address(ClientAddress::behind(["10.0.0.1"]).expect("a proxy"));
    let spoofed = || from("10.0.0.1", &[("x-forwarded-for", "198.51.100.1"), ("x-forwarded-for", "192.0.2.7")]);
    let other = from("10.0.0.1", &[("x-forwarded-for", "198.51.100.2"), ("x-forwarded-for", "192.0.2.7")]);
    assert!(alike(&layer, spoofed(), other).await);

    let named =
        ClientAddress::behind(["10.0.0.1"]).expect("a proxy").in_header(HeaderName::from_static("cf-connecting-ip"));
    let layer = embedded(BY_ADDRESS).client_address(named);
    let request = |own, other| from("10.0.0.1", &[("cf-connecting-ip", own), ("x-forwarded-for", other)]);
    assert!(alike(&layer, request("192.0.2.7", "198.51.100.1"), request("192.0.2.7", "198.51.100.2")).await);
    let bad = ClientAddress::behind(["10.0.0"]).expect_err("no address").to_string();
    assert_eq!(bad, "proxies: expected an address or a network, such as 192.0.2.1 or 10.0.0.0/8, got \"10.0.0\"");
}

/// With this header, of any bytes.
fn raw(peer: &str, lines: &[Vec<u8>]) -> Request<Body> {
    let mut request = from(peer, &[]);
    for line in lines {
        let value = HeaderValue::from_bytes(line).expect("bytes of a header");
        request.headers_mut().append("x-forwarded-for", value);
    }
    request
}

fn hostile() -> Vec<Vec<u8>> {
    let mut junk: Vec<_> =
        [&b"\xff"[..], b"\xff,\xfe", b"192.0.2.9\xa0", b"\t", b"[", b":::"].map(<[u8]>::to_vec).into();
    junk.extend([b"\xff".repeat(1 << 20), b",".repeat(1 << 20), b"10.0.0.1, ".repeat(800), b"x".repeat(8192)]);
    junk
}

/// What the client has written, whatever its bytes, stands before the proxy's own entry.
#[tokio::test]
async fn no_bytes_of_a_client_hide_the_address_that_its_proxy_saw() {
    let seen = b"192.0.2.7".to_vec();
    for junk in hostile() {
        let layer = embedded(BY_ADDRESS).client_address(ClientAddress::behind(["10.0.0.1"]).expect("a proxy"));
        let told = format!("{:?}...", &junk[..junk.len().min(16)]);
        let one_line = raw("10.0.0.1", &[[&junk[..], b", ", &seen].concat()]);
        assert!(alike(&layer, raw("10.0.0.1", std::slice::from_ref(&seen)), one_line).await, "{told}");
        let two_lines = raw("10.0.0.1", &[junk, seen.clone()]);
        assert_eq!(ask(&layer, two_lines).await.status.as_u16(), 429, "{told}");
    }
    let layer = embedded(BY_ADDRESS).client_address(ClientAddress::behind(["10.0.0.1"]).expect("a proxy"));
    let mut many = vec![b"\xff".to_vec(); 20_000];
    many.push(seen.clone());
    assert!(alike(&layer, raw("10.0.0.1", &[seen]), raw("10.0.0.1", &many)).await);
}

/// "No address" would lead around a rule that blocks addresses, and one that skips requests without.
#[tokio::test]
async fn an_address_that_no_one_can_read_is_refused_if_a_rule_uses_addresses() {
    let blocks = "[[rule]]\nname = \"banned\"\nmatch = { ip = \"192.0.2.0/24\" }\naction = \"block\"\n";
    let skips = "[[rule]]\nname = \"r\"\nkey = \"ip\"\nlimits = [\"fixed-window 1/1h\"]\nmissing = \"skip\"\n";
    let others = "[[rule]]\nname = \"r\"\nkey = \"path\"\nlimits = [\"fixed-window 100/1h\"]\n";
    for (rules, status) in [(blocks, 400), (skips, 400), (others, 200)] {
        let layer = embedded(rules).client_address(ClientAddress::behind(["10.0.0.1"]).expect("a proxy"));
        let unreadable = hostile().into_iter().filter(|junk| junk.iter().any(|byte| !b", \t".contains(byte)));
        let unreadable = unreadable.filter(|junk| !junk.starts_with(b"10.0.0.1"));
        let written = ["unknown", "192.0.2.7, unknown", "[192.0.2.7]"].map(|line| line.as_bytes().to_vec());
        for line in unreadable.chain(written) {
            let answer = ask(&layer, raw("10.0.0.1", &[line])).await;
            assert_eq!(answer.status.as_u16(), status, "{rules}");
            if status == 400 {
                assert_eq!(answer.json()["detail"], "the address that this request comes from can't be read");
            }
        }
    }
    // As an attribute of one's own, too; without a value it is the connection's.
    let layer = embedded(blocks).header("ip", HeaderName::from_static("x-client"));
    for (value, status) in [("192.0.2.7", 403), ("nonsense", 400), ("192.0.2.7, 192.0.2.8", 400), ("", 200)] {
        assert_eq!(ask(&layer, from("198.51.100.1", &[("x-client", value)])).await.status.as_u16(), status, "{value}");
    }
}

/// Without the server's word for it, there is no address: nothing that a client sends stands in for it.
#[tokio::test]
async fn no_header_makes_up_for_a_connection_that_is_not_known() {
    let headers = [("x-forwarded-for", "192.0.2.7"), ("x-real-ip", "192.0.2.7"), ("forwarded", "for=192.0.2.7")];
    for address in [ClientAddress::from_connection(), ClientAddress::behind(["0.0.0.0/0"]).expect("all")] {
        let layer = embedded(BY_ADDRESS).client_address(address);
        assert_eq!(ask(&layer, get("/", &headers)).await.status.as_u16(), 500);
    }
}

#[tokio::test]
async fn keys_are_taken_as_they_are_however_long() {
    let rules = "[[rule]]\nname = \"r\"\nkey = \"api_key\"\nlimits = [\"fixed-window 1/1h\"]";
    let layer = embedded(rules).bearer_key();
    let bearer = |value: &str| get("/", &[("authorization", value)]);
    assert!(alike(&layer, bearer("Bearer one"), bearer("bearer  one ")).await);
    assert!(!alike(&layer, bearer("Bearer two"), bearer("Bearer Two")).await);
    let megabyte = "x".repeat(1 << 20);
    let other = format!("{}y", &megabyte[1..]);
    assert!(!alike(&layer, bearer(&format!("Bearer {megabyte}")), bearer(&format!("Bearer {other}"))).await);
    for none in ["Basic one", "Bearer", "Bearer ", ""] {
        assert_eq!(ask(&layer, bearer(none)).await.status.as_u16(), 400, "{none:?}: it has no key");
    }
    let twice = get("/", &[("authorization", "Bearer fresh"), ("authorization", "Bearer other")]);
    assert_eq!(ask(&layer, twice).await.status.as_u16(), 400);
    // Bytes that aren't text are a key too.
    let raw = || {
        let mut request = get("/", &[]);
        request
            .headers_mut()
            .insert("authorization", axum::http::HeaderValue::from_bytes(b"Bearer \xff\xfe").expect("bytes"));
        request
    };
    assert!(alike(&layer, raw(), raw()).await);
}

#[tokio::test]
async fn other_spellings_of_a_target_are_under_the_same_rule() {
    let rules = "paths = \"decoded\"\n[[rule]]\nname = \"r\"\nmatch = { path = \"/login\" }\nkey = \"global\"\nlimits = [\"fixed-window 1/1h\"]";
    for target in
        ["/login", "/login/", "//login", "/%6cogin", "/./login", "/x/../login", "/login?next=/", "http://host/login"]
    {
        let layer = embedded(rules);
        assert!(alike(&layer, get("/login", &[]), get(target, &[])).await, "{target}");
    }
}
