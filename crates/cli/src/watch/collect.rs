//! All that is watched: the nodes, their keys, the service's endpoints; one snapshot for each interval.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use futures_util::future::join_all;
use tollgate::{Cluster, Engine, Redis};

use super::census::Looks;
use super::key_name::{KeyName, Label};
use super::node::Node;
use super::service::{Watched, service};
use super::snapshot::{Command, Key, Rule, Sample, Scripts, Snapshot, rounded};
use crate::output::micros;

/// The most keys in a snapshot, from each node.
const MOST_KEYS: usize = 100;
/// How many intervals pass before a cluster is asked for its nodes again.
const REFRESH: u32 = 10;

#[derive(Debug)]
pub(super) struct Collector {
    source: Source,
    nodes: Vec<Node>,
    services: Vec<Watched>,
    prefix: String,
    deadline: Duration,
    /// Intervals since a cluster was asked for its nodes.
    since_refresh: u32,
}

#[derive(Debug)]
enum Source {
    One,
    Cluster(Cluster),
}

/// One snapshot for each interval. They are collected only while one is awaited, in the same task, so that a panic
/// there ends the command.
pub(super) struct Snapshots {
    looking: Pin<Box<dyn Future<Output = (Collector, Snapshot)>>>,
    interval: Duration,
}

impl Snapshots {
    pub(super) fn of(collector: Collector, interval: Duration) -> Self {
        Self { looking: Box::pin(look(collector, interval)), interval }
    }

    /// The next snapshot. If this is dropped before it completes, the next call resumes it.
    pub(super) async fn next(&mut self) -> Snapshot {
        let (collector, snapshot) = (&mut self.looking).await;
        self.looking = Box::pin(look(collector, self.interval));
        snapshot
    }
}

async fn look(mut collector: Collector, interval: Duration) -> (Collector, Snapshot) {
    let snapshot = collector.look(interval).await;
    (collector, snapshot)
}

impl Collector {
    pub(super) async fn new(
        engine: Engine,
        services: Vec<Watched>,
        prefix: &str,
        deadline: Duration,
    ) -> Result<Option<Self>> {
        let (source, nodes): (_, Vec<Redis>) = match engine {
            Engine::Redis(redis) => (Source::One, vec![redis]),
            Engine::Cluster(cluster) => {
                let primaries = cluster.primaries(deadline).await?;
                (Source::Cluster(cluster), primaries)
            }
            _ => return Ok(None),
        };
        let nodes = nodes.into_iter().map(Node::new).collect();
        let prefix = prefix.to_owned();
        Ok(Some(Self { source, nodes, services, prefix, deadline, since_refresh: 0 }))
    }

    /// Looks at everything for this time.
    pub(super) async fn look(&mut self, within: Duration) -> Snapshot {
        self.refresh().await;
        let Self { nodes, services, prefix, deadline, .. } = self;
        let nodes = join_all(nodes.iter_mut().map(|node| node.look(prefix, within, *deadline)));
        // A node that fails at once doesn't shorten the interval, and a slow one doesn't delay the others.
        tokio::join!(nodes, tokio::time::sleep(within));
        join_all(services.iter_mut().map(Watched::read)).await;
        self.snapshot()
    }

    /// Ends with an error if no node answers.
    pub(super) fn check(&self) -> Result<()> {
        let errors: Vec<_> = self.nodes.iter().filter_map(|node| node.shown.error.as_ref()).collect();
        match self.nodes.iter().zip(errors.first()).next() {
            // Redis answers, and names the command that this user may not run.
            Some((_, why)) if errors.len() == self.nodes.len() && why.starts_with("NOPERM") => {
                let command = why.split_once("run the '").and_then(|(_, rest)| rest.split_once('\''));
                let right = command.map_or_else(
                    || "do this".to_owned(),
                    |(command, _)| format!("run '{command}' (ACL SETUSER ... +{command})"),
                );
                bail!("redis doesn't let this user {right}: {why}")
            }
            Some((node, why)) if errors.len() == self.nodes.len() => {
                bail!("no connection to redis at {}: {why}", node.shown.address)
            }
            _ => Ok(()),
        }
    }

    /// Follows a cluster's nodes as they come and go.
    async fn refresh(&mut self) {
        let Source::Cluster(cluster) = &self.source else { return };
        self.since_refresh += 1;
        let failed = self.nodes.iter().any(|node| node.shown.error.is_some());
        if !failed && self.since_refresh < REFRESH {
            return;
        }
        self.since_refresh = 0;
        // While no node answers, the known ones are kept.
        let Ok(primaries) = cluster.primaries(self.deadline).await else { return };
        let known: BTreeSet<_> = self.nodes.iter().map(|node| node.shown.address.clone()).collect();
        let now: BTreeSet<_> = primaries.iter().map(|redis| redis.address().to_owned()).collect();
        self.nodes.retain(|node| now.contains(&node.shown.address));
        self.nodes.extend(primaries.into_iter().filter(|redis| !known.contains(redis.address())).map(Node::new));
    }

    fn snapshot(&self) -> Snapshot {
        let seconds = self.nodes.iter().map(|node| node.seconds).fold(0.0, f64::max);
        Snapshot {
            t_us: micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            seconds: rounded(seconds, 3),
            nodes: self.nodes.iter().map(|node| node.shown.clone()).collect(),
            scripts: self.scripts(),
            sample: self.sample(),
            rules: self.rules(),
            keys: self.keys(),
            service: (!self.services.is_empty()).then(|| service(&self.services)),
        }
    }

