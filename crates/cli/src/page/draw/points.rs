//! Choices between two numbers as points, the one to choose in a ring.

use plotters::element::{Circle, Text};
use plotters::style::Color;
use plotters::style::text_anchor::{HPos, VPos};

use super::ticks::{Frame, Scale};
use super::{Area, Drawn, Ground, INK, name, titled};
use crate::page::plot::{Ink, Points};

pub(super) fn draw(points: &Points, ground: Ground, area: &Area<'_>) -> Drawn {
    let across = Scale::of(points.points.iter().map(|point| point.x), points.across_measure);
    let up = Scale::of(points.points.iter().map(|point| point.y), points.up_measure);
    let frame = Frame::new(up.room(ground), 0, ground, ground.height());
    up.draw_up(&titled(&points.up, &up), frame, ground, area)?;
    across.draw_across(&titled(&points.across, &across), frame, ground, area)?;
    let place = |x: f64, y: f64| (frame.x(across.share(x)), frame.y(up.share(y)));
    for point in points.points.iter().filter(|point| point.chosen.is_none()) {
        area.draw(&Circle::new(place(point.x, point.y), 4, Ink::Plain.colour().filled()))?;
    }
    for point in &points.points {
        let Some(chosen) = &point.chosen else { continue };
        let (x, y) = place(point.x, point.y);
        area.draw(&Circle::new((x, y), 3, Ink::Denied.colour().filled()))?;
        area.draw(&Circle::new((x, y), 8, Ink::Denied.colour().stroke_width(3)))?;
        // On the side where there is more room, and above its point: a choice that needs less of one number has more of
        // the other, so that the others lie beside and below.
        let (h, at, room) = if x > (frame.left + frame.right) / 2 {
            (HPos::Right, x - 14, x - 14 - frame.left)
        } else {
            (HPos::Left, x + 14, frame.right - x - 14)
        };
        let y = (y - 2 * ground.font()).max(frame.top + ground.font());
        area.draw(&Text::new(name(chosen, ground.characters(room)), (at, y), ground.text(INK, h, VPos::Center)))?;
    }
    Ok(())
}
