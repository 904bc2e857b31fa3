//! What is suggested, for people.

use std::io::{self, Write};
use std::time::Duration;

use anstyle::Style;

use super::counting::Place;
use super::meter::Meter;
use super::report::{NAMED, Report};
use super::share::Of;
use super::suggestion::{Kind, Suggestion};
use super::traffic::Group;
use crate::escape::shown;
use crate::output::{QUIET, counted, facts, human, timestamp, width, wrapped};

const PASTE: Style = Style::new().bold();

/// Prints everything.
pub(super) fn print(report: &Report<'_>, mut out: impl Write) -> io::Result<()> {
    let read = &report.traffic.read;
    let mut about = vec![("records", read.records.to_string()), ("unreadable", read.unreadable.to_string())];
    if read.out_of_order > 0 {
        about.push(("out of order", format!("{}, sorted by time", read.out_of_order)));
    }
    for (why, count) in &read.left_out {
        about.push(("left out", format!("{count} with {why}")));
    }
    print_facts(&mut out, &about)?;
    for at in report.groups {
        writeln!(out)?;
        of_group(report, *at, &mut out)?;
    }
    if report.left > 0 {
        let of_rules = report.groups.iter().any(|at| report.traffic.groups[*at].present.is_some());
        let what = if of_rules { "more limit" } else { "more value" };
        writeln!(out, "\nand {}, with fewer requests", counted(report.left as u64, what))?;
    }
    to_paste(report, &mut out)?;
    checked(report, &mut out)?;
    out.flush()
}

fn of_group(report: &Report<'_>, at: usize, out: &mut impl Write) -> io::Result<()> {
    let group = &report.traffic.groups[at];
    let by = report.by_of(group).map(|by| format!(" by {by}")).unwrap_or_default();
    let mut about = Vec::new();
    match &group.place {
        Place::Anywhere => {}
        Place::Value(value) => about.push(("value", fitted(&shown(value), width().saturating_sub(12)))),
        Place::Rule { name, .. } => about.push(("rule", name.clone())),
    }
    if let Some(present) = &group.present {
        about.push(("is now", present.limit.to_string()));
    }
    about.push(("traffic", format!("{}, {}{by}", counted(group.requests, "request"), counted(group.keys, "key"))));
    let span = human(Duration::from_micros(group.span_us()));
    about.push(("from", format!("{}, for {span}", moment(group.from_us))));
    let what = if report.bound.of == Of::Keys { "key" } else { "request" };
    let (share, may_deny) = (report.bound.share, report.may_deny(group));
    about.push(("may deny", format!("{} of {what}s: {}", share, counted(may_deny, what))));
    print_facts(out, &about)?;

    let of = |kind: Kind| report.of_group(at).filter(move |suggestion| suggestion.kind == kind).collect::<Vec<_>>();
    let (recommended, frontier) = (of(Kind::Recommended), of(Kind::Frontier));
    if recommended.is_empty() {
        return text(out, unfit(group));
    }
    limits(out, "limit", &recommended)?;
    if let Some(best) = recommended.first().filter(|_| frontier.len() > 1) {
        limits(out, "other rates", &frontier)?;
        let period = human(best.limit.period());
        let why = "Recommended is the rate with the least sum of rate and burst, the most that a key can take in any";
        text(out, &format!("{why} {period}; of several, the highest, which refills soonest."))?;
    }
    limits(out, "other windows", &of(Kind::OtherPeriod))?;
    let notes = report.notes(at);
    if !notes.is_empty() {
        text(out, &notes.join(" "))?;
    }
    if let Some(best) = recommended.first() {
        hits(report, best, out)?;
    }
    Ok(())
}

/// Why nothing is suggested for a group.
fn unfit(group: &Group) -> &'static str {
    if group.present.as_ref().is_some_and(|present| Meter::of(&present.limit).is_none()) {
        return "Nothing is suggested for permits, shards, debts, calendar windows, and windows that start by key or \
                carry units over.";
    }
    "No limit was found that denies so few."
}

/// What the suggestions are, and how many requests and keys each would deny.
fn limits(out: &mut impl Write, title: &str, suggestions: &[&Suggestion]) -> io::Result<()> {
    let Some(first) = suggestions.first() else { return Ok(()) };
    let style = if first.kind == Kind::Recommended { PASTE } else { Style::new() };
    let row = |suggestion: &&Suggestion| {
        [suggestion.text(), suggestion.denied.to_string(), suggestion.hits.len().to_string()]
    };
    let rows: Vec<_> = suggestions.iter().map(row).collect();
    let head = [title, "denied", "keys"].map(str::to_owned);
    let widest = |at: usize| rows.iter().chain([&head]).map(|row| row[at].len()).max().unwrap_or_default();
    let (text, denied, keys) = (widest(0), widest(1), widest(2));
    let fits = text + denied + keys + 2 <= width();
    writeln!(out)?;
    for (row, style) in [(&head, QUIET)].into_iter().chain(rows.iter().map(|row| (row, style))) {
        let [limit, count, hit] = row;
        // On a narrow terminal, the numbers have a line of their own.
        let (numbers, style_of_numbers) =
            (format!("{count:>denied$} {hit:>keys$}"), if style == QUIET { QUIET } else { Style::new() });
        let numbers = format!("{style_of_numbers}{numbers}{style_of_numbers:#}");
        match fits {
            true => writeln!(out, "{style}{limit:<text$}{style:#} {numbers}")?,
            false => writeln!(out, "{style}{limit}{style:#}\n  {numbers}")?,
        }
    }
    Ok(())
}

