//! Statistics of decisions as a page.

use std::time::Duration;

use tollgate_record::history::Stats as Counted;

use super::{Each, Unit, label, rounded};
use crate::output::{grouped, micros, percent};
use crate::page::{Bars, Columns, Ink, Line, Lines, Measure, Page, Plot, Section, Series, Table};

/// More columns than this can't be told apart.
const MOST: usize = 300;

/// The page for these rows, each for a period or, with `each`, for a name; `not_read` more are left out, and `span` is
/// the time of the decisions.
pub(super) fn page(rows: &[Counted], not_read: u64, unit: Unit, each: Option<Each>, span: [String; 2]) -> Page {
    let [from, to] = span;
    let mut page = Page { title: format!("Decisions from {from} to {to}"), ..Page::default() };
    let sum = |count: fn(&Counted) -> u64| rows.iter().map(count).fold(0, u64::saturating_add);
    let (allowed, throttled, blocked) = (sum(|row| row.allowed), sum(|row| row.throttled), sum(|row| row.blocked));
    let all = allowed.saturating_add(throttled).saturating_add(blocked);
    page.says = match all {
        0 => "No decision is counted.".to_owned(),
        _ => {
            let shares = [throttled, blocked].map(|part| percent(part as f64 / all as f64));
            let [throttled, blocked, all] = [throttled, blocked, all].map(grouped);
            let [of_throttled, of_blocked] = shares;
            format!(
                "Of {all} requests, {throttled} were throttled ({of_throttled}) and {blocked} were blocked ({of_blocked})."
            )
        }
    };
    for (name, count) in [("Requests", all), ("Allowed", allowed), ("Throttled", throttled), ("Blocked", blocked)] {
        page.fact(name, grouped(count));
    }
    let (hits, misses) = (sum(|row| row.cache_hits), sum(|row| row.cache_misses));
    if hits + misses > 0 {
        page.fact("Answered from a cache", percent(hits as f64 / (hits + misses) as f64));
    }
    if not_read > 0 {
        let sums = "so these sums are of the others alone: see --most";
        page.fact("Rows that are not counted", format!("{}, {sums}", grouped(not_read)));
    }
    let left_out = rows.len().saturating_sub(MOST);
    if left_out > 0 {
        page.fact("Rows that are not drawn", grouped(left_out as u64));
    }
    match each {
        _ if rows.is_empty() => {}
        Some(each) => page.sections.push(by_name(&rows[..rows.len() - left_out], unit, each)),
        None => {
            let rows = &rows[left_out..];
            page.sections.extend([over_time(rows, unit), latency(rows, unit)]);
        }
    }
    page
}

/// The name of a kind, its ink, and its value in a row.
type Kind<T> = (&'static str, Ink, fn(&Counted) -> T);

const KINDS: [Kind<u64>; 3] = [
    ("allowed", Ink::Allowed, |row| row.allowed),
    ("throttled", Ink::Denied, |row| row.throttled),
    ("blocked", Ink::Other, |row| row.blocked),
];

/// A count for each row, zero for a missing one.
fn series(rows: &[Option<&Counted>]) -> Vec<Series> {
    KINDS
        .into_iter()
        .map(|(name, ink, count)| {
            let counts = rows.iter().map(|row| row.map_or(0, count)).collect();
            Series { name: name.to_owned(), ink, counts }
        })
        .collect()
}

fn by_name(rows: &[Counted], unit: Unit, each: Each) -> Section {
    let what = each.name();
    let mut table = Table::new([what, "allowed", "throttled", "blocked", "p50", "p95", "p99"]);
    let mut plot = Bars { series: series(&rows.iter().map(Some).collect::<Vec<_>>()), ..Bars::default() };
    for row in rows {
        let name = label(row.began, row.name.as_deref(), unit);
        let denied = row.throttled.saturating_add(row.blocked);
        plot.notes.push(format!("{} of {} denied", grouped(denied), grouped(denied.saturating_add(row.allowed))));
        table.row(cells(name.clone(), row));
        plot.names.push(name);
    }
    let says = format!(
        "Those with most denials first: each bar is one {what}, its hatched part throttled, its dotted part blocked."
    );
    Section { title: format!("By {what}"), says, plot: Some(Plot::Bars(plot)), table }
}

/// The rows with their names, including periods without decisions while they are few.
fn periods<'r>(rows: &'r [Counted], unit: Unit) -> Vec<(String, Option<&'r Counted>)> {
    let length = Duration::from_secs(unit.seconds().unsigned_abs());
    let mut all: Vec<(String, Option<&'r Counted>)> = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        all.push((label(row.began, None, unit), Some(row)));
        let next = rows.get(at + 1).and_then(|next| next.began);
        let (Some(mut began), Some(next)) = (row.began, next) else { continue };
        while let Some(missing) = began.checked_add(length).filter(|missing| *missing < next) {
            if all.len() >= 2 * MOST {
                break;
            }
            all.push((label(Some(missing), None, unit), None));
            began = missing;
        }
    }
    all
}

