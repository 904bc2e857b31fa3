//! Values over time as lines, each with its own colour and dashes.

use plotters::element::{Circle, PathElement};
use plotters::style::Color;

use super::ticks::{Frame, Scale, draw_labels};
use super::{Area, Drawn, Ground, titled};
use crate::page::plot::Lines;

pub(super) fn draw(lines: &Lines, ground: Ground, area: &Area<'_>) -> Drawn {
    let scale = Scale::of(lines.lines.iter().flat_map(|line| line.values.iter().copied().flatten()), lines.measure);
    let frame = Frame::new(scale.room(ground), 0, ground, ground.height());
    scale.draw_up(&titled(&lines.up, &scale), frame, ground, area)?;
    let count = lines.labels.len().max(1);
    // A value belongs to an interval, so it is drawn in its middle.
    let middle = |at: usize| (at as f64 + 0.5) / count as f64;
    for line in &lines.lines {
        let mut at = 0;
        while at < line.values.len() {
            let run: Vec<_> = line.values[at..].iter().map_while(|value| *value).collect();
            let place = |(after, value): (usize, &f64)| (frame.x(middle(at + after)), frame.y(scale.share(*value)));
            let places: Vec<_> = run.iter().enumerate().map(place).collect();
            if let [alone] = places[..] {
                area.draw(&Circle::new(alone, 3, line.ink.colour().filled()))?;
            } else if places.len() > 1 {
                area.draw(&PathElement::new(places, line.ink.colour().stroke_width(2)))?;
            }
            at += run.len().max(1);
        }
    }
    let labels: Vec<_> = lines.labels.iter().enumerate().map(|(at, label)| (middle(at), label.clone())).collect();
    draw_labels(&labels, &lines.across, frame, ground, area)
}
