//! The rules side by side, for a terminal: in columns or, where these don't fit, one rule after another.

use std::io::{self, Write};
use std::time::Duration;

use super::Input;
use super::outcome::Outcome;
use crate::output::{QUIET, counted, facts, human, percent, width, wrapped};
use crate::page::{bytes, grouped};

pub(super) fn print(mut out: impl Write, outcomes: &[Outcome], input: Input) -> io::Result<()> {
    let width = width();
    let Input { records, unreadable, out_of_order } = input;
    let mut read = counted(records, "record");
    if unreadable > 0 {
        read += &format!(", {} that can't be read", counted(unreadable, "line"));
    }
    if out_of_order > 0 {
        read += &format!(", {out_of_order} out of order");
    }
    let lines = columns(outcomes);
    if lines.iter().all(|line| line.chars().count() <= width) {
        writeln!(out, "{read}\n")?;
        for (at, line) in lines.iter().enumerate() {
            if at == 0 { writeln!(out, "{QUIET}{line}{QUIET:#}")? } else { writeln!(out, "{line}")? }
        }
    } else {
        wrapped(&read, width).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        for outcome in outcomes {
            writeln!(out)?;
            wrapped(&outcome.rule, width).iter().try_for_each(|line| writeln!(out, "{line}"))?;
            facts(&mut out, &as_facts(outcome))?;
        }
    }
    over_time(&mut out, outcomes, width)?;
    out.flush()
}

const HEADS: [&str; 8] =
    ["denied", "", "keys denied", "median wait", "longest", "most in a period", "Redis memory", "rule"];

fn cells(outcome: &Outcome) -> [String; 8] {
    let [median, longest] = outcome.waits();
    let keys = format!("{} of {}", grouped(outcome.keys_denied), grouped(outcome.keys));
    let (most, memory, rule) = (outcome.most(), bytes(outcome.redis_bytes), outcome.rule.clone());
    [grouped(outcome.denied), outcome.share(), keys, median, longest, most, memory, rule]
}

/// One line a rule, below one with names.
fn columns(outcomes: &[Outcome]) -> Vec<String> {
    let rows: Vec<_> = std::iter::once(HEADS.map(str::to_owned)).chain(outcomes.iter().map(cells)).collect();
    let widths: Vec<_> =
        (0..HEADS.len()).map(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &[String; 8]| {
        // The last column, of texts, is aligned at its beginning.
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(at, (cell, width))| if at == 7 { cell.clone() } else { format!("{cell:>width$}") });
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}

fn as_facts(outcome: &Outcome) -> Vec<(&'static str, String)> {
    let [denied, share, keys, median, longest, most, memory, _] = cells(outcome);
    let mut facts = vec![
        ("denied", format!("{denied}, {share}")),
        ("keys denied", keys),
        ("median wait", median),
        ("longest", longest),
        ("most", most),
        ("in Redis", memory),
    ];
    if outcome.not_played > 0 {
        facts.push(("not played", grouped(outcome.not_played)));
    }
    facts
}

/// The share that each rule denied, over time, all to one scale.
fn over_time(out: &mut impl Write, outcomes: &[Outcome], width: usize) -> io::Result<()> {
    let all: Vec<_> = outcomes.iter().filter_map(|outcome| Some((outcome, outcome.over_time.as_ref()?))).collect();
    // Beside the bars, at least the beginning of a rule can be read.
    const RULE: usize = 16;
    let room = width.saturating_sub(RULE + 2).max(8);
    let all: Vec<_> = all.into_iter().map(|(outcome, counted)| (outcome, counted.in_at_most(room))).collect();
    let full = all.iter().map(|(_, counted)| counted.highest()).fold(0.0, f64::max);
    let Some((_, first)) = all.first().filter(|_| full > 0.0) else { return Ok(()) };
    let each = human(Duration::from_micros(first.each_us));
    let meaning = format!("denied in each {each} from {}; a full bar is {}", first.beginning(), percent(full));
    writeln!(out)?;
    wrapped(&meaning, width).iter().try_for_each(|line| writeln!(out, "{QUIET}{line}{QUIET:#}"))?;
    for (outcome, counted) in &all {
        let bars = counted.bars(full);
        let rest = width.saturating_sub(bars.chars().count() + 2);
        let rule: String = if outcome.rule.chars().count() > rest {
            outcome.rule.chars().take(rest.saturating_sub(1)).chain(['…']).collect()
        } else {
            outcome.rule.clone()
        };
        writeln!(out, "{bars}  {rule}")?;
    }
    Ok(())
}
