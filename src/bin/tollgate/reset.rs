//! `tollgate reset`: forgets every key of a rule.

use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tollgate::{Limiter, Rule};

use crate::options::{Options, Shape};
use crate::output::{counted, json};
use crate::subject::name_of;
use crate::{Outcome, messages};

#[derive(Debug, Args)]
pub(crate) struct Reset {
    /// The rule's name, or the rule in JSON, of which the name counts; once for each rule to forget.
    #[arg(long = "rule", visible_alias = "name", value_name = "NAME", required = true)]
    rules: Vec<String>,
    /// What the service's keys begin with.
    #[arg(long, default_value = "tollgate")]
    prefix: String,
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
        let names = self.rules.iter().map(|rule| name_of(rule)).collect::<Result<Vec<_>, _>>()?;
        let limiter = self.options.limiter_on_redis("forget keys of")?.prefix(&self.prefix)?;
        // All before any key is forgotten.
        for name in &names {
            "gcra 1/1s".parse::<Rule>()?.named(name)?;
        }
        for name in &names {
            let report = Report { rule: name, forgotten: forget(&limiter, name).await? };
            match self.options.shape() {
                Shape::Jsonl => json(anstream::stdout(), &report)?,
                Shape::Table => report.print(anstream::stdout())?,
            }
            if report.forgotten == 0 {
                let prefix = &self.prefix;
                messages::note(format!("no key of rule {name} under the prefix {prefix}: --prefix chooses another"));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn forget(limiter: &Limiter, name: &str) -> Result<u64, tollgate::Error> {
    let style = ProgressStyle::with_template("{wide_bar} {human_pos} of {human_len} keys, {msg} forgotten");
    let bar = ProgressBar::new(0).with_message("0").with_style(style.expect("a well-formed template"));
    let forgotten = limiter.reset_all(name, |progress| {
        bar.set_length(progress.keys);
        bar.set_position(progress.looked_at);
        bar.set_message(progress.forgotten.to_string());
    });
    let forgotten = forgotten.await;
    bar.finish_and_clear();
    forgotten
}

impl Report<'_> {
    fn print(&self, mut out: impl std::io::Write) -> std::io::Result<()> {
        writeln!(out, "{} of rule {} forgotten", counted(self.forgotten, "key"), self.rule)
    }
}
