//! `tollgate probe`: decisions by hand.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tollgate::{Change, Limiter, Request, Rule};

use crate::options::{self, Options};
use crate::output::{Line, Printer, WRONG};
use crate::records::Op;
use crate::{Failure, Outcome};

#[derive(Debug, Args)]
pub(crate) struct Probe {
    /// The rule, such as "token-bucket 5/10s"; several are decided together, all or nothing. Then whom it counts, any
    /// bytes.
    #[arg(value_names = ["RULE", "KEY"], num_args = 2.., required = true)]
    rules_and_key: Vec<OsString>,
    /// Units that each request takes; 0 looks without taking.
    #[arg(long, value_name = "N", default_value = "1", value_parser = options::units, allow_negative_numbers = true)]
    cost: u64,
    /// How many requests.
    #[arg(long, value_name = "N", default_value = "1", value_parser = options::units, allow_negative_numbers = true)]
    count: u64,
    /// How long to wait between them.
    #[arg(long, value_name = "D", value_parser = options::duration)]
    interval: Option<Duration>,
    /// What to ask for: acquire, peek, reserve, at-most, refund, penalty, block, renew,
    /// release, settle, cancel or reset.
    #[arg(long, default_value = "acquire")]
    op: Op,
    /// A name for the call: the same one is charged once, and can be settled. Permits are held, renewed and released by it.
    #[arg(long, value_name = "ID")]
    id: Option<OsString>,
    /// How long a block lasts; 0s lifts it.
    #[arg(long = "for", value_name = "D", value_parser = options::duration)]
    length: Option<Duration>,
    /// What becomes of the key's state where the rule's numbers have changed: keep-used, as-is or reset.
    #[arg(long, value_name = "HOW", default_value = "keep-used")]
    on_change: Change,
    /// Count denied calls too, and show them as overage.
    #[arg(long)]
    overage: bool,
    #[command(flatten)]
    options: Options,
}

impl Probe {
    pub(crate) async fn run(self) -> Outcome {
        let Some((key, rules)) = self.rules_and_key.split_last() else {
            return Err(Failure::Told("expected a rule and a key, got nothing".into()));
        };
        let key = key.as_encoded_bytes();
        let rules: Vec<_> = rules.iter().map(|rule| rule.to_string_lossy().into_owned()).collect();
        let rule = options::rule(&rules)?.on_change(self.on_change).count_denials(self.overage);
        let rule = self.options.follow_policy(rule)?;
        // The others take or give back whatever is said.
        let asks = matches!(self.op, Op::Acquire | Op::Peek | Op::Reserve);
        let rule = if asks { options::at_cost(rule, self.cost)? } else { rule };
        self.op.check(self.id.is_some(), self.length.is_some()).map_err(|why| Failure::Told(format!("--{why}")))?;
        let limiter = self.options.limiter()?;
        let mut printer = Printer::new(anstream::stdout(), self.options.shape());
        let mut denied = false;
        for number in 0..self.count {
            if let Some(interval) = self.interval.filter(|_| number > 0) {
                tokio::time::sleep(interval).await;
            }
            let mut request = Request::new(key).cost(self.cost);
            if let Some(id) = &self.id {
                request = request.id(id.as_encoded_bytes());
            }
            let decision = decide(&limiter, &rule, self.op, request, self.length).await?;
            denied |= !decision.allowed;
            if let Some(error) = &decision.error {
                anstream::eprintln!("{WRONG}warning:{WRONG:#} {error}; answered by {}", decision.by);
            }
            let id = self.id.as_deref().map(OsStr::as_encoded_bytes);
            printer.print(&Line::new(&rule, self.op, key, self.cost, &decision).named(id).lasting(self.length))?;
        }
        Ok(if denied { ExitCode::from(1) } else { ExitCode::SUCCESS })
    }
}

pub(crate) async fn decide(
    limiter: &Limiter,
    rule: &Rule,
    op: Op,
    request: Request<'_>,
    length: Option<Duration>,
) -> Result<tollgate::Decision, tollgate::Error> {
    match op {
        Op::Acquire => limiter.acquire(rule, request).await,
        Op::Peek => limiter.peek(rule, request).await,
        Op::Reserve => limiter.reserve(rule, request).await,
        Op::AtMost => limiter.at_most(rule, request).await,
        Op::Refund => limiter.refund(rule, request).await,
        Op::Penalty => limiter.penalty(rule, request).await,
        Op::Block => limiter.block(rule, request, length.unwrap_or_default()).await,
        Op::Renew => limiter.renew(rule, request).await,
        Op::Release => limiter.release(rule, request).await,
        Op::Settle => limiter.settle(rule, request).await,
        Op::Cancel => limiter.cancel(rule, request).await,
        Op::Reset => limiter.reset(rule, request).await,
    }
}
