//! How often keys and rules are written, from recent looks; older ones count less and less.

use std::collections::HashMap;

use super::key_name::{KeyName, Label};
use super::written::Window;

/// The most keys that are remembered.
const MOST_KEYS: usize = 4096;
/// The most rules and limits.
const MOST_LABELS: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Rates {
    /// The observed time and the passed time, both fading.
    looked: f64,
    passed: f64,
    all: f64,
    keys: HashMap<Vec<u8>, f64>,
    labels: HashMap<Label, f64>,
}

impl Rates {
    /// Earlier counts fade by half every `half_life` seconds.
    pub(super) fn add(&mut self, window: Window, prefix: &str, passed: f64, half_life: f64) {
        let fade = 0.5_f64.powf(passed / half_life);
        self.looked = self.looked * fade + window.time.as_secs_f64();
        self.passed = self.passed * fade + passed;
        self.all *= fade;
        self.keys.values_mut().for_each(|count| *count *= fade);
        self.labels.values_mut().for_each(|count| *count *= fade);
        for (key, count) in window.keys {
            let Some(name) = KeyName::parse(&key, prefix) else { continue };
            let is_marker = name.is_marker();
            self.all += count;
            *self.labels.entry(name.of).or_default() += count;
            if !is_marker {
                *self.keys.entry(key).or_default() += count;
            }
        }
        keep(&mut self.keys, MOST_KEYS);
        keep(&mut self.labels, MOST_LABELS);
    }

    /// The share of the time that was observed.
    pub(super) fn share(&self) -> Option<f64> {
        (self.passed > 0.0).then(|| (self.looked / self.passed).min(1.0))
    }

    pub(super) fn all(&self) -> Option<f64> {
        (self.looked > 0.0).then(|| self.all / self.looked)
    }

    pub(super) fn of_key(&self, key: &[u8]) -> Option<f64> {
        (self.looked > 0.0).then(|| self.keys.get(key).copied().unwrap_or(0.0) / self.looked)
    }

    pub(super) fn of_label(&self, label: &Label) -> Option<f64> {
        (self.looked > 0.0).then(|| self.labels.get(label).copied().unwrap_or(0.0) / self.looked)
    }

    pub(super) fn labels(&self) -> impl Iterator<Item = &Label> {
        self.labels.keys()
    }

    /// The most written keys, in descending order.
    pub(super) fn busiest(&self, most: usize) -> Vec<&Vec<u8>> {
        let mut keys: Vec<_> = self.keys.iter().collect();
        keys.sort_unstable_by(|one, other| other.1.total_cmp(one.1).then_with(|| one.0.cmp(other.0)));
        keys.truncate(most);
        keys.into_iter().map(|(key, _)| key).collect()
    }
}

/// Forgets the smallest counts once there are more than `most`, and those that have faded in any case.
fn keep<K>(counts: &mut HashMap<K, f64>, most: usize) {
    const FADED: f64 = 0.01;
    counts.retain(|_, count| *count > FADED);
    if counts.len() > most {
        let mut all: Vec<_> = counts.values().copied().collect();
        // Half of them, so that this isn't needed each time.
        let (_, least, _) = all.select_nth_unstable_by(counts.len() - most / 2, f64::total_cmp);
        let least = *least;
        counts.retain(|_, count| *count > least);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn window(ms: u64, keys: &[(&str, u64)]) -> Window {
        let keys = keys.iter().map(|(key, count)| (key.as_bytes().to_vec(), *count as f64)).collect();
        Window { time: Duration::from_millis(ms), keys, ..Window::default() }
    }

    const ONE: &str = "t:{u:1}:api/token-bucket-1s";
    const OTHER: &str = "t:{u:2}:api/token-bucket-1s";

    #[test]
    fn a_rate_is_what_was_seen_by_the_time_that_it_was_looked_for() {
        let mut rates = Rates::default();
        assert_eq!((rates.all(), rates.share()), (None, None));
        rates.add(window(100, &[(ONE, 20), (OTHER, 10), ("t:{u:1}:api#job", 5), ("elsewhere", 9)]), "t", 1.0, 5.0);
        assert_eq!((rates.of_key(ONE.as_bytes()), rates.of_key(b"never")), (Some(200.0), Some(0.0)));
        assert_eq!((rates.share(), rates.all()), (Some(0.1), Some(350.0)));
        let busiest = rates.busiest(9);
        assert_eq!(busiest, [ONE.as_bytes(), OTHER.as_bytes()], "neither markers nor others' keys");
        let label = KeyName::parse(ONE.as_bytes(), "t").expect("a key").of;
        assert_eq!(rates.of_label(&label), Some(300.0));
    }

    #[test]
    fn what_was_seen_before_counts_less_and_less() {
        let mut rates = Rates::default();
        rates.add(window(1000, &[(ONE, 90)]), "t", 1.0, 1.0);
        rates.add(window(1000, &[]), "t", 1.0, 1.0);
        assert_eq!(rates.of_key(ONE.as_bytes()), Some(30.0));
        for _ in 0..20 {
            rates.add(window(1000, &[]), "t", 1.0, 1.0);
        }
        assert!(rates.busiest(9).is_empty() && rates.labels().next().is_none(), "in the end it is forgotten");
    }

    #[test]
    fn memory_is_bounded_and_the_busiest_keys_stay() {
        let names: Vec<_> = (0..3 * MOST_KEYS).map(|number| format!("t:{{u:{number}}}:api/token-bucket-1s")).collect();
        let mut rates = Rates::default();
        for (at, name) in names.iter().enumerate() {
            let count = if at == 7 { 50 } else { 1 };
            rates.keys.insert(name.as_bytes().to_vec(), f64::from(count));
        }
        rates.add(window(10, &[(ONE, 9)]), "t", 0.0, 5.0);
        assert!(rates.keys.len() <= MOST_KEYS, "{}", rates.keys.len());
        assert_eq!(rates.busiest(1), [names[7].as_bytes()]);
    }
}
