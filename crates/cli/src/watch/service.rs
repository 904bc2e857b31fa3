//! What a service's metrics say about the time between two readings, named as in `tollgate::describe_metrics`.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::endpoint::Address;
use super::prometheus::{Sample, samples};
use super::snapshot::{Decisions, Endpoint, ErrorRate, Latency, Service, rounded};

const PREFIX: &str = "tollgate_";
const DECISIONS: &str = "tollgate_decisions_total";
const DURATION: &str = "tollgate_decision_duration_seconds";
const ERRORS: &str = "tollgate_errors_total";
const BATCH: &str = "tollgate_batch_keys";
const BREAKERS: &str = "tollgate_breakers_open";
const DROPPED: &str = "tollgate_background_dropped_total";

/// An endpoint, and its last reading.
#[derive(Debug)]
pub(super) struct Watched {
    address: Address,
    now: Option<Reading>,
    error: Option<String>,
}

#[derive(Debug)]
struct Reading {
    at: Instant,
    /// Since the reading before, if there was one.
    seconds: Option<f64>,
    samples: Vec<Read>,
}

#[derive(Debug)]
struct Read {
    sample: Sample,
    /// How much a counter has grown since the reading before; a restarted process counts from 0.
    grown: Option<f64>,
}

impl Reading {
    fn new(at: Instant, samples: Vec<Sample>, before: Option<&Self>) -> Self {
        let series = |sample: &Sample| (sample.name.clone(), sample.labels.clone());
        let known = before.map(|before| {
            let samples = before.samples.iter().map(|read| &read.sample);
            samples.map(|sample| (series(sample), sample.value)).collect::<HashMap<_, _>>()
        });
        let grown = |sample: &Sample| {
            let before = known.as_ref()?.get(&series(sample)).copied().unwrap_or(0.0);
            let grown = if sample.value < before { sample.value } else { sample.value - before };
            Some(grown).filter(|grown| grown.is_finite())
        };
        let samples = samples.into_iter().map(|sample| Read { grown: grown(&sample), sample }).collect();
        let seconds = before.map(|before| (at - before.at).as_secs_f64()).filter(|seconds| *seconds > 0.0);
        Self { at, seconds, samples }
    }
}

impl Watched {
    pub(super) fn new(address: Address) -> Self {
        Self { address, now: None, error: None }
    }

    pub(super) async fn read(&mut self) {
        let read = self.address.read().await.and_then(|text| samples(&text, PREFIX));
        match read {
            Ok(samples) => {
                self.error = None;
                self.now = Some(Reading::new(Instant::now(), samples, self.now.as_ref()));
            }
            // Its numbers are unknown, not 0.
            Err(why) => (self.now, self.error) = (None, Some(why)),
        }
    }
}

/// All endpoints together.
pub(super) fn service(all: &[Watched]) -> Service {
    let decisions = rates(all, DECISIONS);
    let label = |labels: &Labels, name: &str| labels.get(name).cloned().unwrap_or_default();
    let mut service = Service {
        endpoints: all.iter().map(|one| Endpoint { url: one.address.to_string(), error: one.error.clone() }).collect(),
        decisions_per_second: sum(decisions.values().map(|(rate, _)| *rate)).map(|rate| rounded(rate, 1)),
        decisions: decisions
            .iter()
            .map(|(labels, (rate, total))| Decisions {
                rule: label(labels, "rule"),
                algorithm: label(labels, "algorithm"),
                outcome: label(labels, "outcome"),
                source: label(labels, "source"),
                per_second: rate.map(|rate| rounded(rate, 1)),
                total: *total,
            })
            .collect(),
        latency: latency(all),
        batch_mean: None,
        batch_p99: None,
        errors: rates(all, ERRORS)
            .into_iter()
            .map(|(labels, (rate, total))| ErrorRate {
                class: label(&labels, "class"),
                per_second: rate.map(|rate| rounded(rate, 1)),
                total,
            })
            .collect(),
        breakers_open: sum(all.iter().flat_map(|one| one.values(BREAKERS)).map(|read| Some(read.sample.value))),
        background_dropped_per_second: sum(rates(all, DROPPED).values().map(|(rate, _)| *rate)),
    };
    let (keys, batches) = (grown(all, &format!("{BATCH}_sum"), None), grown(all, &format!("{BATCH}_count"), None));
    service.batch_mean =
        keys.zip(batches).filter(|(_, batches)| *batches > 0.0).map(|(keys, of)| rounded(keys / of, 2));
    service.batch_p99 = quantile(all, BATCH, None, 0.99).map(|keys| rounded(keys, 1));
    service.decisions.sort_by(|one, other| {
        let rates = other.per_second.unwrap_or(0.0).total_cmp(&one.per_second.unwrap_or(0.0));
        rates.then_with(|| (&one.rule, &one.outcome).cmp(&(&other.rule, &other.outcome)))
    });
    service
}

