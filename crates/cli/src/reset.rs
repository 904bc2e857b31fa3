//! `tollgate reset`: removes every key of a rule, or one key.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tollgate::{Limiter, Operation, Request, Rule};

use crate::attributes::{self, pairs};
use crate::escape::shown;
use crate::fresh_key;
use crate::line::{Line, Printer};
use crate::messages;
use crate::options::{Confirmation, Options};
use crate::output::{Shape, counted, json};
use crate::rule_arguments::{KeyOptions, name_of};
use crate::rules_file::{NeededCosts, RulesFile};

#[derive(Debug, Args)]
pub(crate) struct Reset {
    /// The rule's name; once for each rule to forget.
    ///
    /// Or the rule in JSON, of which only the name is used.
    #[arg(long = "rule", alias = "name", value_name = "NAME", required = true, help_heading = "Rule")]
    rules: Vec<String>,
    /// The service's own set of rules, which must contain NAME.
    #[arg(long = "rules", value_name = "FILE", help_heading = "Rule")]
    file: Option<PathBuf>,
    /// For a rule from --rules: the key to forget, such as user:42.
    ///
    /// Or give its attributes by --attr. This includes limits that count another part of the request, such as its
    /// organisation.
    key: Option<OsString>,
    /// An attribute of the request, such as org=acme; once for each.
    #[arg(long = "attr", alias = "part", value_name = "NAME=VALUE", requires = "file", help_heading = "Rule")]
    attributes: Vec<OsString>,
    #[command(flatten)]
    place: KeyOptions,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    confirmation: Confirmation,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    rule: &'a str,
    forgotten: u64,
}

impl Reset {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let names = self.rules.iter().map(|rule| name_of(rule)).collect::<Result<Vec<_>, _>>()?;
        if let (Some(key), None) = (&self.key, &self.file) {
            let key = shown(key.as_encoded_bytes());
            let how = "for a rule that you write out: probe --op reset RULE KEY";
            bail!("KEY: needs --rules FILE, which says how the rule counts {key:?}; {how}");
        }
        let service = self.file.as_deref().map(RulesFile::read).transpose()?;
        if let Some(service) = &service {
            names.iter().try_for_each(|name| service.with_limits(name).map(|_| ()))?;
            if self.key.is_some() || !self.attributes.is_empty() {
                return self.reset_one(service, &names).await;
            }
        }
        let limiter = self.options.limiter_on_redis("forget keys of", self.confirmation)?;
        let limiter = limiter.to_builder().prefix(self.place.prefix())?.build();
        // Check all names before any key is removed.
        for name in &names {
            Rule::new(name, "gcra 1/1s")?;
        }
        for name in &names {
            let report = Report { rule: name, forgotten: forget(&limiter, name).await? };
            match self.options.shape() {
                Shape::Jsonl => json(anstream::stdout(), &report)?,
                Shape::Table => report.print(anstream::stdout())?,
            }
            if report.forgotten == 0 {
                let prefix = self.place.prefix();
                messages::note(format!("no key of rule {name} under the prefix {prefix}: --prefix chooses another"));
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn reset_one(&self, service: &RulesFile, names: &[String]) -> Result<ExitCode> {
        let given = pairs("--attr", &self.attributes)?;
        attributes::check(&given).map_err(|why| anyhow!("--attr: {why}"))?;
        let key = self.key.as_deref().map(OsStr::as_encoded_bytes);
        let limits_of = |name: &String| service.ruling(name, key, given.clone(), NeededCosts::None)?.limits();
        let all = names.iter().map(limits_of).collect::<Result<Vec<_>, _>>()?;
        let limiter = self.place.of_service(self.options.limiter_on_redis("forget a key of", self.confirmation)?)?;
        let mut printer = Printer::new(anstream::stdout(), self.options.shape());
        for (subject, key) in &all {
            subject.say_who_overrides();
            let parts = subject.parts();
            let request = Request::new(key).parts(&parts);
            fresh_key::warn(subject, &limiter, &self.options, request).await;
            let decision = limiter.call(Operation::Reset, &subject.rule, request).await?;
            printer.print(&Line::new(subject, Operation::Reset, key, subject.cost, &decision))?;
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