    fn answering(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.shown.error.is_none())
    }

    fn scripts(&self) -> Scripts {
        let mut by_command: BTreeMap<&'static str, (f64, f64)> = BTreeMap::new();
        let (mut rate, mut us_per_second) = (0.0, 0.0);
        for node in self.answering().filter(|node| node.seconds > 0.0) {
            for calls in &node.calls {
                let of_node = (calls.calls as f64 / node.seconds, calls.us as f64 / node.seconds);
                (rate, us_per_second) = (rate + of_node.0, us_per_second + of_node.1);
                let sum = by_command.entry(calls.command).or_default();
                *sum = (sum.0 + of_node.0, sum.1 + of_node.1);
            }
        }
        let by_command = by_command.into_iter().map(|(command, (rate, us))| Command {
            command,
            calls_per_second: rounded(rate, 1),
            us_per_call: if rate > 0.0 { rounded(us / rate, 2) } else { 0.0 },
        });
        let known = self
            .answering()
            .any(|node| node.shown.figures.as_ref().is_some_and(|figures| figures.script_calls_per_second.is_some()));
        Scripts {
            calls_per_second: known.then(|| rounded(rate, 1)),
            us_per_call: (rate > 0.0).then(|| rounded(us_per_second / rate, 2)),
            core_share: known.then(|| rounded(us_per_second / 1e6, 4)),
            by_command: by_command.collect(),
        }
    }

    fn sample(&self) -> Sample {
        let shares: Vec<_> = self.answering().filter_map(|node| node.rates.share()).collect();
        let least = shares.iter().copied().reduce(f64::min);
        let sees = |node: &&Node| node.no_writes.is_none();
        let first = |why: fn(&Node) -> &Option<String>| self.answering().find_map(|node| why(node).clone());
        Sample {
            time_share: least.filter(|_| self.answering().any(|node| sees(&node))).map(|share| rounded(share, 3)),
            no_writes: first(|node| &node.no_writes),
            writes_per_second: self
                .answering()
                .filter(sees)
                .filter_map(|node| node.rates.all())
                .reduce(|sum, rate| sum + rate)
                .map(|rate| rounded(rate, 1)),
            scanned: self.answering().map(|node| node.census.scanned()).sum(),
            of: self.answering().map(Node::size).sum(),
            complete: self.answering().all(|node| node.census.counts().1),
            no_scan: first(|node| &node.no_scan),
            touches: if self.answering().any(Node::by_frequency) { "freq" } else { "idle" },
        }
    }

    fn rules(&self) -> Vec<Rule> {
        let mut rules: BTreeMap<Label, (Option<f64>, Option<f64>)> = BTreeMap::new();
        let add = |sum: &mut Option<f64>, more: Option<f64>| {
            if let Some(more) = more {
                *sum = Some(sum.unwrap_or(0.0) + more);
            }
        };
        for node in self.answering() {
            let (counts, _) = node.census.counts();
            // The scanned keys stand for the rest.
            let scale = node.size().max(counts.scanned) as f64 / counts.scanned.max(1) as f64;
            let labels: BTreeSet<_> = counts.of.keys().chain(node.rates.labels()).collect();
            for label in labels {
                let (writes, keys) = rules.entry(label.clone()).or_default();
                add(writes, node.rates.of_label(label).filter(|_| node.no_writes.is_none()));
                add(keys, counts.of.get(label).map(|count| *count as f64 * scale));
            }
        }
        let mut rules: Vec<_> = rules
            .into_iter()
            .map(|(of, (writes, keys))| Rule {
                of,
                writes_per_second: writes.map(|rate| rounded(rate, 1)),
                keys: keys.map(|keys| keys.round() as u64),
            })
            .collect();
        let busy = |rule: &Rule| (rule.writes_per_second.unwrap_or(0.0), rule.keys.unwrap_or(0) as f64);
        rules.sort_by(|one, other| {
            let ((writes, keys), (its_writes, its_keys)) = (busy(one), busy(other));
            its_writes.total_cmp(&writes).then_with(|| its_keys.total_cmp(&keys))
        });
        rules
    }

    fn keys(&self) -> Vec<Key> {
        let mut keys = Vec::new();
        for node in self.answering() {
            let looks: BTreeMap<&Vec<u8>, &Looks> = node.census.watched().collect();
            let mut names: BTreeSet<&Vec<u8>> = looks.keys().copied().collect();
            names.extend(node.rates.busiest(MOST_KEYS));
            for name in names {
                let Some(KeyName { key, shard, of }) = KeyName::parse(name, &self.prefix) else { continue };
                let writes = node.rates.of_key(name).filter(|_| node.no_writes.is_none());
                keys.push(Key {
                    key,
                    shard,
                    of,
                    writes_per_second: writes.map(|rate| rounded(rate, 1)),
                    touched_share: looks
                        .get(name)
                        .and_then(|looks| looks.touched_share())
                        .map(|share| rounded(share, 2)),
                    freq: looks.get(name).and_then(|looks| looks.freq),
                });
            }
        }
        keys.sort_by(|one, other| {
            let writes = |key: &Key| key.writes_per_second.unwrap_or(0.0);
            let touches = other.touches().total_cmp(&one.touches());
            writes(other).total_cmp(&writes(one)).then(touches).then_with(|| one.key.cmp(&other.key))
        });
        keys.truncate(MOST_KEYS);
        keys
    }
}
