//! `tollgate doctor`: checks a Redis before limits rely on it.

mod commands;
mod facts;
mod gather;
mod judge;
mod report;

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use tollgate::Engine;

use crate::options::{self, Options};
use crate::{found, messages};
use facts::{Finding, Level};

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// The prefix of the limits' keys.
    ///
    /// The doctor creates temporary keys under it, and removes them.
    #[arg(long, default_value = "tollgate", help_heading = "Redis")]
    prefix: String,
    #[command(flatten)]
    options: Options,
}

impl Doctor {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        let deadline = self.options.deadline();
        let (nodes, of_cluster) = match self.options.redis()? {
            Some(Engine::Redis(redis)) => (vec![redis], false),
            Some(Engine::Cluster(cluster)) => (cluster.primaries(deadline).await?, true),
            _ => return Err(options::no_redis("examine")),
        };
        let mut examined = Vec::with_capacity(nodes.len());
        for redis in nodes {
            let address = redis.address().to_owned();
            match gather::gather(redis, of_cluster, &self.prefix, deadline).await {
                Ok(facts) => {
                    let findings = judge::judge(&facts);
                    examined.push((facts.address, findings));
                }
                // The other nodes are still worth examining.
                Err(error) if of_cluster => {
                    examined.push((address, vec![Finding::new("reachable", Level::Unfit, messages::line(&error))]));
                }
                Err(error) => return Err(error),
            }
        }
        let findings = examined.iter().flat_map(|(_, findings)| findings);
        let code = match findings.map(|finding| finding.level).max() {
            Some(Level::Unfit) => ExitCode::from(2),
            Some(Level::Warning) => ExitCode::from(1),
            _ => ExitCode::SUCCESS,
        };
        found(code, report::print(anstream::stdout(), self.options.shape(), &examined))
    }
}
