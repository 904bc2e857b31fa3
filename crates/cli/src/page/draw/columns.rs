//! Columns: counts in intervals, one kind on top of the other.

use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::Color;
use plotters::style::text_anchor::{HPos, VPos};

use super::ticks::{Frame, Scale, draw_labels};
use super::{Area, Drawn, Ground, INK, name, stacked};
use crate::page::plot::{Columns, Mark, Measure};

/// The name of each mark has a line of its own.
pub(super) fn height(columns: &Columns, ground: Ground) -> i32 {
    ground.height() + marks(columns) * (ground.font() + 6)
}

fn marks(columns: &Columns) -> i32 {
    i32::try_from(columns.marks.len()).unwrap_or(0)
}

pub(super) fn draw(columns: &Columns, ground: Ground, area: &Area<'_>) -> Drawn {
    let count = columns.edges.len().saturating_sub(1).max(1);
    let most = stacked(&columns.series, count).max(columns.top.unwrap_or(0));
    let scale = Scale::from_zero(most as f64, Measure::Count);
    let frame = Frame::new(scale.room(ground), marks(columns), ground, height(columns, ground));
    scale.draw_up(&columns.up, frame, ground, area)?;
    for at in 0..count {
        let [left, right] = [at, at + 1].map(|edge| frame.x(edge as f64 / count as f64));
        // A gap between columns, where they are wide enough.
        let right = if right - left > 4 { right - 1 } else { right.max(left + 1) };
        let (mut below, mut drawn) = (0, frame.bottom);
        for series in &columns.series {
            let part = series.counts.get(at).copied().unwrap_or(0);
            if part == 0 {
                continue;
            }
            below += part;
            // Even the smallest count is visible.
            let top = frame.y(scale.share(below as f64)).min(drawn - 2);
            area.draw(&Rectangle::new([(left, top), (right, drawn)], series.ink.colour().filled()))?;
            drawn = top;
        }
    }
    draw_marks(columns, count, frame, ground, area)?;
    let label = |(at, edge): (usize, &String)| (at as f64 / count as f64, edge.clone());
    let labels: Vec<_> = columns.edges.iter().enumerate().map(label).collect();
    draw_labels(&labels, &columns.across, frame, ground, area)
}

fn draw_marks(columns: &Columns, count: usize, frame: Frame, ground: Ground, area: &Area<'_>) -> Drawn {
    let line = ground.font() + 6;
    let x = |mark: &Mark| frame.x((mark.at / count as f64).clamp(0.0, 1.0));
    // A name is on the side of its mark with more room, and lower than names farther out on that side, so that their
    // lines don't cross it.
    let (left, mut right): (Vec<_>, Vec<_>) = columns.marks.iter().partition(|mark| x(mark) <= ground.width() / 2);
    right.reverse();
    let placed: Vec<_> = (1..).zip(left.into_iter().chain(right)).map(|(row, mark)| (row * line + 2, mark)).collect();
    for (y, mark) in &placed {
        area.draw(&PathElement::new(vec![(x(mark), *y), (x(mark), frame.bottom)], INK))?;
    }
    for (y, mark) in placed {
        let text = name(&mark.name, ground.characters(ground.width() / 2));
        let (h, place) = if x(mark) > ground.width() / 2 { (HPos::Right, -4) } else { (HPos::Left, 4) };
        area.draw(&Text::new(text, (x(mark) + place, y), ground.text(INK, h, VPos::Top)))?;
    }
    Ok(())
}
