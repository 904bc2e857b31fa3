//! A comparison as a page.

use std::path::PathBuf;
use std::time::Duration;

use super::outcome::Outcome;
use super::{Contender, Input};
use crate::output::{bytes, file_names, grouped, human};
use crate::over_time::Counted;
use crate::page::{Bars, Ink, Page, Plot, Section, Series, Table, times};
use crate::replay::{Most, bars, busiest};

pub(super) fn page(contenders: &[Contender], outcomes: &[Outcome], files: &[PathBuf], input: Input) -> Page {
    let (source, rules) = (file_names(files), outcomes.len());
    let mut page = Page { title: format!("{source} under {rules} rules"), ..Page::default() };
    if rules == 1 {
        page.title = format!("{source} under one rule");
    }
    page.says = says(outcomes);
    page.fact("Records", grouped(input.records));
    page.fact("Lines that could not be read", grouped(input.unreadable));
    let sorted = if input.out_of_order == 0 { "" } else { ", put in order before they were played" };
    page.fact("Records out of order", format!("{}{sorted}", grouped(input.out_of_order)));
    if let Some(outcome) = outcomes.first() {
        page.fact("Keys", grouped(outcome.keys));
    }
    for (contender, outcome) in contenders.iter().zip(outcomes) {
        let rule = &outcome.rule;
        if let permits @ 1.. = contender.player.summary.permits_not_held() {
            let name = format!("Permits of {rule} not held as long as in reality");
            page.fact(&name, format!("{}, so its denials mean little", grouped(permits)));
        }
        if outcome.not_played > 0 {
            page.fact(&format!("Records that {rule} can't decide"), grouped(outcome.not_played));
        }
    }
    page.sections.push(side_by_side(outcomes));
    page.sections.push(edges(outcomes));
    let top = outcomes.iter().filter_map(|outcome| outcome.over_time.as_ref().map(Counted::busiest)).max();
    for outcome in outcomes {
        let title = format!("Over time: {}", outcome.rule);
        page.sections.extend(outcome.over_time.as_ref().map(|counted| counted.section(&title, "requests", times, top)));
    }
    for (contender, outcome) in contenders.iter().zip(outcomes).filter(|(_, outcome)| outcome.denied > 0) {
        let summary = &contender.player.summary;
        for section in [summary.waits().section(), busiest(summary)].into_iter().flatten() {
            page.sections.push(Section { title: format!("{}: {}", section.title, outcome.rule), ..section });
        }
    }
    page
}

fn says(outcomes: &[Outcome]) -> String {
    let least = outcomes.iter().min_by_key(|outcome| outcome.denied);
    let most = outcomes.iter().rev().max_by_key(|outcome| outcome.denied);
    let (Some(least), Some(most)) = (least, most) else { return String::new() };
    let denies = |outcome: &Outcome| {
        format!(
            "{} denies {} of {} requests ({})",
            outcome.rule,
            grouped(outcome.denied),
            grouped(outcome.records),
            outcome.share()
        )
    };
    if most.denied == 0 {
        return "No rule denies any of these requests.".to_owned();
    }
    if least.denied == most.denied {
        return if outcomes.len() == 1 {
            format!("{}.", denies(most))
        } else {
            format!("{}; so do the others.", denies(most))
        };
    }
    let tied = |with: &Outcome| outcomes.iter().filter(|outcome| outcome.denied == with.denied).count() - 1;
    let as_many = |with: &Outcome| match tied(with) {
        0 => String::new(),
        1 => ", as many as one other".to_owned(),
        others => format!(", as many as {others} others"),
    };
    let [of_most, of_least] = [most, least].map(as_many);
    format!("{}, the most of these rules{of_most}; {}, the fewest{of_least}.", denies(most), denies(least))
}

fn side_by_side(outcomes: &[Outcome]) -> Section {
    let says = "The same requests, in the same order, under each rule alone, starting with no keys. The hatched part of a \
                bar was denied. The memory is an estimate for all keys at once, by what a key takes on Redis 7.0.";
    let rows = outcomes.iter().map(|outcome| (outcome.rule.clone(), outcome.allowed, outcome.denied));
    let section = bars("Side by side", says.to_owned(), "rule", rows);
    let heads = [
        "rule",
        "denied",
        "denied, %",
        "keys denied",
        "median wait",
        "longest wait",
        "never allowed",
        "most in a period",
        "memory in Redis",
    ];
    let mut table = Table::new(heads);
    for outcome in outcomes {
        let ([median, longest], keys) = (outcome.waits(), grouped(outcome.keys_denied));
        let (denied, never, memory) = (grouped(outcome.denied), grouped(outcome.never), bytes(outcome.redis_bytes));
        let rule = outcome.rule.clone();
        table.row([rule, denied, outcome.share(), keys, median, longest, never, outcome.most(), memory]);
    }
    Section { table, ..section }
}

/// The most that each rule admitted within any of its periods.
fn edges(outcomes: &[Outcome]) -> Section {
    let mut table = Table::new(["rule", "most units admitted", "within any", "rate", "times the rate"]);
    let (mut plot, mut within, mut above) = (Bars::default(), Vec::new(), Vec::new());
    for outcome in outcomes {
        let Some(most @ Most { units, rate, period_us }) = outcome.most_in_a_period else { continue };
        let (period, times) = (human(Duration::from_micros(period_us)), format!("{:.2}", most.times()));
        plot.names.push(outcome.rule.clone());
        plot.notes.push(format!("{} in {period}, {times} times its rate", grouped(units)));
        // Rules of different rates are compared by what they admit in per cent of it.
        let per_cent = |units: u64| (units as f64 / rate.max(1) as f64 * 100.0).round() as u64;
        within.push(per_cent(units.min(rate)));
        above.push(per_cent(units.saturating_sub(rate)));
        table.row([outcome.rule.clone(), grouped(units), period, grouped(rate), times]);
    }
    plot.full = Some(100);
    plot.series = vec![
        Series { name: "up to the rule's rate".into(), ink: Ink::Plain, counts: within },
        Series { name: "above it".into(), ink: Ink::Other, counts: above },
    ];
    let says = "The most units that one key was allowed within any stretch of time as long as the rule's period, \
                wherever it begins. At the edge of a fixed window that can be twice the rate, the end of one window and \
                the beginning of the next; a burst adds to it too; a sliding log never exceeds its rate. Bars share \
                one scale, in per cent of each rule's rate; if none exceeds its rate, the full width is the rate.";
    let plot = (!plot.names.is_empty()).then_some(Plot::Bars(plot));
    Section { title: "The most within any period".into(), says: says.into(), plot, table }
}
