//! By which address a log's requests count: as the middleware counts them.

use std::fs;

use super::*;
use crate::support::tool::{code, lines, stderr, tollgate};

/// A household with IPv6, a client over IPv4 by way of an IPv6 socket, and one whose port the server logs.
const CLIENTS: [(&str, &str); 7] = [
    ("2001:db8:1:2::a", "2001:db8:1:2::/64"),
    ("2001:db8:1:2:ffff::b", "2001:db8:1:2::/64"),
    ("[2001:db8:1:2::c]:4711", "2001:db8:1:2::/64"),
    ("2001:db8:1:2:3:4:5:d:50718", "2001:db8:1:2::/64"),
    ("::ffff:192.0.2.1", "192.0.2.1"),
    ("192.0.2.1:4711", "192.0.2.1"),
    ("192.0.2.1", "192.0.2.1"),
];

fn log(lines: impl Iterator<Item = String>) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(&file, lines.collect::<String>()).expect("written");
    file
}

fn path(file: &tempfile::NamedTempFile) -> &str {
    file.path().to_str().expect("UTF-8")
}

#[test]
fn requests_count_by_network_without_ports_in_every_command() {
    let combined = log(CLIENTS
        .iter()
        .map(|(client, _)| format!("{client} - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1\n")));
    let json = log(CLIENTS.iter().map(|(client, _)| {
        format!("{{\"ts\":1431857103,\"remote_addr\":\"{client}\",\"request\":\"GET / HTTP/1.1\"}}\n")
    }));
    let expected: Vec<_> = CLIENTS.iter().map(|(_, counted)| *counted).collect();
    let rules = log(["[[rule]]\nname = \"a\"\nkey = \"ip\"\nlimits = [\"sliding-log 1/1m\"]\n".to_owned()].into_iter());
    for file in [&combined, &json] {
        let output = tollgate(&["replay", "--rule", "sliding-log 1/1m", path(file)]);
        let keys: Vec<_> = lines(&output).iter().map(|line| line["key"].as_str().expect("a key").to_owned()).collect();
        assert_eq!(keys, expected, "{}", stderr(&output));
        // The set of rules says the same of each.
        let by_rules = tollgate(&["replay", "--rules", path(&rules), path(file)]);
        let verdicts = |output: &Output| lines(output).iter().map(|line| line["allowed"] == true).collect::<Vec<_>>();
        assert_eq!(verdicts(&by_rules), verdicts(&output), "{}", stderr(&by_rules));
        assert_eq!(verdicts(&output), [true, false, false, false, true, false, false]);

        let compared = tollgate(&["compare", "sliding-log 1/1m", path(file), "--format", "jsonl"]);
        let one = &lines(&compared)[0];
        assert_eq!((&one["denied"], &one["keys"]), (&json!(5), &json!(2)), "{}", stderr(&compared));
        for key in [&[][..], &["--key", "ip"]] {
            let suggested = tollgate(&[&["suggest", path(file), "--deny-at-most", "0%"][..], key].concat());
            assert_eq!(code(&suggested), 0, "{}", stderr(&suggested));
            assert_eq!(lines(&suggested)[0]["keys"], 2);
        }
    }
}

/// Of each of these, most requests come from one address, and 20 clients are in another field.
#[test]
fn a_balancer_is_seen_and_the_named_field_counts_instead() {
    let quoted = |at: u32, client: &str| {
        let time = format!("17/May/2015:10:05:{:02} +0000", at % 60);
        format!("10.0.0.1 - - [{time}] \"GET / HTTP/1.1\" 200 1 \"-\" \"x\" \"{client}\"\n")
    };
    let object = |at: u32, client: &str| {
        let time = 1_431_857_103 + at;
        format!(
            "{{\"ts\":{time},\"remote_addr\":\"10.0.0.1\",\"request\":\"GET / HTTP/1.1\",\"x_forwarded_for\":\"{client}\"}}\n"
        )
    };
    let clients = || (0..60).map(|at: u32| (at, format!("198.51.100.9, 203.0.113.{}", at % 20)));
    let of = |line: &dyn Fn(u32, &str) -> String| log(clients().map(|(at, client)| line(at, &client)));
    for (file, field) in [(of(&quoted), "last-quoted"), (of(&object), "x_forwarded_for")] {
        let output = tollgate(&["replay", "--rule", "gcra 1/1s", "--summary", path(&file)]);
        let said = stderr(&output);
        let hint = format!("if it is a balancer or a proxy, count its clients with --client-address {field}\n");
        assert!(said.contains("10.0.0.1 has 100 % of the first 60 requests, and the field "), "{said}");
        assert_eq!((said.matches(&hint).count(), &lines(&output)[0]["keys"]), (1, &json!(1)), "{said}");

        for command in [&["replay", "--rule", "gcra 1/1s", "--summary"][..], &["suggest"], &["compare", "gcra 1/1s"]] {
            let output = tollgate(&[command, &[path(&file), "--client-address", field]].concat());
            let said = stderr(&output);
            assert_eq!((code(&output), &lines(&output)[0]["keys"]), (0, &json!(20)), "{said}");
            assert!(!said.contains("balancer"), "{said}");
        }
    }
    // A position, from the beginning or the end.
    for place in ["10", "-1"] {
        let file = of(&quoted);
        let output = tollgate(&["replay", "--rule", "gcra 1/1s", "--summary", path(&file), "--client-address", place]);
        assert_eq!(lines(&output)[0]["keys"], 20, "{}", stderr(&output));
    }
}

