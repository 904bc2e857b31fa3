//! The rules side by side, for a terminal: in columns or, where these don't fit, one rule after another.

use std::io::{self, Write};
use std::time::Duration;

use super::Input;
use super::outcome::Outcome;
use crate::output::{QUIET, bytes, counted, facts, grouped, human, percent, width, wrapped};

pub(super) fn print(out: impl Write, outcomes: &[Outcome], input: Input) -> io::Result<()> {
    print_in(width(), out, outcomes, input)
}

fn print_in(width: usize, mut out: impl Write, outcomes: &[Outcome], input: Input) -> io::Result<()> {
    let Input { records, unreadable, out_of_order } = input;
    let mut read = counted(records, "record");
    if unreadable > 0 {
        read += &format!(", {} that can't be read", counted(unreadable, "line"));
    }
    if out_of_order > 0 {
        read += &format!(", {out_of_order} out of order: played sorted by time");
    }
    wrapped(&read, width).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    writeln!(out)?;
    let fits = |rows: &[String]| rows.iter().all(|row| row.chars().count() <= width);
    let [named, numbered] = [columns(outcomes, true), columns(outcomes, false)];
    let (is_named, is_numbered) = (fits(&named), !fits(&named) && fits(&numbered));
    match if is_named { Some(named) } else { is_numbered.then_some(numbered) } {
        Some(rows) => {
            for (at, row) in rows.iter().enumerate() {
                if at == 0 { writeln!(out, "{QUIET}{row}{QUIET:#}")? } else { writeln!(out, "{row}")? }
            }
        }
        None => {
            for (at, outcome) in outcomes.iter().enumerate() {
                if at > 0 {
                    writeln!(out)?;
                }
                wrapped(&outcome.rule, width).iter().try_for_each(|line| writeln!(out, "{line}"))?;
                facts(&mut out, &as_facts(outcome))?;
            }
        }
    }
    if is_numbered {
        writeln!(out)?;
        let rules = (1..).zip(outcomes).map(|(number, outcome)| format!("{number}  {}", outcome.rule));
        rules.flat_map(|rule| wrapped(&rule, width)).try_for_each(|line| writeln!(out, "{line}"))?;
    }
    if is_named || is_numbered {
        not_played(&mut out, outcomes, width)?;
    }
    over_time(&mut out, outcomes, width)?;
    out.flush()
}

const HEADS: [&str; 8] = ["denied", "", "keys", "median wait", "longest", "most in a period", "memory", "rule"];

fn cells(outcome: &Outcome) -> [String; 8] {
    let ([median, longest], most) = (outcome.waits(), outcome.most());
    let (denied, keys) = (grouped(outcome.denied), grouped(outcome.keys_denied));
    [denied, outcome.share(), keys, median, longest, most, bytes(outcome.redis_bytes), outcome.rule.clone()]
}

