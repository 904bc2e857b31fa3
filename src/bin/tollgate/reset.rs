//! `tollgate reset`: forgets every key of a rule.

use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::Outcome;
use crate::options::{Options, Shape};
use crate::output::json;

#[derive(Debug, Args)]
pub(crate) struct Reset {
    /// The rule's name; rules given on the command line are called cli.
    #[arg(long, value_name = "NAME")]
    rule: String,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    rule: &'a str,
    forgotten: u64,
}

impl Reset {
    pub(crate) async fn run(self) -> Outcome {
        let limiter = self.options.limiter()?;
        let style = ProgressStyle::with_template("{wide_bar} {human_pos} of {human_len} keys, {msg} forgotten");
        let bar = ProgressBar::new(0).with_message("0").with_style(style.expect("a well-formed template"));
        let forgotten = limiter.reset_all(&self.rule, |progress| {
            bar.set_length(progress.keys);
            bar.set_position(progress.looked_at);
            bar.set_message(progress.forgotten.to_string());
        });
        let forgotten = forgotten.await;
        bar.finish_and_clear();
        let report = Report { rule: &self.rule, forgotten: forgotten? };
        match self.options.shape() {
            Shape::Jsonl => json(anstream::stdout(), &report)?,
            Shape::Table => anstream::println!("{} keys of rule {} forgotten", report.forgotten, report.rule),
        }
        Ok(ExitCode::SUCCESS)
    }
}