#[test]
fn entries_of_trusted_proxies_are_passed_over_and_peers_that_are_none_count_themselves() {
    let line = |peer: &str, list: &str| {
        format!("{{\"ts\":1431857103,\"remote_addr\":\"{peer}\",\"request\":\"GET / HTTP/1.1\",\"xff\":\"{list}\"}}\n")
    };
    let file = log([
        line("10.0.0.1", "192.0.2.9, 198.51.100.7, 10.0.0.2"),
        line("203.0.113.5", "192.0.2.9"),
        line("10.0.0.1", ""),
        line("10.0.0.1", "unknown"),
    ]
    .into_iter());
    let options = ["--client-address", "xff", "--proxies", "10.0.0.0/8"];
    let output = tollgate(&[&["replay", "--rule", "gcra 9/1s", path(&file)][..], &options].concat());
    let keys: Vec<_> = lines(&output).iter().map(|line| line["key"].as_str().expect("a key").to_owned()).collect();
    assert_eq!(keys, ["198.51.100.7", "203.0.113.5", "10.0.0.1"], "{}", stderr(&output));
    let said = stderr(&output);
    assert!(
        said.contains("line 4: header x-forwarded-for: expected an address from the proxy 10.0.0.1, got \"unknown\""),
        "{said}"
    );

    let output = tollgate(&["replay", "--rule", "gcra 9/1s", path(&file), "--client-address", "x_f_f"]);
    let said = stderr(&output);
    assert!(said.contains("4 requests without x_f_f count by the connection's address; none has it"), "{said}");

    let output = tollgate(&[&["replay", "--rule", "gcra 9/1s", path(&file), "--key", "path"][..], &options].concat());
    let said = stderr(&output);
    let expected = "--client-address: expected --key ip, which counts by the client's address, got --key path\n";
    assert!(code(&output) == 2 && said.ends_with(expected), "{said}");
}

/// A pair of balancers, or one with an address in each zone.
#[test]
fn a_balancer_of_several_addresses_is_seen_too() {
    let line = |at: u32, nodes: u32| {
        let (node, client) = (at % nodes, format!("203.0.113.{}", at / nodes % 30));
        format!("10.0.0.{node} - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"x\" \"{client}\"\n")
    };
    for (nodes, said) in [
        (2, Some("10.0.0.0 and 1 other have 100 % of the first 120 requests, and the field last-quoted has 30 other")),
        (3, Some("10.0.0.0 and 2 others have 100 %")),
        // Too many, for so few clients.
        (12, None),
    ] {
        let file = log((0..120).map(|at| line(at, nodes)));
        let output = tollgate(&["suggest", path(&file)]);
        let found = stderr(&output);
        match said {
            Some(said) => assert!(found.contains(said) && found.contains("they are balancers or proxies"), "{found}"),
            None => assert!(!found.contains("balancer"), "{found}"),
        }
    }
}

/// A field that was named by mistake is no client.
#[test]
fn a_text_that_is_neither_an_address_nor_a_name_is_no_client() {
    let line = "192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"Mozilla/5.0 (X11)\"\n";
    let file = log((0..20).map(|_| line.to_owned()));
    for options in [["--fields", "ip=last-quoted"], ["--fields", "time=4,ip=-1"]] {
        let output = tollgate(&[&["replay", "--rule", "gcra 1/1s", path(&file)][..], &options].concat());
        let (said, expected) = (stderr(&output), "client address: expected an address or a host's name, got \"Mozilla");
        assert!(code(&output) == 2 && said.contains(expected), "{options:?}: {said}");
    }
}

#[test]
fn who_is_denied_without_a_count_is_named_by_network_too() {
    let rules =
        log(["[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"sliding-log 1/1m\"]\n".to_owned()].into_iter());
    let file = log(["2001:db8:1:2::a", "2001:db8:1:2:ffff::b"]
        .iter()
        .map(|client| format!("{client} - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1\n")));
    let output = tollgate(&["replay", "--rules", path(&rules), path(&file), "--summary"]);
    let totals = &lines(&output)[0];
    assert_eq!((&totals["denied"], &totals["keys"]), (&json!(2), &json!(1)), "{}", stderr(&output));
    assert_eq!(totals["busiest_denied"], json!([{"key": "ip:2001:db8:1:2::/64", "denied": 2}]));
}

/// A client's own header, or servers behind the one that logs, are no sign of a balancer.
#[test]
fn other_addresses_on_a_line_are_no_sign_of_a_balancer() {
    let direct = |at: u32| {
        let (peer, own) = (at % 30, if at % 10 == 0 { format!("203.0.113.{at}") } else { "-".to_owned() });
        format!("192.0.2.{peer} - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"x\" \"{own}\"\n")
    };
    let upstream = |at: u32| {
        let server = at % 9;
        format!(
            "192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"x\" \"10.0.0.{server}:80\"\n"
        )
    };
    for file in [log((0..60).map(direct)), log((0..60).map(upstream))] {
        let output = tollgate(&["replay", "--rule", "gcra 1/1s", "--summary", path(&file)]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(!stderr(&output).contains("balancer"), "{}", stderr(&output));
    }
}