type Labels = BTreeMap<String, String>;

impl Watched {
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Read> {
        self.now.iter().flat_map(|reading| &reading.samples).filter(move |read| read.sample.name == name)
    }

    fn seconds(&self) -> Option<f64> {
        self.now.as_ref()?.seconds
    }
}

/// A counter's rate and total by its labels. No rate where there is only one reading.
fn rates(all: &[Watched], name: &str) -> BTreeMap<Labels, (Option<f64>, f64)> {
    let mut rates: BTreeMap<Labels, (Option<f64>, f64)> = BTreeMap::new();
    for one in all {
        for Read { sample, grown } in one.values(name).filter(|read| read.sample.value.is_finite()) {
            let rate = one.seconds().zip(*grown).map(|(seconds, grown)| grown / seconds);
            let (so_far, total) = rates.entry(sample.labels.iter().cloned().collect()).or_default();
            *so_far = sum([*so_far, rate]);
            *total += sample.value;
        }
    }
    rates
}

/// How much counters of this name, and of this source, have grown.
fn grown(all: &[Watched], name: &str, source: Option<&str>) -> Option<f64> {
    let of = all.iter().flat_map(|one| one.values(name));
    sum(of.filter(|read| is_of(&read.sample, source)).map(|read| read.grown))
}

fn latency(all: &[Watched]) -> Vec<Latency> {
    let count = format!("{DURATION}_count");
    let sources: BTreeMap<_, _> =
        rates(all, &count).into_iter().map(|(labels, (rate, _))| (labels.get("source").cloned(), rate)).collect();
    let of = |(source, rate): (Option<String>, Option<f64>)| {
        let at = |share| quantile(all, DURATION, source.as_deref(), share).map(|seconds| rounded(seconds * 1e6, 1));
        Latency {
            p50_us: at(0.5),
            p99_us: at(0.99),
            per_second: rate.map(|rate| rounded(rate, 1)),
            source: source.unwrap_or_default(),
        }
    };
    sources.into_iter().map(of).collect()
}

/// From buckets, over the interval; otherwise the largest quantile that an endpoint exports.
fn quantile(all: &[Watched], name: &str, source: Option<&str>, share: f64) -> Option<f64> {
    let bucket = format!("{name}_bucket");
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for one in all {
        for Read { sample, grown } in one.values(&bucket).filter(|read| is_of(&read.sample, source)) {
            let Some(bound) = sample.label("le").and_then(|le| le.parse::<f64>().ok()) else { continue };
            let grown = (*grown)?;
            match buckets.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, count)) => *count += grown,
                None => buckets.push((bound, grown)),
            }
        }
    }
    if !buckets.is_empty() {
        buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
        return within(&buckets, share);
    }
    let is_it = |sample: &&Sample| sample.label("quantile").and_then(|of| of.parse().ok()) == Some(share);
    let values = all.iter().flat_map(|one| one.values(name)).map(|read| &read.sample);
    let exported = values.filter(|sample| is_of(sample, source)).filter(is_it);
    exported.map(|sample| sample.value).filter(|value| value.is_finite()).max_by(f64::total_cmp)
}

/// The value at this share of the counts, which are cumulative up to each bound; interpolated between two bounds.
fn within(buckets: &[(f64, f64)], share: f64) -> Option<f64> {
    let total = buckets.last().map(|(_, count)| *count).filter(|total| *total > 0.0)?;
    let wanted = total * share;
    let (mut from, mut below) = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= wanted && *count > below {
            // Beyond the last finite bound nothing is known.
            let part = (wanted - below) / (count - below);
            return Some(if bound.is_finite() { from + (bound - from) * part } else { from });
        }
        (from, below) = (*bound, *count);
    }
    None
}

fn is_of(sample: &Sample, source: Option<&str>) -> bool {
    source.is_none_or(|source| sample.label("source") == Some(source))
}

