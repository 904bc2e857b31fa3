//! Bars: counts by name, with the kinds end to end.

use plotters::element::{Rectangle, Text};
use plotters::style::Color;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Area, Drawn, Ground, INK, QUIET, name, stacked};
use crate::page::plot::Bars;

const BAR: i32 = 12;

fn row(ground: Ground) -> i32 {
    ground.font() + BAR + 18
}

pub(super) fn height(bars: &Bars, ground: Ground) -> i32 {
    i32::try_from(bars.names.len()).unwrap_or(1).max(1) * row(ground)
}

/// Draws each name and its note above its bar, so that both fit on any screen.
pub(super) fn draw(bars: &Bars, ground: Ground, area: &Area<'_>) -> Drawn {
    let most = stacked(&bars.series, bars.names.len()).max(bars.full.unwrap_or(1)).max(1);
    let width = ground.width() - 2;
    for (top, (at, label)) in (0..).step_by(row(ground).unsigned_abs() as usize).zip(bars.names.iter().enumerate()) {
        let note = name(bars.notes.get(at).map_or("", String::as_str), ground.characters(width * 2 / 3));
        let label = name(label, ground.characters(width - ground.pixels(&note) - ground.font()));
        area.draw(&Text::new(label, (0, top + 4), ground.text(INK, HPos::Left, VPos::Top)))?;
        area.draw(&Text::new(note, (width, top + 4), ground.text(QUIET, HPos::Right, VPos::Top)))?;
        let (mut before, mut left, top) = (0, 0, top + ground.font() + 9);
        for series in &bars.series {
            let part = series.counts.get(at).copied().unwrap_or(0);
            if part == 0 {
                continue;
            }
            before += part;
            // Even the smallest count is visible.
            let right = (before as f64 / most as f64 * f64::from(width)).round() as i32;
            let (from, right) = (left.min(width - 2), right.max(left + 2).min(width));
            area.draw(&Rectangle::new([(from, top), (right, top + BAR)], series.ink.colour().filled()))?;
            left = right;
        }
    }
    Ok(())
}
