//! `tollgate stats`: statistics of decisions, as a table and as bars.

mod page;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Result, anyhow, ensure};
use clap::{Args, ValueEnum};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tollgate_record::history::{Stats as Counted, StatsQuery, Width};

use crate::database_output::time;
use crate::db::Database;
use crate::escape::shown;
use crate::found;
use crate::messages::note;
use crate::options::{self, Output};
use crate::output::{QUIET, RIGHT, Shape, WRONG, counted, human, json as print_json, micros, width};
use crate::page::ReportFile;
use crate::time_options::{span, times};

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// The length of each period. Default: the finest that gives at most 100 rows.
    #[arg(long = "per", value_enum, value_name = "PERIOD")]
    unit: Option<Unit>,
    /// How far back to look, such as 90m or 7d. Default: a day.
    #[arg(long, value_name = "D", value_parser = options::time_to_come, conflicts_with = "from")]
    last: Option<Duration>,
    /// Start at this time instead: 14:03, 2026-11-23T14:03 or 2026-11-23, in UTC.
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Up to the end of this day, minute or second. Default: now.
    #[arg(long, value_name = "TIME", requires = "from")]
    to: Option<String>,
    /// Show a row for each of these instead of for each period.
    ///
    /// Those with most denials first.
    #[arg(long, value_enum, value_name = "NAME")]
    each: Option<Each>,
    /// Only this user.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Only this endpoint: a route, or a path if the route isn't known.
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<String>,
    /// Only this region.
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
    /// Show at most this many rows.
    #[arg(long, value_name = "N", default_value = "100", value_parser = options::from_one::<u32, 10_000>)]
    most: u32,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    report: ReportFile,
    #[command(flatten)]
    database: Database,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Unit {
    Minute,
    Hour,
    Day,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Each {
    User,
    Endpoint,
    Region,
}

/// With more rows than this, the next longer unit is used.
const MOST_TIMES: i64 = 100;
const DAY: Duration = Duration::from_secs(86_400);
/// A narrower plot would show nothing.
const LEAST_PLOT: usize = 40;

impl Stats {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let now = Timestamp::now();
        let (from, end) = match &self.from {
            Some(from) => {
                let span = span(from, self.to.as_deref(), now)?;
                (span.start, span.end)
            }
            None => {
                let ago = SignedDuration::try_from(self.last.unwrap_or(DAY)).ok();
                let from = ago.and_then(|ago| now.checked_sub(ago).ok());
                let too_long = || anyhow!("--last: reaches back before the year 0");
                (from.ok_or_else(too_long)?, now)
            }
        };
        let fitting = || fitting(end.duration_since(from));
        let exact = || self.each.and_then(|_| exact(from, end));
        let unit = self.unit.or_else(exact).unwrap_or_else(fitting);
        ensure!(from <= end, "--from: expected a time before the end, {end:.0}, got {from:.0}");
        let report = self.report.open(&[])?;
        // Includes the period that began before the start.
        let asked = from;
        let from = unit.beginning(from);
        if self.each.is_some() && (unit.beginning(end) != end || from != asked) {
            // Rows by time show their own range.
            let until = unit.beginning(end).checked_add(SignedDuration::from_secs(unit.seconds())).unwrap_or(end);
            let name = unit.width().name();
            note(format!("counted by the {name}, from {from:.0} to {until:.0}"));
        }
        let (since, until) = times(&(from..end));
        let mut query = StatsQuery::new(unit.width(), since, until).most(self.most.saturating_add(1));
        query = self.user.iter().fold(query, |query, user| query.user(user));
        query = self.endpoint.iter().fold(query, |query, endpoint| query.endpoint(endpoint));
        query = self.region.iter().fold(query, |query, region| query.region(region));
        query = match self.each {
            None => query,
            Some(Each::User) => query.by_user(),
            Some(Each::Endpoint) => query.by_endpoint(),
            Some(Each::Region) => query.by_region(),
        };
        let mut rows = self.database.open()?.stats(&query).await?;
        let most = self.most as usize;
        let not_read = rows.len().saturating_sub(most) as u64;
        if rows.is_empty() {
            note(format!("no decision is counted from {from:.0} to {end:.0}"));
        }
        if rows.len() > most {
            note(format!("only {}: see --most", counted(most as u64, "row")));
            match self.each {
                None => drop(rows.drain(..rows.len() - most)),
                Some(_) => rows.truncate(most),
            }
        }
        let printed = match self.output.shape() {
            Shape::Jsonl => {
                rows.iter().try_for_each(|row| print_json(anstream::stdout(), &record(row, unit, self.each)))
            }
            Shape::Table => print_table(&rows, unit, self.each),
        };
        if let Some(report) = report {
            let span = [from, end].map(|time| format!("{time:.0}"));
            report.write(&page::page(&rows, not_read, unit, self.each, span))?;
        }
        found(ExitCode::from(u8::from(rows.is_empty())), printed)
    }
}