/// A row of column names, then a row for each rule, which is named in the last column or numbered in the first.
fn columns(outcomes: &[Outcome], named: bool) -> Vec<String> {
    let mut rows = vec![HEADS.map(str::to_owned)];
    rows.extend(outcomes.iter().map(cells));
    for (number, row) in rows.iter_mut().enumerate().filter(|_| !named) {
        row[7] = if number == 0 { String::new() } else { number.to_string() };
        row.rotate_right(1);
    }
    let widths: Vec<_> =
        (0..HEADS.len()).map(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &[String; 8]| {
        let cell = |(at, (cell, width)): (usize, (&String, &usize))| {
            // Names are left-aligned, numbers right-aligned.
            if named && at == 7 { cell.clone() } else { format!("{cell:>width$}") }
        };
        row.iter().zip(&widths).enumerate().map(cell).collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}

fn as_facts(outcome: &Outcome) -> Vec<(&'static str, String)> {
    let [denied, share, keys, median, longest, most, memory, _] = cells(outcome);
    let mut facts = vec![
        ("denied", format!("{denied}, {share}")),
        ("keys", format!("{keys} of {}", grouped(outcome.keys))),
        ("median wait", median),
        ("longest", longest),
        ("most", most),
        ("memory", memory),
    ];
    if outcome.not_played > 0 {
        facts.push(("not played", grouped(outcome.not_played)));
    }
    facts
}

/// Prints which rules couldn't decide some records, if there is no column for that.
fn not_played(out: &mut impl Write, outcomes: &[Outcome], width: usize) -> io::Result<()> {
    for outcome in outcomes.iter().filter(|outcome| outcome.not_played > 0) {
        let text = format!("not played under {}: {}", outcome.rule, counted(outcome.not_played, "record"));
        wrapped(&text, width).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    Ok(())
}

/// Prints the share that each rule denied over time, all on one scale.
fn over_time(out: &mut impl Write, outcomes: &[Outcome], width: usize) -> io::Result<()> {
    /// The least width for a rule beside its bars, so that its beginning can be read.
    const RULE: usize = 16;
    let room = width.saturating_sub(RULE + 2).max(8);
    let counts = |outcome: &Outcome| Some((outcome.rule.clone(), outcome.over_time.as_ref()?.in_at_most(room)));
    let all: Vec<_> = outcomes.iter().filter_map(counts).collect();
    let full = all.iter().map(|(_, counted)| counted.highest()).fold(0.0, f64::max);
    let Some((_, first)) = all.first().filter(|_| full > 0.0) else { return Ok(()) };
    let each = human(Duration::from_micros(first.each_us));
    let meaning = format!("denied in each {each} from {}; a full bar is {}", first.beginning(), percent(full));
    writeln!(out)?;
    wrapped(&meaning, width).iter().try_for_each(|line| writeln!(out, "{QUIET}{line}{QUIET:#}"))?;
    for (rule, counted) in &all {
        let bars = counted.bars(full);
        let rest = width.saturating_sub(bars.chars().count() + 2);
        let shown: String = if rule.chars().count() > rest {
            rule.chars().take(rest.saturating_sub(1)).chain(['…']).collect()
        } else {
            rule.clone()
        };
        writeln!(out, "{bars}  {shown}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::over_time::Counted;
    use crate::replay::Most;
    use crate::waits::Quantiles;

    fn outcome(rule: &str, denied: u64) -> Outcome {
        let over_time = Counted { each_us: 1_000_000, from_us: 0, allowed: vec![1; 48], denied: vec![denied; 48] };
        Outcome {
            rule: rule.into(),
            records: 1_234_567,
            allowed: 1_234_567 - denied,
            denied,
            not_played: 0,
            keys: 1_000,
            keys_denied: denied,
            wait_us: (denied > 0).then_some(Quantiles { p50: 1_500_000, p90: 2_000_000, max: 59_999_000 }),
            never: 0,
            most_in_a_period: Some(Most { units: 120, rate: 60, period_us: 60_000_000 }),
            redis_bytes: 200_000,
            over_time: Some(over_time),
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let second = Outcome { not_played: 4321, ..outcome("token-bucket 60/1m burst 20, fixed-window 5000/1d", 7) };
        let rules = [outcome("fixed-window 60/1m", 123_456), second];
        for width in [40, 60, 80, 120] {
            let mut out = Vec::new();
            let input = Input { records: 1_234_567, unreadable: 12, out_of_order: 345 };
            print_in(width, &mut out, &rules, input).unwrap();
            let text = anstream::adapter::strip_bytes(&out).into_vec();
            let text = String::from_utf8(text).unwrap();
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
            for said in ["123,456", "120, 2.00x", "59.999s", "200.0 kB", "fixed-window 60/1m", "a full bar is"] {
                assert!(text.replace('\n', " ").contains(said), "{width}: {said}: {text}");
            }
            assert!(text.contains("not played") && text.replace(',', "").contains("4321"), "{width}: {text}");
        }
    }
}
