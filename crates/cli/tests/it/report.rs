//! Reports, in a browser, and comparisons. What a page says is looked for in its text.

mod compare;
mod files;
mod pictures;
mod speed;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::support::browser::Browser;
use crate::support::page::is_sound;
use crate::support::tool::{code, stderr, tollgate};

/// Requests of two hours by several keys, a surge among them, and keys that are hostile.
fn traffic(folder: &Path) -> PathBuf {
    let file = folder.join("traffic.jsonl");
    let mut random = fastrand::Rng::with_seed(6);
    let hostile = [
        "<script>document.title='gone'</script>".to_owned(),
        "\"'><img src=x onerror=document.title='gone'>".to_owned(),
        "\u{202e}\u{0}\u{1b}[31m".to_owned(),
        "\u{5e9}\u{5dc}\u{5d5}\u{5dd}".to_owned(),
        "k".repeat(1 << 20),
    ];
    let mut records: Vec<(u64, String)> = Vec::new();
    for at in 0..1_500 {
        let surge = at % 3 == 0;
        let second = if surge { 3_000 + random.u64(0..400) } else { random.u64(0..7_200) };
        let user = if at % 2 == 0 { random.u64(0..4) } else { random.u64(0..500) };
        records.push((second, format!("user:{user}")));
    }
    for key in &hostile {
        // Of the long one no more than it takes: each record has its megabyte.
        records.extend((0..if key.len() > 100 { 4 } else { 40 }).map(|_| (3_100, key.clone())));
    }
    let mut text = String::new();
    for (second, key) in records {
        let t_us = (1_431_857_100 + second) * 1_000_000;
        writeln!(text, "{}", serde_json::json!({"t_us": t_us, "key": key})).expect("written");
    }
    std::fs::write(&file, text).expect("written");
    file
}

/// Runs it with a report, and returns the page.
fn report(arguments: &[&str], page: &Path) -> String {
    let output = tollgate(&[arguments, &["--report", page.to_str().expect("UTF-8")]].concat());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.len() < 1_000_000, "{}", page.len());
    page
}

#[test]
fn every_report_is_sound_in_a_browser_on_screens_and_on_paper() {
    let folder = tempfile::tempdir().expect("a folder");
    let (traffic, at) = (traffic(folder.path()), |name: &str| folder.path().join(name));
    let file = traffic.to_str().expect("UTF-8");
    let mut browser = Browser::start();

    let page = report(&["replay", "--rule", "token-bucket 6/1m burst 3", file, "--summary"], &at("replay.html"));
    for said in ["requests were denied", "Over time", "Busiest keys", "&lt;script&gt;", "(1,048,576 characters)"] {
        assert!(page.contains(said), "{said}");
    }
    is_sound(&mut browser, &at("replay.html"));
    assert_ne!(browser.value("document.title"), "gone");

    let rules = ["token-bucket 6/1m burst 3", "fixed-window 6/1m", "sliding-log 6/1m", "concurrency 2 ttl 1m"];
    let page = report(&[&["compare"][..], &rules, &[file]].concat(), &at("compare.html"));
    for said in ["under 4 rules", "Side by side", "The most within any period", "Over time: sliding-log 6/1m"] {
        assert!(page.contains(said), "{said}");
    }
    is_sound(&mut browser, &at("compare.html"));

    let page = report(&["suggest", file, "--deny-at-most", "1%", "--per", "1m"], &at("suggest.html"));
    for said in ["would have denied", "Rate against burst", "Who would be hit", "fixed-window"] {
        assert!(page.contains(said), "{said}");
    }
    is_sound(&mut browser, &at("suggest.html"));

    let load =
        ["load", "token-bucket 10/1s", "--rate", "300", "--duration", "1s", "--warmup", "0s", "--key-count", "9"];
    let page = report(&load, &at("load.html"));
    for said in ["All 300 calls were answered", "Latency", "Sent late", "0 over-admissions"] {
        assert!(page.contains(said), "{said}");
    }
    is_sound(&mut browser, &at("load.html"));
}

#[test]
fn a_report_of_nothing_and_of_a_set_of_rules_is_sound_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let path = |name: &str| at(name).to_str().expect("UTF-8").to_owned();
    std::fs::write(at("empty.jsonl"), "").expect("written");
    let mut browser = Browser::start();
    report(&["replay", "--rule", "token-bucket 5/1s", &path("empty.jsonl"), "--summary"], &at("nothing.html"));
    is_sound(&mut browser, &at("nothing.html"));
    report(&["compare", "token-bucket 5/1s", &path("empty.jsonl")], &at("nothing-compared.html"));
    is_sound(&mut browser, &at("nothing-compared.html"));

    let rules = "[[rule]]\nname = \"api\"\nkey = \"user\"\nlimits = [\"token-bucket 2/1m\"]\nmatch = { path = \"/api/*\" }\n\
                 [[rule]]\nname = \"late\"\nkey = \"user\"\nlimits = [\"fixed-window 1/1d\"]\nshadow = true\n";
    std::fs::write(at("rules.toml"), rules).expect("written");
    let records: String = (0..40)
        .map(|at| {
            let path = if at % 4 == 0 { "/else" } else { "/api/x" };
            format!("{{\"t_us\":{},\"attrs\":{{\"user\":\"u{}\",\"path\":\"{path}\"}}}}\n", at * 5_000_000, at % 3)
        })
        .collect();
    std::fs::write(at("set.jsonl"), records).expect("written");
    let replay = ["replay", "--rules", &path("rules.toml"), &path("set.jsonl"), "--summary"];
    let page = report(&replay, &at("set.html"));
    for said in ["a set of 2 rules", "By rule", "Shadow rules", "no rule applied"] {
        assert!(page.contains(said), "{said}");
    }
    is_sound(&mut browser, &at("set.html"));
}