/// The shortest unit that gives few enough rows for this length of time.
fn fitting(length: SignedDuration) -> Unit {
    let fits = |unit: &Unit| length.as_secs() / unit.seconds() <= MOST_TIMES;
    [Unit::Minute, Unit::Hour].into_iter().find(fits).unwrap_or(Unit::Day)
}

/// The longest unit that both ends are aligned to, if it gives few enough rows.
fn exact(from: Timestamp, end: Timestamp) -> Option<Unit> {
    let fits = |unit: &Unit| unit.beginning(from) == from && unit.beginning(end) == end;
    let unit = [Unit::Day, Unit::Hour, Unit::Minute].into_iter().find(fits)?;
    Some(unit).filter(|unit| end.duration_since(from).as_secs() / unit.seconds() <= 4 * MOST_TIMES)
}

impl Unit {
    /// The start of the minute, hour or day that contains this time.
    fn beginning(self, time: Timestamp) -> Timestamp {
        Timestamp::from_second(time.as_second().div_euclid(self.seconds()) * self.seconds()).unwrap_or(time)
    }

    fn seconds(self) -> i64 {
        match self {
            Self::Minute => 60,
            Self::Hour => 3600,
            Self::Day => 86_400,
        }
    }

    fn width(self) -> Width {
        match self {
            Self::Minute => Width::Minute,
            Self::Hour => Width::Hour,
            Self::Day => Width::Day,
        }
    }
}

impl Each {
    fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Endpoint => "endpoint",
            Self::Region => "region",
        }
    }
}

fn record(row: &Counted, unit: Unit, each: Option<Each>) -> Value {
    let mut record = match each {
        None => json!({ unit.width().name(): time(row.began) }),
        Some(each) => json!({ each.name(): row.name }),
    };
    let counts = json!({
        "allowed": row.allowed,
        "throttled": row.throttled,
        "blocked": row.blocked,
        "cache_hits": row.cache_hits,
        "cache_misses": row.cache_misses,
        "p50_us": micros(row.p50),
        "p95_us": micros(row.p95),
        "p99_us": micros(row.p99),
    });
    if let (Value::Object(record), Value::Object(counts)) = (&mut record, counts) {
        record.extend(counts);
    }
    record
}

/// A row of the table and of the plot.
struct Line {
    cells: Vec<String>,
    allowed: u64,
    denied: u64,
}

fn print_table(rows: &[Counted], unit: Unit, each: Option<Each>) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let first = each.map_or_else(|| format!("{} (UTC)", unit.width().name()), |each| each.name().to_owned());
    let heads = [&*first, "allowed", "throttled", "blocked", "p50", "p95", "p99", "cached"];
    let mut lines = Vec::with_capacity(rows.len());
    for (at, row) in rows.iter().enumerate() {
        lines.push(line(row, unit));
        // A period without decisions gets a row too, so that gaps are visible; of a long gap, only the first ones.
        let next = rows.get(at + 1).and_then(|next| next.began);
        if let (Some(began), Some(next)) = (row.began, next) {
            let missing = next.duration_since(began).unwrap_or_default().as_secs() / unit.seconds().unsigned_abs();
            let gaps = (1..missing).take(MOST_TIMES as usize).map(|gap| {
                let began = began + Duration::from_secs(gap * unit.seconds().unsigned_abs());
                let mut cells = vec![label(Some(began), None, unit)];
                cells.resize(heads.len(), "-".to_owned());
                Line { cells, allowed: 0, denied: 0 }
            });
            lines.extend(gaps);
        }
    }
    draw(&heads, &lines)
}

fn line(row: &Counted, unit: Unit) -> Line {
    let cells = vec![
        label(row.began, row.name.as_deref(), unit),
        row.allowed.to_string(),
        row.throttled.to_string(),
        row.blocked.to_string(),
        rounded(row.p50),
        rounded(row.p95),
        rounded(row.p99),
        share(row.cache_hits, row.cache_hits.saturating_add(row.cache_misses)),
    ];
    Line { cells, allowed: row.allowed, denied: row.throttled.saturating_add(row.blocked) }
}

fn share(part: u64, of: u64) -> String {
    if of == 0 { "-".to_owned() } else { format!("{:.1}%", part as f64 / of as f64 * 1e2) }
}

