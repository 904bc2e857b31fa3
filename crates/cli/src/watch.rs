//! `tollgate watch`: a live Redis, and a service that it limits.

mod census;
mod collect;
mod connection;
mod controls;
mod endpoint;
mod figures;
mod key_name;
mod node;
mod plain;
mod prometheus;
mod rates;
mod reading;
mod screen;
mod service;
mod snapshot;
mod summary;
mod tables;
mod view;
mod written;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use tollgate::Limiter;

use crate::interrupted::interrupted;
use crate::options::{self, Options};
use crate::output::{Shape, can_be_redrawn, json, width};
use crate::{failed, found};
use collect::{Collector, Snapshots};
use endpoint::Address;
use service::Watched;
use snapshot::Snapshot;
use summary::History;

#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// The prefix of the limits' keys.
    #[arg(long, default_value = "tollgate", help_heading = "Redis")]
    prefix: String,
    /// Where a service exports its metrics, such as http://127.0.0.1:9000/metrics.
    ///
    /// In Prometheus's text format. May be given several times; their numbers are added.
    #[arg(long, value_name = "URL")]
    metrics: Vec<Address>,
    /// The time between two snapshots, over which rates are computed.
    #[arg(long, value_name = "D", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print one snapshot, of one interval, and exit.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    options: Options,
}

/// How long the first look takes, after which the next one has rates.
const FIRST_LOOK: Duration = Duration::from_millis(50);

impl Watch {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let Some(engine) = self.options.redis()? else { return Err(options::no_redis("watch")) };
        // Rejects an invalid prefix.
        let limiter = Limiter::builder(engine.clone()).prefix(&self.prefix)?.build();
        let services = self.metrics.iter().cloned().map(Watched::new).collect();
        let deadline = self.options.deadline();
        let collector = Collector::new(engine, services, limiter.prefix(), deadline).await?;
        let Some(mut collector) = collector else { return Err(options::no_redis("watch")) };
        let first = collector.look(FIRST_LOOK.min(self.interval)).await;
        collector.check()?;
        if self.once {
            let snapshot = tokio::select! {
                snapshot = collector.look(self.interval) => snapshot,
                _ = interrupted() => return Ok(ExitCode::SUCCESS),
            };
            return self.print_once(&snapshot);
        }
        let snapshots = Snapshots::of(collector, self.interval);
        match self.options.shape() {
            Shape::Table if io::stdout().is_terminal() && can_be_redrawn() => {
                screen::show(first, snapshots).await?;
                Ok(ExitCode::SUCCESS)
            }
            shape => print_all(snapshots, shape).await,
        }
    }

    /// Exits with 2 if a part of what was asked for can't be shown.
    fn print_once(&self, snapshot: &Snapshot) -> Result<ExitCode> {
        let code = found(ExitCode::SUCCESS, print(snapshot, &History::default(), self.options.shape()))?;
        let nodes = snapshot.nodes.iter().filter_map(|node| Some((&node.address, node.error.as_ref()?)));
        let endpoints = snapshot.service.iter().flat_map(|service| &service.endpoints);
        let endpoints = endpoints.filter_map(|endpoint| Some((&endpoint.url, endpoint.error.as_ref()?)));
        Ok(nodes.chain(endpoints).fold(code, |_, (what, why)| failed(&format!("{what}: {why}"))))
    }
}

/// Prints snapshots one after the other, until interrupted.
async fn print_all(mut snapshots: Snapshots, shape: Shape) -> Result<ExitCode> {
    let unwanted = interrupted();
    tokio::pin!(unwanted);
    let mut history = History::default();
    loop {
        let snapshot = tokio::select! {
            _ = &mut unwanted => return Ok(ExitCode::SUCCESS),
            snapshot = snapshots.next() => snapshot,
        };
        history.add(&snapshot);
        print(&snapshot, &history, shape)?;
    }
}

fn print(snapshot: &Snapshot, history: &History, shape: Shape) -> io::Result<()> {
    let mut out = anstream::stdout();
    match shape {
        Shape::Jsonl => json(&mut out, snapshot)?,
        Shape::Table => {
            let width = u16::try_from(width()).unwrap_or(u16::MAX);
            writeln!(out, "{}", plain::picture(snapshot, history, width))?;
        }
    }
    out.flush()
}

fn interval(text: &str) -> Result<Duration, String> {
    let (least, most) = (Duration::from_millis(100), Duration::from_secs(3600));
    let interval = options::duration(text)?;
    if (least..=most).contains(&interval) { Ok(interval) } else { Err("expected from 100ms to 1h".into()) }
}
