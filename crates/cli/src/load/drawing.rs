//! Draws the rate, p99 and denials of each second on a terminal while a load runs.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{bars, can_be_redrawn, human, width};

/// The time of one bar.
const SECOND: Duration = Duration::from_secs(1);
/// The most seconds that are drawn.
const MOST_BARS: usize = 60;
/// The width of a line before its bars.
const BEFORE_BARS: usize = 20;

/// What was answered since it was last drawn, warm-up included.
#[derive(Debug)]
pub(super) struct Recent {
    pub(super) answers: u64,
    pub(super) denials: u64,
    pub(super) latency: Histogram<u64>,
}

#[derive(Debug)]
pub(super) struct Drawing {
    bar: ProgressBar,
    since: Instant,
    seconds: Vec<Drawn>,
}

/// One second's numbers.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    rate: f64,
    p99_us: u64,
    denied: f64,
}

impl Drawing {
    pub(super) fn new() -> Self {
        let bar = progress(1000, "{wide_bar} {prefix}\n{msg}");
        Self { bar, since: Instant::now(), seconds: Vec::new() }
    }

    pub(super) fn is_shown(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// How much of the run is over, from 0 to 1, and how many calls were answered.
    pub(super) fn move_to(&self, share: f64, answers: u64) {
        self.bar.set_prefix(format!("{} {}", HumanCount(answers), if answers == 1 { "call" } else { "calls" }));
        self.bar.set_position((share * 1000.0) as u64);
    }

    /// Adds a second, once it has passed.
    pub(super) fn add(&mut self, now: Instant, recent: &mut Recent) {
        let passed = now - self.since;
        if passed < SECOND {
            return;
        }
        self.since = now;
        let Recent { answers, denials, latency } = recent;
        self.seconds.push(Drawn {
            rate: *answers as f64 / passed.as_secs_f64(),
            p99_us: latency.value_at_percentile(99.0).min(latency.max()),
            denied: *denials as f64 / (*answers).max(1) as f64,
        });
        (*answers, *denials) = (0, 0);
        latency.reset();
        let surplus = self.seconds.len().saturating_sub(MOST_BARS);
        self.seconds.drain(..surplus);
        self.bar.set_message(lines(&self.seconds, width()));
    }

    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// A line for each number, no wider than this unless the number itself is.
fn lines(seconds: &[Drawn], width: usize) -> String {
    let Some(last) = seconds.last() else { return String::new() };
    let course = |of: fn(&Drawn) -> f64| bars(seconds.iter().map(of), width.saturating_sub(BEFORE_BARS).min(MOST_BARS));
    let line = |name: &str, value: String, course: String| format!("{name:<7}{value:>11}  {course}");
    [
        line("rate", format!("{}/s", HumanCount(last.rate.round() as u64)), course(|one| one.rate)),
        line("p99", human(Duration::from_micros(last.p99_us)), course(|one| one.p99_us as f64)),
        line("denied", format!("{:.1}%", last.denied * 100.0), course(|one| one.denied)),
    ]
    .join("\n")
}

/// A bar on standard error, if that is a terminal that can be redrawn.
pub(super) fn progress(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("a well-formed template");
    let target = if can_be_redrawn() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    ProgressBar::with_draw_target(Some(length), target).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_lines_fit_forty_columns_however_large_the_numbers() {
        let second = Drawn { rate: 9_999_999.4, p99_us: 1_234_567, denied: 1.0 };
        for count in [1, 5, 60] {
            let text = lines(&vec![second; count], 40);
            assert_eq!(text.lines().count(), 3);
            assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        }
        let first = Drawn { rate: 500.0, p99_us: 100, denied: 0.25 };
        let text = lines(&[first, Drawn { rate: 1000.0, p99_us: 50, denied: 0.25 }], 80);
        assert_eq!(text, "rate       1,000/s  ▅█\np99           50us  █▅\ndenied       25.0%  ██");
        assert_eq!(lines(&[], 80), "");
    }

    #[test]
    fn a_second_is_added_once_it_has_passed_and_counts_begin_anew() {
        let mut drawing = Drawing::new();
        let mut latency = Histogram::new(3).expect("digits");
        latency.record(700).expect("in range");
        let mut recent = Recent { answers: 100, denials: 10, latency };
        let began = drawing.since;
        drawing.add(began + SECOND / 2, &mut recent);
        assert_eq!((drawing.seconds.len(), recent.answers), (0, 100));
        drawing.add(began + 2 * SECOND, &mut recent);
        assert_eq!((recent.answers, recent.denials, recent.latency.len()), (0, 0, 0));
        let [Drawn { rate, p99_us, denied }] = drawing.seconds[..] else { panic!("{:?}", drawing.seconds) };
        assert_eq!((rate, p99_us, denied), (50.0, 700, 0.1));
    }
}
