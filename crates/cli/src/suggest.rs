//! `tollgate suggest`: limits that recorded traffic would have kept, except for a small share.
//!
//! The records are read once. What algorithms need goes to a temporary file, with keys as numbers, and all else is
//! found in passes over that file, so that memory grows with the keys, not with the records.

mod check;
mod counting;
mod fit;
mod grid;
mod meter;
mod page;
mod report;
mod search;
mod share;
mod spool;
mod suggestion;
mod table;
mod traffic;
mod trial;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::options::Output;
use crate::output::{Shape, micros};
use crate::page::ReportFile;
use crate::replay::Reading;
use crate::rules_file::RulesFile;
use crate::{found, options};
use counting::Counting;
use report::Report;
use share::{Bound, Of, Share};
use suggestion::find_hits;
use traffic::Traffic;

#[derive(Debug, Args)]
pub(crate) struct Suggest {
    /// The records, in one or several files; - for standard input.
    ///
    /// Sorted by time, all together.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How much of the traffic may be denied.
    #[arg(long, value_name = "SHARE", default_value = "0.1%", allow_hyphen_values = true, help_heading = "Limits")]
    deny_at_most: Share,
    /// What the share is of.
    #[arg(long, value_enum, default_value = "requests", help_heading = "Limits")]
    of: Of,
    /// The period of rates and windows, such as 1m.
    ///
    /// Default: 1s, 1m or 1h, whichever first gives a window of ten units.
    #[arg(long, value_name = "PERIOD", value_parser = period, conflicts_with = "rules", help_heading = "Limits")]
    per: Option<Duration>,
    /// Which field of an access log, or which attribute, to count by.
    ///
    /// Of an access log ip, path, method or user; of other records any attribute in their attrs. Default: ip, or the
    /// records' key.
    #[arg(long, value_name = "NAME", conflicts_with = "rules", help_heading = "Records")]
    key: Option<String>,
    /// Suggest separately for each value of a field or attribute, such as path.
    ///
    /// For the ten busiest.
    #[arg(long, value_name = "NAME", conflicts_with = "rules", help_heading = "Limits")]
    each: Option<String>,
    /// Suggest numbers for the rules in this file.
    ///
    /// For each, from the requests to which it applies or, as a shadow rule, would apply.
    #[arg(long, value_name = "FILE", help_heading = "Limits")]
    rules: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    report: ReportFile,
}

/// How many values of --each are shown, the busiest first.
const GROUPS: usize = 10;
/// How many limits of a set of rules are shown.
const LIMITS: usize = 100;

impl Suggest {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let service = self.rules.as_deref().map(RulesFile::read).transpose()?;
        let counting = self.counting(service.as_ref());
        let source = self.reading.of(&self.files, counting.identity())?;
        let read = self.files.iter().map(PathBuf::as_path).chain(self.rules.as_deref()).map(Some);
        let file = self.report.open(&read.collect::<Vec<_>>())?;
        let progress = progress();
        let mut traffic = Traffic::read(source, &counting, &progress).await?;
        // Not earlier: messages about the records would break its line.
        progress.set_position(traffic.read.records);
        progress.set_message(", finding limits");
        progress.enable_steady_tick(Duration::from_millis(200));
        let bound = Bound { share: self.deny_at_most, of: self.of };

        let mut groups: Vec<_> = (0..traffic.groups.len()).collect();
        groups.sort_by_key(|at| Reverse(traffic.groups[*at].requests));
        let most = if service.is_some() { LIMITS } else { GROUPS };
        let all = groups.len();
        if let Some(service) = &service {
            let place = |at: &usize| &traffic.groups[*at].place;
            // All limits of a rule or none, since they are pasted together.
            let cut: HashSet<_> = groups.iter().skip(most).filter_map(|at| place(at).rule()).collect();
            groups.truncate(most);
            groups.retain(|at| place(at).rule().is_none_or(|rule| !cut.contains(rule)));
            // In the order of the file.
            let names: Vec<_> = service.rules.definitions().iter().map(|rule| rule.name.as_str()).collect();
            groups.sort_by_key(|at| place(at).in_order(&names));
        }
        groups.truncate(most);
        let left = all - groups.len();

        let mut suggestions = search::search(&mut traffic, &groups, bound, self.per.map(micros))?;
        find_hits(&mut traffic.spool, &traffic.keys, &mut suggestions)?;
        progress.set_message(", replaying");
        check::check(&mut traffic.spool, &traffic.keys, &traffic.groups, &mut suggestions)?;
        progress.finish_and_clear();
        let by = match &counting {
            Counting::Key if !traffic.read.is_access_log => None,
            Counting::Rules(_) => None,
            _ => Some(self.by()),
        };
        let report = Report {
            traffic: &traffic,
            groups: &groups,
            left,
            suggestions: &suggestions,
            bound,
            period_is_given: self.per.is_some(),
            by,
        };
        let out = std::io::BufWriter::new(anstream::stdout());
        let printed = match self.output.shape() {
            Shape::Jsonl => report.print_json(out),
            Shape::Table => table::print(&report, out),
        };
        if let Some(file) = file {
            file.write(&page::page(&report, &self.files))?;
        }
        found(ExitCode::SUCCESS, printed)
    }

    fn counting(&self, service: Option<&RulesFile>) -> Counting {
        match (service, &self.key, &self.each) {
            (Some(service), ..) => Counting::Rules(service.rules.clone()),
            (None, None, None) => Counting::Key,
            _ => Counting::Attribute { key: self.by().to_owned(), each: self.each.clone() },
        }
    }

    /// The attribute to count by.
    fn by(&self) -> &str {
        self.key.as_deref().unwrap_or("ip")
    }
}

/// A spinner on a terminal.
fn progress() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {human_pos} records read{msg}");
    ProgressBar::new_spinner().with_style(style.expect("a well-formed template"))
}

/// A period of at least a microsecond that a limit can have.
fn period(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(366 * 86_400);
    let fits =
        |period: &Duration| !period.is_zero() && *period <= LONGEST && period.subsec_nanos().is_multiple_of(1000);
    options::duration(text)
        .ok()
        .filter(fits)
        .ok_or_else(|| "expected a period such as 1s, 1m or 1h30m, of a year at most".into())
}

#[cfg(test)]
mod tests;