/// The keys that would be denied most, and when.
fn hits(report: &Report<'_>, suggestion: &Suggestion, out: &mut impl Write) -> io::Result<()> {
    const NUMBERS: usize = 17;
    const TIMES: usize = 34;
    if suggestion.hits.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{QUIET}hit by {}{QUIET:#}", suggestion.text())?;
    writeln!(out, "{QUIET}{:>7} {:>8} key{QUIET:#}", "denied", "of")?;
    let indent = width().saturating_sub(TIMES).clamp(1, NUMBERS);
    for hit in suggestion.hits.iter().take(NAMED) {
        let key = &report.traffic.keys[hit.key as usize];
        let name = fitted(&shown(key.bytes()), width().saturating_sub(NUMBERS));
        writeln!(out, "{:>7} {:>8} {name}", hit.denied, key.requests)?;
        let when = match hit.last_us - hit.first_us {
            0 => format!("at {}", moment(hit.first_us)),
            time => format!("{}, for {}", moment(hit.first_us), human(Duration::from_micros(time))),
        };
        writeln!(out, "{QUIET}{:indent$}{when}{QUIET:#}", "")?;
    }
    if let more @ 1.. = suggestion.hits.len().saturating_sub(NAMED) {
        writeln!(out, "{:NUMBERS$}and {}", "", counted(more as u64, "more key"))?;
    }
    Ok(())
}

/// The lines of a rules file.
fn to_paste(report: &Report<'_>, out: &mut impl Write) -> io::Result<()> {
    let mut rules: Vec<(&str, Vec<String>)> = Vec::new();
    for at in report.groups {
        let Group { place, present, .. } = &report.traffic.groups[*at];
        let (Place::Rule { name, .. }, Some(present)) = (place, present) else { continue };
        let found = report.of_group(*at).find(|suggestion| suggestion.kind == Kind::Recommended);
        let limit = found.map_or_else(|| present.limit.to_string(), |suggestion| suggestion.text());
        let line = match (present.limit.name(), &present.part) {
            (None, None) => format!("{limit:?}"),
            (named, part) => {
                let named = named.map(|name| format!("name = {name:?}, ")).unwrap_or_default();
                let part = part.as_ref().map(|part| format!(", key = {part:?}")).unwrap_or_default();
                format!("{{ {named}limit = {limit:?}{part} }}")
            }
        };
        match rules.last_mut().filter(|(last, _)| last == name) {
            Some((_, lines)) => lines.push(line),
            None => rules.push((name, vec![line])),
        }
    }
    for (name, lines) in rules {
        writeln!(out, "\n{QUIET}# {name}{QUIET:#}\n{PASTE}limits = [{}]{PASTE:#}", lines.join(", "))?;
    }
    Ok(())
}

/// What a replay has confirmed.
fn checked(report: &Report<'_>, out: &mut impl Write) -> io::Result<()> {
    let checked = || report.suggestions.iter().map(|suggestion| suggestion.checked);
    let Some(least) = checked().max_by_key(|checked| checked.left) else { return Ok(()) };
    writeln!(out)?;
    let each = "Checked by a replay of each limit";
    if least.left == 0 {
        return text(out, &format!("{each}, with every key that it could hit."));
    }
    let requests: u64 = checked().map(|checked| checked.requests).sum();
    let keys = checked().map(|of| of.keys).min().unwrap_or_default();
    let beside = "with the keys that it hits most and those that need the most";
    text(out, &format!("{each}, {beside}: {requests} requests, of {keys} keys at least."))
}

fn text(out: &mut impl Write, text: &str) -> io::Result<()> {
    wrapped(text, width()).iter().try_for_each(|line| writeln!(out, "{QUIET}{line}{QUIET:#}"))
}

/// Facts whose values are wrapped.
fn print_facts(out: &mut impl Write, about: &[(&'static str, String)]) -> io::Result<()> {
    let names = about.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let room = width().saturating_sub(names + 2).max(16);
    let mut all = Vec::new();
    for (name, value) in about {
        let lines = wrapped(value, room).into_iter().enumerate();
        all.extend(lines.map(|(at, line)| (if at == 0 { *name } else { "" }, line)));
    }
    facts(out, &all)
}

/// A time to the second.
fn moment(t_us: u64) -> String {
    timestamp(t_us - t_us % 1_000_000).replace(".000000", "")
}

/// The text, or as much of it as there is room for.
fn fitted(text: &str, room: usize) -> String {
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}
