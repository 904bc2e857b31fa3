//! The scales of a plot: round numbers up the side, and as many labels below as there is room for.

use std::time::Duration;

use plotters::element::{PathElement, Text};
use plotters::style::text_anchor::{HPos, VPos};

use super::{Area, Drawn, GRID, Ground, INK, QUIET, name};
use crate::output::human;
use crate::page::plot::Measure;

/// Where a plot's scales leave room for its content, in pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) left: i32,
    pub(super) right: i32,
    pub(super) top: i32,
    pub(super) bottom: i32,
}

/// A scale of numbers: linear from zero, or logarithmic from the lowest.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    measure: Measure,
    low: f64,
    high: f64,
    by_factor: bool,
    ticks: Vec<f64>,
}

/// The most characters of a label.
const LABEL: usize = 20;

impl Scale {
    /// From zero to at least this.
    pub(super) fn from_zero(most: f64, measure: Measure) -> Self {
        let most = most.max(1.0);
        let step = match measure {
            Measure::Time => time_step(most / 4.0),
            // Counts have no fractions.
            Measure::Count => round(most / 4.0).max(1.0),
        };
        let count = (most / step).ceil().max(1.0);
        let ticks = (0..=count as u32).map(|number| f64::from(number) * step).collect();
        Self { measure, low: 0.0, high: count * step, by_factor: false, ticks }
    }

    /// A scale for these numbers: from zero, or logarithmic if they are of several orders of magnitude.
    pub(super) fn of(numbers: impl Iterator<Item = f64>, measure: Measure) -> Self {
        let (low, high) = numbers.fold((f64::MAX, 1.0_f64), |(low, high), number| (low.min(number), high.max(number)));
        if low <= 0.0 || high / low < 50.0 {
            return Self::from_zero(high, measure);
        }
        let from = low.log10().floor();
        let powers = (high.log10().ceil() - from).max(1.0);
        // At most six labels.
        let each = (powers / 5.0).ceil();
        let ticks: Vec<_> =
            (0..=(powers / each).ceil() as i32).map(|number| 10_f64.powf(from + f64::from(number) * each)).collect();
        let high = ticks.last().copied().unwrap_or(high);
        Self { measure, low: 10_f64.powf(from), high, by_factor: true, ticks }
    }

    pub(super) fn is_by_factor(&self) -> bool {
        self.by_factor
    }

    /// The share of the scale below this number.
    pub(super) fn share(&self, number: f64) -> f64 {
        let share = if self.by_factor {
            (number.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            number / self.high
        };
        share.clamp(0.0, 1.0)
    }

    /// The width of its labels at the side.
    pub(super) fn room(&self, ground: Ground) -> i32 {
        self.labels().iter().map(|label| ground.pixels(label)).max().unwrap_or_default() + 10
    }

    fn labels(&self) -> Vec<String> {
        self.ticks.iter().map(|tick| written(*tick, self.measure)).collect()
    }

    /// Draws the scale up the side, with a line across at each number and its title above.
    pub(super) fn draw_up(&self, title: &str, frame: Frame, ground: Ground, area: &Area<'_>) -> Drawn {
        for (tick, label) in self.ticks.iter().zip(self.labels()) {
            let y = frame.y(self.share(*tick));
            let colour = if *tick == self.low { QUIET } else { GRID };
            area.draw(&PathElement::new(vec![(frame.left, y), (frame.right, y)], colour))?;
            let style = ground.text(QUIET, HPos::Right, VPos::Center);
            area.draw(&Text::new(label, (frame.left - 6, y), style))?;
        }
        let title = name(title, ground.characters(frame.right));
        area.draw(&Text::new(title, (0, 2), ground.text(INK, HPos::Left, VPos::Top)))
    }

    /// Draws the scale below, with a vertical line at each number.
    pub(super) fn draw_across(&self, title: &str, frame: Frame, ground: Ground, area: &Area<'_>) -> Drawn {
        let labels: Vec<_> = self.ticks.iter().map(|tick| self.share(*tick)).zip(self.labels()).collect();
        for (share, _) in &labels {
            let x = frame.x(*share);
            area.draw(&PathElement::new(vec![(x, frame.top), (x, frame.bottom)], GRID))?;
        }
        draw_labels(&labels, title, frame, ground, area)
    }
}

impl Frame {
    /// The frame of a plot of this height, with so much room for labels at the left, and so many lines of text at the
    /// top besides the title.
    pub(super) fn new(left: i32, lines: i32, ground: Ground, height: i32) -> Self {
        let line = ground.font() + 6;
        Self { left, right: ground.width() - 12, top: line * (1 + lines) + 4, bottom: height - 2 * line - 4 }
    }

