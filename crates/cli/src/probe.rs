//! `tollgate probe`: decisions by hand.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;
use tollgate::{OnChange, Operation, Request};

use crate::line::{Line, Printer};
use crate::operation;
use crate::operation::call;
use crate::options::{self, Confirmation, FailureOptions, Options};
use crate::rule_arguments::{Denials, RuleOptions, RulesAndKey, SEE_RULES};
use crate::rules_file::{NeededCosts, Ruling};
use crate::{found, fresh_key, messages};

#[derive(Debug, Args)]
#[command(after_help = SEE_RULES)]
pub(crate) struct Probe {
    #[command(flatten)]
    target: RulesAndKey,
    /// Units that each request takes; 0 looks without taking.
    ///
    /// Default: 1, or what a rule in JSON or from --rules says. A limit with a cost of its own takes that instead.
    #[arg(long, value_name = "N", value_parser = options::units, allow_negative_numbers = true)]
    #[arg(help_heading = "Request")]
    cost: Option<u64>,
    /// How many requests to make.
    #[arg(long, short = 'n', value_name = "N", default_value = "1", value_parser = options::units)]
    #[arg(allow_negative_numbers = true, help_heading = "Request")]
    count: u64,
    /// How long to wait between them.
    #[arg(long, value_name = "D", value_parser = options::duration, help_heading = "Request")]
    interval: Option<Duration>,
    /// What to ask for.
    #[arg(long, default_value = "acquire", value_parser = operation::any(), help_heading = "Request")]
    op: Operation,
    /// An id for the call: calls with the same id are charged once.
    ///
    /// They can be settled by it, and permits are held, renewed and released under it; a call that takes permits
    /// without an id gets one, which is shown.
    #[arg(long, value_name = "ID", help_heading = "Request")]
    id: Option<OsString>,
    /// How long a block lasts; 0s lifts it.
    #[arg(long = "for", value_name = "D", value_parser = options::duration, help_heading = "Request")]
    length: Option<Duration>,
    /// What happens to the key's state if the rule's numbers have changed.
    ///
    /// Default: keep-used, or what a rule in JSON or from --rules says.
    #[arg(long, value_name = "HOW", value_parser = operation::change(), help_heading = "Rule")]
    on_change: Option<OnChange>,
    /// Also count denied calls, and show them as overage.
    #[arg(long, help_heading = "Rule")]
    overage: bool,
    #[command(flatten)]
    denials: Denials,
    #[command(flatten)]
    about: RuleOptions,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    policy: FailureOptions,
    #[command(flatten)]
    confirmation: Confirmation,
}

impl Probe {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let needed = match operation::costs(self.op) {
            false => NeededCosts::None,
            true if self.cost.is_some() => NeededCosts::OfLimits,
            true => NeededCosts::All,
        };
        let ruling = self.about.ruling(&self.target, needed)?;
        if let Ruling::Listed(listed) = &ruling
            && operation::asks(self.op)
        {
            let mut printer = Printer::new(anstream::stdout(), self.options.shape());
            let line = Line::of_listed(listed, self.op);
            let printed = (0..self.count).try_for_each(|_| printer.print(&line));
            return found(code(!listed.allowed && self.count > 0), printed);
        }
        let (subject, key) = ruling.limits()?;
        let mut subject = self.denials.applied(subject)?.follow_policy(self.policy)?;
        if let Some(on_change) = self.on_change {
            subject.rule = subject.rule.on_change(on_change);
        }
        if self.overage {
            subject.rule = subject.rule.count_overage(true);
        }
        let cost = subject.cost_or_own(self.cost)?;
        operation::check(self.op, self.id.is_some(), self.length.is_some()).map_err(|why| anyhow!("--{why}"))?;
        let limiter = self.about.of_service(self.options.limiter(self.confirmation)?)?;
        self.options.say_who_decides();
        subject.say_who_overrides();
        let mut printer = Printer::new(anstream::stdout(), self.options.shape());
        let own_costs = subject.own_costs();
        let (parts, names_itself) = (subject.parts(), operation::takes(self.op) && subject.holds());
        if self.options.url().is_some() && matches!(self.op, Operation::Block | Operation::Reset) {
            fresh_key::warn(&subject, &limiter, &self.options, Request::new(&key).parts(&parts)).await;
        }
        let mut denied = false;
        for number in 0..self.count {
            if let Some(interval) = self.interval.filter(|_| number > 0) {
                tokio::time::sleep(interval).await;
            }
            let own = names_itself.then(|| format!("probe-{:016x}", fastrand::u64(..)));
            let id = self.id.as_deref().map(OsStr::as_encoded_bytes).or(own.as_deref().map(str::as_bytes));
            let mut request = Request::new(&key).parts(&parts).costs(&own_costs).cost(cost);
            if let Some(id) = id {
                request = request.id(id);
            }
            let decision = call(&limiter, &subject.rule, self.op, request, self.length).await?;
            denied |= !decision.allowed;
            if let Some(error) = decision.by.error() {
                messages::warning(format!("{}; answered by {}", messages::in_full(error), decision.by));
            }
            let line = Line::new(&subject, self.op, &key, cost, &decision).named(id).lasting(self.length);
            if let Err(error) = printer.print(&line) {
                return found(code(denied), Err(error));
            }
        }
        Ok(code(denied))
    }
}

fn code(denied: bool) -> ExitCode {
    if denied { ExitCode::from(1) } else { ExitCode::SUCCESS }
}
