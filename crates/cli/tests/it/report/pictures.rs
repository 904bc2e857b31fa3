//! The pictures of the guide: one trace under each algorithm, as the report of `compare` draws it. Each is a file that
//! a code host shows, and that the library's documentation contains.

use std::fmt::Write;

use tollgate_testing::repository::{read, root};
use tollgate_testing::rules::assert_of_every_algorithm;

use super::report;
use crate::support::tool::{lines, tollgate};

/// Each picture's name, and its rule. `src/guide.rs` and the page include each.
const RULES: [(&str, &str); 6] = [
    ("token-bucket", "token-bucket 12/1m"),
    ("fixed-window", "fixed-window 12/1m"),
    ("calendar-window", "fixed-window 30/day"),
    ("sliding-window", "sliding-window 12/1m"),
    ("sliding-log", "sliding-log 12/1m"),
    ("concurrency", "concurrency 3 ttl 30s"),
];

/// With this variable, the test writes the pictures instead of comparing them.
const BLESS: &str = "TOLLGATE_BLESS";

#[test]
fn the_guides_pictures_are_what_the_tool_draws() {
    assert_of_every_algorithm(&RULES.map(|(_, rule)| rule), &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let trace = root().join("tests/data/trace.jsonl");
    let trace = trace.to_str().expect("UTF-8");
    let arguments: Vec<_> = ["compare"].into_iter().chain(RULES.map(|(_, rule)| rule)).chain([trace]).collect();
    let html = report(&arguments, &folder.path().join("compare.html"));
    let outcomes = lines(&tollgate(&arguments));
    let mut rows = Vec::new();
    for ((name, rule), outcome) in RULES.iter().zip(outcomes) {
        let [allowed, denied] = ["allowed", "denied"].map(|what| outcome[what].as_u64().expect("a count"));
        // Those of another period have none in a minute.
        let most = &outcome["most_in_a_period"];
        let most = most["units"].as_u64().filter(|_| most["period_us"] == 60_000_000);
        let most = most.map_or("-".to_owned(), |units| units.to_string());
        rows.push((name, format!("| `{rule}` | {allowed} | {denied} | {most} |")));
        let picture = picture(&html, rule, allowed, denied);
        is_committed(&format!("src/guide/trace-{name}.svg"), &picture, "the_guides_pictures");
    }
    let (page, module) = (read("src/guide/trace.md"), read("src/guide.rs"));
    for (name, row) in rows {
        assert!(module.contains(&format!("include_str!(\"guide/trace-{name}.svg\")")), "src/guide.rs: expected {name}");
        assert!(page.contains(&row), "src/guide/trace.md: expected {row}");
        let [shown, defined] = [format!("][{name}]"), format!("\n[{name}]: trace-{name}.svg\n")];
        assert!(page.contains(&shown) && page.contains(&defined), "src/guide/trace.md: expected the picture {name}");
    }
}

/// The file has this picture; where the variable is set, it is written first.
pub(super) fn is_committed(file: &str, picture: &str, test: &str) {
    let path = root().join(file);
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(&path, picture).expect("written");
    }
    let wrong = format!(
        "{file}: drawn otherwise; {BLESS}=1 cargo test -p tollgate-cli --all-features --test it {test} writes it"
    );
    assert!(std::fs::read_to_string(path).is_ok_and(|found| found == picture), "{wrong}");
}

/// The plot of this rule in the report, as a file of its own, with a title and a legend. It has its own ground, since
/// whoever shows it may have another one than the reader's system prefers.
fn picture(html: &str, rule: &str, allowed: u64, denied: u64) -> String {
    let (_, section) = html.split_once(&format!(">Over time: {rule}</h2>")).expect("a section");
    let (_, plot) = section.split_once("<svg class=\"narrow\"").expect("a plot for phones");
    let (plot, _) = plot.split_once("</svg>").expect("its end");
    let (_, plot) = plot.split_once("viewBox=\"0 0 336 230\"").expect("its size");
    let (_, plot) = plot.split_once('>').expect("its content");
    let (_, patterns) = html.split_once("<defs>").expect("patterns");
    let (hatched, _) = patterns.split_once("</pattern>").expect("the end of the first");
    let said = format!("{rule}: {allowed} allowed, {denied} denied");
    let svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"trace\" role=\"img\" width=\"352\" height=\"290\"\n\
         viewBox=\"0 0 352 290\" aria-label=\"{said}\">\n<style>\n{}</style>\n<defs>\n{hatched}</pattern>\n</defs>\n\
         <rect class=\"paper\" width=\"352\" height=\"290\" rx=\"6\"/>\n\
         <text x=\"10\" y=\"22\" font-size=\"15\" font-weight=\"600\" fill=\"#1B1F24\">{rule}</text>\n\
         <rect x=\"10\" y=\"34\" width=\"12\" height=\"12\" fill=\"#2F6FB0\"/>\n\
         <text x=\"28\" y=\"45\" font-size=\"13\" fill=\"#1B1F24\">{allowed} allowed</text>\n\
         <rect x=\"122\" y=\"34\" width=\"12\" height=\"12\" fill=\"#B8450B\"/>\n\
         <text x=\"140\" y=\"45\" font-size=\"13\" fill=\"#1B1F24\">{denied} denied</text>\n\
         <svg x=\"8\" y=\"56\" width=\"336\" height=\"230\" viewBox=\"0 0 336 230\">{plot}</svg>\n</svg>\n",
        style()
    );
    // One element a line; and Markdown ends what it takes as it stands at an empty line.
    let lines = svg.replace("><", ">\n<");
    lines.lines().map(str::trim).filter(|line| !line.is_empty()).fold(String::new(), |text, line| text + line + "\n")
}

/// The colours of the report, for elements of such a picture only.
pub(super) fn style() -> String {
    let style = read("crates/cli/src/page/style.css");
    let variables = |block: &str| -> String {
        let lines = block.lines().map(str::trim).take_while(|line| *line != "}");
        lines.filter(|line| line.starts_with("--")).fold(String::new(), |text, line| text + line + "\n")
    };
    let mut blocks = style.split(":root {").skip(1).map(variables);
    let [light, dark] = [blocks.next(), blocks.next()].map(|block| block.expect("colours, light and dark"));
    let mut text = format!(
        ".trace {{\nmax-width: 100%; height: auto; font-family: system-ui, sans-serif;\n{light}}}\n\
         @media (prefers-color-scheme: dark) {{\n.trace {{\n{dark}}}\n}}\n.trace .paper {{ fill: var(--paper); }}\n\
         .trace text {{ font-family: inherit; font-variant-numeric: tabular-nums; }}\n"
    );
    let drawn = ["[fill", "[stroke", ".gap", ".denied"];
    for rule in style.lines().filter(|line| drawn.iter().any(|begin| line.starts_with(begin))) {
        writeln!(text, ".trace {rule}").expect("written");
    }
    text
}