/// Rounded to two digits, since it isn't known more precisely.
fn rounded(time: Duration) -> String {
    let micros = micros(time);
    let unit = 10_u64.pow(micros.checked_ilog10().unwrap_or_default().saturating_sub(1));
    human(Duration::from_micros((micros + unit / 2) / unit * unit))
}

fn label(began: Option<SystemTime>, name: Option<&str>, unit: Unit) -> String {
    match (began.and_then(|began| Timestamp::try_from(began).ok()), name) {
        (Some(began), _) => match unit {
            Unit::Day => began.strftime("%Y-%m-%d").to_string(),
            _ => began.strftime("%Y-%m-%d %H:%M").to_string(),
        },
        (None, Some("")) => "(not known)".to_owned(),
        (None, name) => shown(name.unwrap_or_default().as_bytes()),
    }
}

/// The table with the plot beside it or, if there is no room, below it.
fn draw(heads: &[&str], lines: &[Line]) -> io::Result<()> {
    let mut out = anstream::stdout();
    let widths: Vec<_> = heads
        .iter()
        .enumerate()
        .map(|(column, head)| {
            let cells = lines.iter().map(|line| line.cells[column].chars().count());
            cells.max().unwrap_or_default().max(head.len())
        })
        .collect();
    let aligned = |cells: &[&str]| {
        let cells = cells.iter().zip(&widths).enumerate();
        let cells: Vec<_> = cells
            .map(|(at, (cell, width))| if at == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") })
            .collect();
        cells.join("  ")
    };
    let table = widths.iter().sum::<usize>() + 2 * widths.len();
    let beside = width().saturating_sub(table);
    let is_beside = beside >= LEAST_PLOT;
    writeln!(out, "{QUIET}{}{QUIET:#}", aligned(heads))?;
    for line in lines {
        let cells: Vec<_> = line.cells.iter().map(String::as_str).collect();
        let plot = if is_beside { format!("  {}", bars(line, lines, beside)) } else { String::new() };
        writeln!(out, "{}{plot}", aligned(&cells))?;
    }
    if !is_beside {
        writeln!(out)?;
        let room = width().saturating_sub(widths[0] + 2).max(LEAST_PLOT);
        for line in lines {
            writeln!(out, "{:<name$}  {}", line.cells[0], bars(line, lines, room), name = widths[0])?;
        }
    }
    if lines.iter().any(|line| line.denied > 0) {
        writeln!(out, "{QUIET}█ allowed  ░ denied{QUIET:#}")?;
    }
    Ok(())
}

/// Allowed, then denied requests, on the scale of the longest bar; their number, and the share of denials.
fn bars(line: &Line, lines: &[Line], room: usize) -> String {
    let requests = |line: &Line| line.allowed.saturating_add(line.denied);
    let most = lines.iter().map(requests).max().unwrap_or_default().max(1);
    // Room for numbers such as `123456 (15.8% denied)`.
    let room = room.saturating_sub(most.to_string().len() + " (99.9% denied)".len() + 1);
    let length = |count: u64| {
        let length = (count as f64 / most as f64 * room as f64).round() as usize;
        // A count above zero is always visible.
        if count > 0 { length.max(1) } else { 0 }
    };
    let denied = length(line.denied);
    let allowed = length(line.allowed).min(room.saturating_sub(denied));
    let [allowed, denied] = ["█".repeat(allowed), "░".repeat(denied)];
    let bar = format!("{RIGHT}{allowed}{RIGHT:#}{WRONG}{denied}{WRONG:#}");
    match (requests(line), line.denied) {
        (0, _) => "0".to_owned(),
        (all, 0) => format!("{bar} {all}"),
        (all, some) => format!("{bar} {all} ({} denied)", share(some, all)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_by_name_count_the_time_that_was_asked_for_and_no_more() {
        let seconds = |from: &str, end: &str| {
            let [from, end] = [from, end].map(|time| time.parse::<Timestamp>().expect("a time"));
            exact(from, end).map(Unit::seconds)
        };
        for (from, end, unit) in [
            ("2026-08-01T00:00:00Z", "2026-08-03T00:00:00Z", Some(86_400)),
            ("2026-08-01T10:00:00Z", "2026-08-01T12:00:00Z", Some(3600)),
            ("2026-08-01T10:00:00Z", "2026-08-01T12:01:00Z", Some(60)),
            ("2026-08-01T10:00:00Z", "2026-08-01T12:00:01Z", None),
            ("2026-08-01T00:00:00Z", "2026-08-09T00:01:00Z", None),
        ] {
            assert_eq!(seconds(from, end), unit, "{from} {end}");
        }
    }
}