fn over_time(rows: &[Counted], unit: Unit) -> Section {
    let name = unit.width().name();
    let periods = periods(rows, unit);
    let mut table = Table::new([&*format!("{name} (UTC)"), "allowed", "throttled", "blocked", "p50", "p95", "p99"]);
    for row in rows {
        table.row(cells(label(row.began, None, unit), row));
    }
    let (mut edges, across) = axis(&periods, unit);
    edges.push(String::new());
    let says = format!(
        "Each column is one {name}: its hatched part was throttled by a limit, its dotted part blocked by a rule or for \
         a user."
    );
    let plot = Columns {
        edges,
        across,
        up: format!("requests per {name}"),
        series: series(&periods.iter().map(|(_, row)| *row).collect::<Vec<_>>()),
        ..Columns::default()
    };
    Section { title: "Over time".into(), says, plot: Some(Plot::Columns(plot)), table }
}

fn latency(rows: &[Counted], unit: Unit) -> Section {
    let name = unit.width().name();
    let periods = periods(rows, unit);
    let kinds: [Kind<Duration>; 3] = [
        ("half, up to (p50)", Ink::Plain, |row| row.p50),
        ("95 %, up to (p95)", Ink::Other, |row| row.p95),
        ("99 %, up to (p99)", Ink::Denied, |row| row.p99),
    ];
    let mut table = Table::new([&*format!("{name} (UTC)"), "p50", "p95", "p99"]);
    for row in rows {
        let [p50, p95, p99] = kinds.map(|(_, _, time)| rounded(time(row)));
        table.row([label(row.began, None, unit), p50, p95, p99]);
    }
    let highest = |time: fn(&Counted) -> Duration| rounded(rows.iter().map(time).max().unwrap_or_default());
    let says = format!(
        "How long decisions took in each {name}. The highest values of any {name}: half took up to {}, 95 of 100 up to \
         {} and 99 of 100 up to {}.",
        highest(kinds[0].2),
        highest(kinds[1].2),
        highest(kinds[2].2)
    );
    let lines = kinds.map(|(name, ink, time)| {
        let values = periods.iter().map(|(_, row)| row.map(|row| micros(time(row)) as f64)).collect();
        Line { name: name.to_owned(), ink, values }
    });
    let (labels, across) = axis(&periods, unit);
    let plot = Lines { labels, across, up: "time of a decision".into(), measure: Measure::Time, lines: lines.into() };
    Section { title: "Latency".into(), says, plot: Some(Plot::Lines(plot)), table }
}

fn cells(name: String, row: &Counted) -> [String; 7] {
    let [allowed, throttled, blocked] = [row.allowed, row.throttled, row.blocked].map(grouped);
    let [p50, p95, p99] = [row.p50, row.p95, row.p99].map(rounded);
    [name, allowed, throttled, blocked, p50, p95, p99]
}

/// Labels of periods, as short as possible, and the title of the axis, with their common part.
fn axis(periods: &[(String, Option<&Counted>)], unit: Unit) -> (Vec<String>, String) {
    let day = |label: &str| label.get(..10).unwrap_or(label).to_owned();
    let first = periods.first().map(|(label, _)| day(label)).unwrap_or_default();
    let is_one_day = periods.iter().all(|(label, _)| day(label) == first) && unit.seconds() < Unit::Day.seconds();
    let (from, rest) = if is_one_day { (11, first) } else { (5, format!("from {first} on")) };
    let labels = periods.iter().map(|(label, _)| label.get(from..).unwrap_or(label).to_owned());
    (labels.collect(), format!("{} (UTC), {rest}", unit.width().name()))
}
