//! `tollgate block`: blocks a key for a time, or lifts its block.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use tollgate::{Operation, Request};

use crate::fresh_key;
use crate::line::{Line, Printer};
use crate::operation::call;
use crate::options::{self, Confirmation, Options};
use crate::rule_arguments::{RuleOptions, RulesAndKey, SEE_RULES};
use crate::rules_file::NeededCosts;

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES)]
pub(crate) struct Block {
    #[command(flatten)]
    target: RulesAndKey,
    /// How long the block lasts, such as 10m or 1d.
    #[arg(long = "for", value_name = "D", value_parser = options::duration, help_heading = "Block")]
    #[arg(required_unless_present = "lift", conflicts_with = "lift")]
    length: Option<Duration>,
    /// Lift the block.
    #[arg(long, help_heading = "Block")]
    lift: bool,
    #[command(flatten)]
    about: RuleOptions,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    confirmation: Confirmation,
}

impl Block {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let (subject, key) = self.about.ruling(&self.target, NeededCosts::None)?.limits()?;
        let limiter = self.about.of_service(self.options.limiter_on_redis("block a key in", self.confirmation)?)?;
        subject.say_who_overrides();
        let parts = subject.parts();
        let request = Request::new(&key).parts(&parts);
        fresh_key::warn(&subject, &limiter, &self.options, request).await;
        let length = self.length.unwrap_or_default();
        let decision = call(&limiter, &subject.rule, Operation::Block, request, Some(length)).await?;
        let mut printer = Printer::new(anstream::stdout(), self.options.shape());
        let line = Line::new(&subject, Operation::Block, &key, subject.cost, &decision);
        printer.print(&line.lasting(Some(length)))?;
        Ok(ExitCode::SUCCESS)
    }
}