/// The sum of the known numbers; `None` if none is known.
fn sum(numbers: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    numbers.into_iter().flatten().fold(None, |sum, number| Some(sum.unwrap_or(0.0) + number))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn watched(before: &str, now: &str) -> Watched {
        let began = Instant::now();
        let read = |at, text, before| Reading::new(at, samples(text, PREFIX).expect("metrics"), before);
        let before = read(began, before, None);
        let now = read(began + Duration::from_secs(2), now, Some(&before));
        Watched { address: "http://localhost:9000".parse().expect("an address"), now: Some(now), error: None }
    }

    const ALLOWED: &str =
        "tollgate_decisions_total{rule=\"api\",algorithm=\"token-bucket\",outcome=\"allowed\",source=\"redis\"}";
    const DENIED: &str =
        "tollgate_decisions_total{rule=\"api\",algorithm=\"token-bucket\",outcome=\"denied\",source=\"denial-cache\"}";

    #[test]
    fn counters_become_rates_by_their_labels_and_several_processes_are_added() {
        let one = watched(&format!("{ALLOWED} 100"), &format!("{ALLOWED} 300\n{DENIED} 10"));
        let other = watched(&format!("{ALLOWED} 1000"), &format!("{ALLOWED} 40"));
        let service = service(&[one, other]);
        assert_eq!(service.decisions_per_second, Some(125.0), "one began anew, and has counted to 40");
        let first = &service.decisions[0];
        assert_eq!((first.outcome.as_str(), first.per_second, first.total), ("allowed", Some(120.0), 340.0));
        let second = &service.decisions[1];
        assert_eq!((second.source.as_str(), second.per_second), ("denial-cache", Some(5.0)));
    }

    #[test]
    fn percentiles_are_of_the_interval_where_there_are_buckets() {
        let text = |fast: u64, all: u64| {
            format!(
                "tollgate_decision_duration_seconds_bucket{{source=\"redis\",le=\"0.0001\"}} {fast}\n\
                 tollgate_decision_duration_seconds_bucket{{source=\"redis\",le=\"0.001\"}} {all}\n\
                 tollgate_decision_duration_seconds_bucket{{source=\"redis\",le=\"+Inf\"}} {all}\n\
                 tollgate_decision_duration_seconds_count{{source=\"redis\"}} {all}\n"
            )
        };
        let service = service(&[watched(&text(1000, 1000), &text(1080, 1100))]);
        let latency = &service.latency[0];
        assert_eq!((latency.source.as_str(), latency.per_second), ("redis", Some(50.0)));
        assert_eq!((latency.p50_us, latency.p99_us), (Some(62.5), Some(955.0)));
    }

    #[test]
    fn percentiles_that_are_exported_are_taken_as_they_are() {
        let text = "tollgate_batch_keys{quantile=\"0.99\"} 7\ntollgate_batch_keys_sum 30\ntollgate_batch_keys_count 10\n\
            tollgate_decision_duration_seconds{source=\"redis\",quantile=\"0.5\"} 0.0001\n\
            tollgate_decision_duration_seconds{source=\"redis\",quantile=\"0.99\"} NaN\n\
            tollgate_decision_duration_seconds_count{source=\"redis\"} 10\ntollgate_breakers_open 1\n\
            tollgate_errors_total{class=\"timeout\"} 4\n";
        let service = service(&[watched("", text)]);
        assert_eq!((service.batch_mean, service.batch_p99), (Some(3.0), Some(7.0)));
        assert_eq!((service.latency[0].p50_us, service.latency[0].p99_us), (Some(100.0), None));
        assert_eq!((service.breakers_open, service.errors[0].per_second), (Some(1.0), Some(2.0)));
    }

    #[test]
    fn an_endpoint_that_cannot_be_read_leaves_numbers_unknown() {
        let mut away = watched("", "tollgate_breakers_open 1");
        (away.now, away.error) = (None, Some("no connection".into()));
        let service = service(&[away]);
        assert_eq!((service.decisions_per_second, service.breakers_open), (None, None));
        assert_eq!(service.endpoints[0].error.as_deref(), Some("no connection"));
    }

    #[test]
    fn the_value_beyond_the_last_bound_is_that_bound() {
        assert_eq!(within(&[(1.0, 0.0), (2.0, 10.0), (f64::INFINITY, 20.0)], 0.99), Some(2.0));
        assert_eq!(within(&[(1.0, 0.0), (f64::INFINITY, 0.0)], 0.5), None);
        assert_eq!(within(&[(1.0, 0.0), (2.0, 10.0)], 0.0), Some(1.0));
    }
}
