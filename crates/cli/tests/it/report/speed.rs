//! The plot of speed in the README: numbers of the benches' last run, which stand in a table there.

use std::fmt::Write;

use tollgate_testing::repository::read;

use super::pictures::{is_committed, style};

/// What is drawn: a row of the table, its name in the plot, and whether it is this project's.
const ROWS: [(&str, &str, bool); 5] = [
    ("**tollgate**, `token-bucket`, 10,000 keys", "tollgate, which batches concurrent calls", true),
    ("no-op, one shared connection", "an empty script, one call per decision", false),
    ("redis-cell, a module of the server, 10,000 keys", "redis-cell, a module of the server", false),
    ("`throttled`, 10,000 keys", "throttled, a script over one connection", false),
    ("published token bucket, the same pool", "published token bucket, a pool of 16 connections", false),
];
const TITLE: &str = "Decisions a second";
const HOW: &str = "64 callers, 10,000 keys, one Redis; two cores for all of them";

const WIDTH: u64 = 480;
const MARGIN: u64 = 16;
/// From one name to the next, and from the top to the first.
const APART: u64 = 46;
const TOP: u64 = 84;

#[test]
fn the_readmes_plot_of_speed_has_the_numbers_of_the_last_run() {
    let numbers = ROWS.map(|(row, _, _)| (with_64_callers(row) + 500) / 1000 * 1000);
    assert!(numbers.is_sorted_by(|one, next| one > next), "the longest bar comes first: {numbers:?}");
    let named: Vec<_> =
        ROWS.iter().zip(numbers).map(|((_, name, _), number)| format!("{name}: {}", grouped(number))).collect();
    let said = format!("{TITLE}, {HOW}. {}.", named.join("; "));
    is_committed("benches/speed.svg", &picture(numbers, &said), "plot_of_speed");
    let readme: Vec<_> = read("README.md").split_whitespace().map(str::to_owned).collect();
    let shown = format!("![{said}](benches/speed.svg)");
    assert!(readme.join(" ").contains(&shown), "README.md: expected {shown}");
}

/// Decisions a second in this row of the first table of the last run.
fn with_64_callers(row: &str) -> u64 {
    let page = read("benches/README.md");
    let (_, table) = page.split_once("\n### End to end\n").expect("a section");
    let mut rows = table.lines().filter(|line| line.starts_with('|')).map(|line| line.split(" | ").collect::<Vec<_>>());
    let heads = rows.next().expect("heads");
    let column = heads.iter().position(|head| *head == "callers: 64").expect("a column");
    let cells = rows.find(|cells| cells[0] == format!("| {row}")).unwrap_or_else(|| panic!("{row}: no such row"));
    let (number, _) = cells[column].split_once(" a second").expect("decisions a second");
    let number = number.rsplit('(').next().expect("a number");
    number.parse().unwrap_or_else(|_| panic!("{row}: {number}"))
}

/// With commas between groups of three digits.
fn grouped(number: u64) -> String {
    format!("{},{:03}", number / 1000, number % 1000)
}

/// Each name above its bar, and its number at the right, so that both have room on a phone.
fn picture(numbers: [u64; ROWS.len()], said: &str) -> String {
    let height = TOP + APART * ROWS.len() as u64 - 10;
    let (room, right) = (WIDTH - 2 * MARGIN, WIDTH - MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"trace\" role=\"img\" width=\"{WIDTH}\" height=\"{height}\"\n\
         viewBox=\"0 0 {WIDTH} {height}\" aria-label=\"{said}\">\n<style>\n{}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text x=\"{MARGIN}\" y=\"28\" font-size=\"18\" font-weight=\"600\" fill=\"#1B1F24\">{TITLE}</text>\n\
         <text x=\"{MARGIN}\" y=\"50\" font-size=\"14.5\" fill=\"#57606A\">{HOW}</text>\n",
        style()
    );
    for (((_, name, own), number), y) in ROWS.iter().zip(numbers).zip((TOP..).step_by(APART as usize)) {
        let (weight, ink) = if *own { (600, "#2F6FB0") } else { (400, "#57606A") };
        let (bar, length, number) = (y + 7, room * number / numbers[0], grouped(number));
        let text = format!("font-size=\"15\" font-weight=\"{weight}\" fill=\"#1B1F24\"");
        writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"{y}\" {text}>{name}</text>\n\
             <text x=\"{right}\" y=\"{y}\" text-anchor=\"end\" {text}>{number}</text>\n\
             <rect x=\"{MARGIN}\" y=\"{bar}\" width=\"{length}\" height=\"14\" fill=\"{ink}\"/>"
        )
        .expect("written");
    }
    svg + "</svg>\n"
}
