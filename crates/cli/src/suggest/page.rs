//! Suggestions as a page.

use std::path::PathBuf;
use std::time::Duration;

use super::counting::Place;
use super::report::{NAMED, Report};
use super::share::Of;
use super::suggestion::{Kind, Suggestion};
use super::traffic::Group;
use crate::escape::shown;
use crate::output::{file_names, grouped, human, timestamp};
use crate::page::{Bars, Ink, Measure, Page, Plot, Point, Points, Section, Series, Table};

/// The page for records from these files.
pub(super) fn page(report: &Report<'_>, files: &[PathBuf]) -> Page {
    let read = &report.traffic.read;
    let mut page = Page { title: format!("Limits for {}", file_names(files)), ..Page::default() };
    let what = if report.bound.of == Of::Keys { "keys" } else { "requests" };
    let share = report.bound.share;
    page.says = match report.groups {
        [only] => match recommended(report, *only).first() {
            Some(best) => says(report, &report.traffic.groups[*only], best),
            None => format!("No limit was found that denies at most {share} of the {what}."),
        },
        groups => format!("For each of {} groups, the limits that deny at most {share} of its {what}.", groups.len()),
    };
    page.fact("Records", grouped(read.records));
    page.fact("Lines that could not be read", grouped(read.unreadable));
    page.fact("Records out of order", grouped(read.out_of_order));
    for (why, count) in &read.left_out {
        page.fact("Left out", format!("{} with {why}", grouped(*count)));
    }
    page.fact("May be denied", format!("{share} of {what}"));
    if report.left > 0 {
        page.fact("Groups left out", format!("{}, with fewer requests", grouped(report.left as u64)));
    }
    for at in report.groups {
        page.sections.extend(of_group(report, *at));
    }
    page
}

fn recommended<'r>(report: &'r Report<'_>, at: usize) -> Vec<&'r Suggestion> {
    report.of_group(at).filter(|suggestion| suggestion.kind == Kind::Recommended).collect()
}

fn says(report: &Report<'_>, group: &Group, best: &Suggestion) -> String {
    let by = report.by_of(group).map(|by| format!(" by {by}")).unwrap_or_default();
    let [denied, requests, hit, keys] = [best.denied, group.requests, best.hits.len() as u64, group.keys].map(grouped);
    let (from, span) = (moment(group.from_us), human(Duration::from_micros(group.span_us())));
    format!(
        "{} would have denied {denied} of {requests} requests, and {hit} of {keys} keys{by} at least once, in {span} \
         from {from}.",
        best.text()
    )
}

/// The frontier of a group, its other limits, and whom the first would hit.
fn of_group(report: &Report<'_>, at: usize) -> Vec<Section> {
    let group = &report.traffic.groups[at];
    let recommended = recommended(report, at);
    let Some(best) = recommended.first() else { return Vec::new() };
    let named = match &group.place {
        Place::Anywhere => String::new(),
        Place::Value(value) => format!(": {}", shown(value).chars().take(80).collect::<String>()),
        Place::Rule { name, .. } => format!(": rule {name}"),
    };
    let frontier: Vec<_> = report.of_group(at).filter(|suggestion| suggestion.kind == Kind::Frontier).collect();
    let mut sections = vec![Section {
        title: format!("Limits{named}"),
        says: format!(
            "{} The table has the lowest limit of each algorithm. {}",
            says(report, group, best),
            report.notes(at).join(" ")
        ),
        plot: None,
        table: table(report.of_group(at).filter(|suggestion| suggestion.kind != Kind::Frontier)),
    }];
    if frontier.len() > 1 {
        sections.push(rates(&named, best, &frontier));
    }
    sections.extend(hits(report, &named, best));
    sections
}

fn table<'r>(suggestions: impl Iterator<Item = &'r Suggestion>) -> Table {
    let mut table = Table::new(["limit", "requests denied", "keys hit"]);
    for suggestion in suggestions {
        let [denied, hit] = [suggestion.denied, suggestion.hits.len() as u64].map(grouped);
        table.row([suggestion.text(), denied, hit]);
    }
    table
}

/// The burst that each rate needs.
fn rates(named: &str, best: &Suggestion, frontier: &[&Suggestion]) -> Section {
    let period = human(best.limit.period());
    let point = |suggestion: &&Suggestion| Point {
        x: suggestion.limit.rate() as f64,
        y: suggestion.limit.capacity() as f64,
        chosen: None,
    };
    let of_best = |point: &Point| point.x == best.limit.rate() as f64 && point.y == best.limit.capacity() as f64;
    let mut points: Vec<_> = frontier.iter().map(point).filter(|point| !of_best(point)).collect();
    points.push(Point { chosen: Some(best.text()), ..point(&best) });
    points.sort_by(|one, other| one.x.total_cmp(&other.x));
    Section {
        title: format!("Rate against burst{named}"),
        says: format!(
            "The least burst that each rate needs: the lower the rate, the larger the burst. Recommended is the rate with \
             the least sum of both, the most that a key can take in any {period}."
        ),
        plot: Some(Plot::Points(Points {
            across: format!("units each {period}"),
            across_measure: Measure::Count,
            up: "burst, in units".to_owned(),
            up_measure: Measure::Count,
            points,
            names: ["denies at most that share".to_owned(), "recommended".to_owned()],
        })),
        table: table(frontier.iter().copied()),
    }
}

fn moment(us: u64) -> String {
    timestamp(us - us % 1_000_000).replace(".000000", "")
}

/// The keys that would be denied most.
fn hits(report: &Report<'_>, named: &str, best: &Suggestion) -> Option<Section> {
    let most = best.hits.iter().take(NAMED);
    let mut table = Table::new(["key", "requests", "denied", "first", "last"]);
    let mut plot = Bars::default();
    let (mut allowed, mut denied) = (Vec::new(), Vec::new());
    for hit in most {
        let key = &report.traffic.keys[hit.key as usize];
        let name = shown(key.bytes());
        let [first, last] = [hit.first_us, hit.last_us].map(moment);
        table.row([name.clone(), grouped(key.requests), grouped(hit.denied), first, last]);
        plot.notes.push(format!("{} of {} denied", grouped(hit.denied), grouped(key.requests)));
        plot.names.push(name);
        allowed.push(key.requests - hit.denied);
        denied.push(hit.denied);
    }
    if plot.names.is_empty() {
        return None;
    }
    let shown = match best.hits.len() {
        1 => "One key would be hit".to_owned(),
        all if all > NAMED => format!("{} keys would be hit; these {NAMED} most", grouped(all as u64)),
        all => format!("{all} keys would be hit"),
    };
    plot.series = vec![
        Series { name: "allowed".into(), ink: Ink::Allowed, counts: allowed },
        Series { name: "denied".into(), ink: Ink::Denied, counts: denied },
    ];
    Some(Section {
        title: format!("Who would be hit{named}"),
        says: format!("{shown}, under {}. The hatched part of a bar would be denied.", best.text()),
        plot: Some(Plot::Bars(plot)),
        table,
    })
}
