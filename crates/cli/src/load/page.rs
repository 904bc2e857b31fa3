//! A run under load as a page.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::audit::Audit;
use super::report::{Quantiles, Report, answered};
use crate::output::{counted, grouped, human, percent};
use crate::page::{Bins, Columns, Ink, Page, Plot, Section, Series, Table, since_start};

pub(super) fn page(report: &Report<'_>) -> Page {
    let tally = report.tally;
    let rules = report.rules.join(", ");
    let mut page = Page { title: format!("{rules} under load"), says: says(report), ..Page::default() };
    page.fact("Load", report.load());
    page.fact("Decided by", report.by.clone());
    page.fact("Answered", answered(tally));
    page.fact("Allowed", grouped(tally.allowed));
    page.fact("Denied", grouped(tally.denied));
    if tally.errors.total() > 0 {
        page.fact("Failed calls", format!("{}: {}", grouped(tally.errors.total()), tally.errors));
        page.fact("First error", tally.first_error.clone().unwrap_or_default());
    }
    if tally.unsent > 0 {
        page.fact("Not sent", format!("{}, since too many were waiting", grouped(tally.unsent)));
    }
    if tally.has_stand_ins() {
        let by = tally.by.iter().map(|(by, count)| format!("{} by {by}", grouped(*count)));
        page.fact("Answered by", by.collect::<Vec<_>>().join(", "));
    }
    if let Some(unreleased) = report.unreleased.filter(|unreleased| *unreleased > 0) {
        page.fact("Permits that were not released", grouped(unreleased));
    }
    page.fact("Audit", audit(report));
    let over_time = tally.over_time.counted();
    page.sections.extend(over_time.map(|counted| counted.section("Over time", "answered calls", since_start, None)));
    let latency = "From when a call was due, or sent if it had no due time, to its answer.";
    page.sections.extend(times("Latency", latency, "latency", &tally.latency));
    if report.lateness_us.is_some() {
        let lateness = "From when a call was due until it was sent: delay by this machine, and part of the latency \
                        above.";
        page.sections.extend(times("Sent late", lateness, "delay", &tally.lateness));
    }
    page
}

fn says(report: &Report<'_>) -> String {
    let tally = report.tally;
    let share = percent(tally.denied as f64 / tally.answered().max(1) as f64);
    let [answered, all] = [tally.answered(), tally.asked()].map(grouped);
    let latency = report.latency_us.map(|Quantiles { p50, p99, .. }| {
        let [p50, p99] = [p50, p99].map(time);
        format!(" Half of the answers came within {p50}, 99 of 100 within {p99}.")
    });
    let unanswered = tally.asked().saturating_sub(tally.answered());
    let first = match unanswered {
        0 => format!("All {all} calls were answered"),
        _ => {
            let of_all = percent(unanswered as f64 / tally.asked().max(1) as f64);
            let failed = format!("{} of {all} calls got no answer ({of_all})", grouped(unanswered));
            let longest = human(tally.longest);
            format!("{failed}; the longest ended after {longest}. {answered} were answered")
        }
    };
    format!("{first}, {share} of them with a denial.{}", latency.unwrap_or_default())
}

fn audit(report: &Report<'_>) -> String {
    let Some(audit) = report.audit else {
        return format!("none: {}", report.no_audit.map_or("", String::as_str));
    };
    let Audit { calls, over_admissions, false_denials, .. } = *audit;
    let [over, denied] = [(over_admissions, "over-admission"), (false_denials, "false denial")]
        .map(|(count, what)| counted(count, what));
    format!("{over} and {denied} in {} calls, compared with an exact limiter", grouped(calls))
}

/// A distribution of times, if there are any.
fn times(title: &str, says: &str, what: &str, times: &Histogram<u64>) -> Option<Section> {
    let Quantiles { min, p50, p90, p99, p99_9, max, mean } = Quantiles::of(times)?;
    let bins = Bins::by_factor(times);
    let mut table = Table::new([what, "calls", "of all"]);
    let named = [("least", min), ("half, up to", p50), ("90 %, up to", p90), ("99 %, up to", p99)];
    let named = named.into_iter().chain([("99.9 %, up to", p99_9), ("most", max), ("mean", mean.round() as u64)]);
    for (name, us) in named {
        table.row([format!("{name} {}", time(us)), "-".to_owned(), "-".to_owned()]);
    }
    for (at, count) in bins.counts.iter().enumerate() {
        table.row([bins.name(at), grouped(*count), percent(*count as f64 / times.len() as f64)]);
    }
    let says = format!(
        "{says} Half took up to {}, 99 of 100 up to {}, 999 of 1,000 up to {}, and the longest {}. The axis is \
         logarithmic, so that short and long times are both seen.",
        time(p50),
        time(p99),
        time(p99_9),
        time(max)
    );
    let plot = Columns {
        edges: bins.labels(),
        across: format!("{what}, logarithmic"),
        up: "calls".into(),
        marks: vec![bins.mark(p50, "half up to"), bins.mark(p99, "99 % up to"), bins.mark(p99_9, "99.9 % up to")],
        series: vec![Series { name: "calls".into(), ink: Ink::Plain, counts: bins.counts }],
        top: None,
    };
    Some(Section { title: title.to_owned(), says, plot: Some(Plot::Columns(plot)), table })
}

fn time(us: u64) -> String {
    human(Duration::from_micros(us))
}