    pub(super) fn x(self, share: f64) -> i32 {
        self.left + (f64::from(self.right - self.left) * share).round() as i32
    }

    pub(super) fn y(self, share: f64) -> i32 {
        self.bottom - (f64::from(self.bottom - self.top) * share).round() as i32
    }
}

/// Draws labels below a plot, each at its share of the width, evenly skipping those without room, and the axis's title.
pub(super) fn draw_labels(
    labels: &[(f64, String)],
    title: &str,
    frame: Frame,
    ground: Ground,
    area: &Area<'_>,
) -> Drawn {
    let longest = labels.iter().map(|(_, label)| ground.pixels(&name(label, LABEL))).max().unwrap_or(1);
    let fitting = ((frame.right - frame.left) / (longest + ground.font())).max(1);
    let apart = labels.len().div_ceil(usize::try_from(fitting).unwrap_or(1)).max(1);
    let mut free = i32::MIN;
    for (share, label) in labels.iter().step_by(apart) {
        let (label, x) = (name(label, LABEL), frame.x(*share));
        // An m is wider than most characters.
        let half = ground.pixels(&label) / 2 + 4;
        // At the ends, a label moves inwards.
        let middle = x.max(half).min(ground.width() - half);
        if middle - half < free {
            continue;
        }
        free = middle + half + 2;
        area.draw(&PathElement::new(vec![(x, frame.bottom), (x, frame.bottom + 4)], QUIET))?;
        let style = ground.text(QUIET, HPos::Center, VPos::Top);
        area.draw(&Text::new(label, (middle, frame.bottom + 6), style))?;
    }
    let title = name(title, ground.characters(frame.right));
    let place = (frame.right, frame.bottom + ground.font() + 12);
    area.draw(&Text::new(title, place, ground.text(INK, HPos::Right, VPos::Top)))
}

/// 1, 2 or 5 times a power of ten, at least this.
fn round(number: f64) -> f64 {
    let power = 10_f64.powf(number.max(1e-9).log10().floor());
    let fits = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= number * 0.999_999);
    fits.unwrap_or(10.0) * power
}

/// The same for microseconds, with sixty seconds in a minute.
fn time_step(us: f64) -> f64 {
    const SECONDS: [f64; 14] =
        [1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 10_800.0, 43_200.0, 86_400.0];
    if us < 1e6 {
        return round(us).max(1.0);
    }
    let step = SECONDS.into_iter().map(|seconds| seconds * 1e6).find(|step| *step >= us);
    step.unwrap_or_else(|| round(us / 86.4e9) * 86.4e9)
}

fn written(number: f64, measure: Measure) -> String {
    match measure {
        Measure::Time if number == 0.0 => "0".to_owned(),
        Measure::Time => human(Duration::from_micros(number as u64)),
        Measure::Count => {
            let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
            let (of, unit) = units.into_iter().find(|(of, _)| number >= *of * 10.0).unwrap_or((1.0, ""));
            let text = format!("{:.1}", number / of);
            format!("{}{unit}", text.strip_suffix(".0").unwrap_or(&text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_round_numbers() {
        let labels = |most, measure| Scale::from_zero(most, measure).labels();
        assert_eq!(labels(3.0, Measure::Count), ["0", "1", "2", "3"]);
        assert_eq!(labels(87.0, Measure::Count), ["0", "50", "100"]);
        assert_eq!(labels(70_000.0, Measure::Count), ["0", "20k", "40k", "60k", "80k"]);
        assert_eq!(labels(0.0, Measure::Count), ["0", "1"]);
        assert_eq!(labels(200e6, Measure::Time), ["0", "1m", "2m", "3m", "4m"]);
        assert_eq!(labels(900.0, Measure::Time), ["0", "500us", "1ms"]);
        let scale = Scale::of([20.0, 90_000.0].into_iter(), Measure::Time);
        assert_eq!(scale.labels(), ["10us", "100us", "1ms", "10ms", "100ms"]);
        assert!((scale.share(1_000.0) - 0.5).abs() < 1e-9 && scale.share(0.0) == 0.0);
        assert!(!Scale::of([20.0, 90.0].into_iter(), Measure::Time).is_by_factor());
    }
}
