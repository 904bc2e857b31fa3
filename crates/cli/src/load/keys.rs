//! Which key each call uses.

use clap::ValueEnum;
use fastrand::Rng;

/// How calls spread over the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Spread {
    /// Every key equally often.
    Uniform,
    /// The n-th key in proportion to 1 / n^exponent: a few keys are busy, most aren't.
    Zipf,
    /// One key for all calls.
    Hot,
}

impl Spread {
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|spread| spread.get_name().to_owned()).unwrap_or_default()
    }
}

/// Draws keys by number, from 0.
#[derive(Debug)]
pub(super) enum Keys {
    Even(u32),
    /// For each key, the sum of the weights up to and including its own.
    Weighted(Vec<f64>),
}

impl Keys {
    pub(super) fn new(spread: Spread, count: u32, exponent: f64) -> Self {
        match spread {
            Spread::Uniform => Self::Even(count),
            Spread::Hot => Self::Even(1),
            Spread::Zipf => Self::Weighted(
                (1..=count)
                    .scan(0.0, |sum, rank| {
                        *sum += f64::from(rank).powf(-exponent);
                        Some(*sum)
                    })
                    .collect(),
            ),
        }
    }

    pub(super) fn draw(&self, chance: &mut Rng) -> u32 {
        match self {
            Self::Even(count) => chance.u32(0..*count),
            Self::Weighted(sums) => {
                let point = chance.f64() * sums.last().copied().unwrap_or_default();
                let key = sums.partition_point(|sum| *sum <= point).min(sums.len().saturating_sub(1));
                u32::try_from(key).unwrap_or_default()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 100,000 draws each key gets.
    fn drawn(spread: Spread, count: u32, exponent: f64) -> Vec<u32> {
        let keys = Keys::new(spread, count, exponent);
        let mut chance = Rng::with_seed(7);
        let mut drawn = vec![0; count as usize];
        for _ in 0..100_000 {
            drawn[keys.draw(&mut chance) as usize] += 1;
        }
        drawn
    }

    #[test]
    fn each_spread_draws_as_its_name_says() {
        assert_eq!(drawn(Spread::Hot, 3, 1.0), [100_000, 0, 0]);
        for share in drawn(Spread::Uniform, 4, 1.0) {
            assert!((24_000..26_000).contains(&share), "{share}");
        }
        // Weights 1, 1/2 and 1/4 for the first, second and fourth of four; 25/12 in total.
        let zipf = drawn(Spread::Zipf, 4, 1.0);
        for (share, expected) in zipf.iter().zip([48_000, 24_000, 16_000, 12_000]) {
            assert!(share.abs_diff(expected) < 1000, "{zipf:?}");
        }
        for share in drawn(Spread::Zipf, 4, 0.0) {
            assert!((24_000..26_000).contains(&share), "{share}");
        }
    }
}
