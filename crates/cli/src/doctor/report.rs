//! Prints findings: a JSON object each, or a list for people.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use super::facts::{Finding, Level};
use crate::escape::shown;
use crate::output::{QUIET, RIGHT, Shape, WRONG, counted, json, width, wrapped};

const WORTH_KNOWING: Style = AnsiColor::Cyan.on_default();
const CARE: Style = AnsiColor::Yellow.on_default();
/// The column where findings begin, after the level and the check.
const INDENT: usize = 22;

/// Prints the findings of each node, by its address.
pub(super) fn print(mut out: impl Write, shape: Shape, examined: &[(String, Vec<Finding>)]) -> io::Result<()> {
    match shape {
        Shape::Jsonl => {
            for (node, findings) in examined {
                findings.iter().try_for_each(|finding| json(&mut out, &Line { finding, node }))?;
            }
        }
        Shape::Table => {
            for (node, findings) in examined {
                table(&mut out, width(), node, findings)?;
            }
            verdict(&mut out, examined)?;
        }
    }
    out.flush()
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    finding: &'a Finding,
    node: &'a str,
}

fn table(out: &mut impl Write, width: usize, node: &str, findings: &[Finding]) -> io::Result<()> {
    let width = width.saturating_sub(INDENT).max(30);
    writeln!(out, "{QUIET}{node}{QUIET:#}")?;
    for Finding { check, level, found, advice, .. } in findings {
        // Text from a server must not control the terminal.
        let style = style(*level);
        let mut lines = wrapped(&shown(found.as_bytes()), width).into_iter();
        let first = lines.next().unwrap_or_default();
        writeln!(out, "{style}{:<7}{style:#}  {check:<11}  {first}", level.name())?;
        for line in lines {
            writeln!(out, "{:INDENT$}{line}", "")?;
        }
        for step in advice {
            for (at, line) in wrapped(&shown(step.as_bytes()), width - 3).iter().enumerate() {
                let arrow = if at == 0 { "->" } else { "  " };
                writeln!(out, "{:INDENT$}{QUIET}{arrow}{QUIET:#} {line}", "")?;
            }
        }
    }
    Ok(())
}

fn verdict(out: &mut impl Write, examined: &[(String, Vec<Finding>)]) -> io::Result<()> {
    let findings = || examined.iter().flat_map(|(_, findings)| findings);
    let count = |level| findings().filter(|finding| finding.level == level).count();
    let (unfit, warnings, notes) = (count(Level::Unfit), count(Level::Warning), count(Level::Note));
    let (worst, verdict) = match (unfit, warnings) {
        (0, 0) => (Level::Ok, "fit for limits"),
        (0, _) => (Level::Warning, "fit for limits, with warnings"),
        _ => (Level::Unfit, "unfit for limits"),
    };
    let style = style(worst);
    let counts = [
        (unfit > 0).then(|| format!("{unfit} unfit")),
        (warnings > 0).then(|| counted(warnings as u64, "warning")),
        (notes > 0).then(|| counted(notes as u64, "note")),
        Some(format!("{} ok", count(Level::Ok))),
    ];
    let counts: Vec<_> = counts.into_iter().flatten().collect();
    writeln!(out, "{style}{verdict}{style:#}: {}", counts.join(", "))
}

fn style(level: Level) -> Style {
    match level {
        Level::Ok => RIGHT,
        Level::Note => WORTH_KNOWING,
        Level::Warning => CARE,
        Level::Unfit => WRONG,
    }
}
