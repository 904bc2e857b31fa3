//! Draws plots as SVG, with plotters. The style sheet replaces each colour by one for the screen or the paper, so a
//! colour here only identifies a use.

mod bars;
mod columns;
mod lines;
mod points;
mod ticks;

use std::io;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, RGBColor, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontDesc, FontFamily, FontStyle, TextStyle};

use super::plot::{Ink, Plot, Series};
use super::text::printable;
use ticks::Scale;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Text, and that of axes.
const INK: RGBColor = RGBColor(0x1b, 0x1f, 0x24);
const QUIET: RGBColor = RGBColor(0x57, 0x60, 0x6a);
const GRID: RGBColor = RGBColor(0xd8, 0xde, 0xe4);

impl Ink {
    pub(super) fn colour(self) -> RGBColor {
        match self {
            Self::Allowed => RGBColor(0x2f, 0x6f, 0xb0),
            Self::Denied => RGBColor(0xb8, 0x45, 0x0b),
            Self::Other => RGBColor(0x6b, 0x4c, 0x9a),
            Self::Plain => RGBColor(0x0f, 0x76, 0x6e),
        }
    }
}

/// The place that a plot is drawn for, where its text has the size of the surrounding text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ground {
    Wide,
    Narrow,
}

impl Ground {
    const fn width(self) -> i32 {
        match self {
            Self::Wide => 720,
            Self::Narrow => 336,
        }
    }

    const fn height(self) -> i32 {
        match self {
            Self::Wide => 260,
            Self::Narrow => 230,
        }
    }

    const fn font(self) -> i32 {
        match self {
            Self::Wide => 13,
            Self::Narrow => 12,
        }
    }

    /// How many characters fit into so many pixels, in any font.
    const fn characters(self, pixels: i32) -> usize {
        (pixels * 100 / (self.font() * 66)).unsigned_abs() as usize
    }

    /// The width of a text, in any font.
    fn pixels(self, text: &str) -> i32 {
        i32::try_from(text.chars().count()).unwrap_or(i32::MAX / 10_000) * self.font() * 66 / 100
    }

    fn text(self, colour: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
        // The SVG's size is smaller by this factor.
        let font = FontDesc::new(FontFamily::SansSerif, f64::from(self.font()) * 1.24, FontStyle::Normal);
        TextStyle { font, color: colour.to_backend_color(), pos: Pos::new(h, v) }
    }
}

/// The plot as an `svg` element.
pub(super) fn draw(plot: &Plot, ground: Ground) -> Result<String> {
    let height = match plot {
        Plot::Bars(bars) => bars::height(bars, ground),
        Plot::Columns(columns) => columns::height(columns, ground),
        Plot::Lines(_) | Plot::Points(_) => ground.height(),
    };
    let mut svg = String::new();
    let size = (ground.width().unsigned_abs(), height.unsigned_abs());
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    let drawn = match plot {
        Plot::Columns(columns) => columns::draw(columns, ground, &area),
        Plot::Bars(bars) => bars::draw(bars, ground, &area),
        Plot::Lines(lines) => lines::draw(lines, ground, &area),
        Plot::Points(points) => points::draw(points, ground, &area),
    };
    drawn.and_then(|()| area.present()).map_err(|error| anyhow!("--report: a plot could not be drawn: {error}"))?;
    drop(area);
    Ok(svg)
}

pub(super) fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// The patterns that the style sheet fills with: one for each kind, besides its colour.
pub(super) fn patterns() -> &'static str {
    "<svg class=\"patterns\" aria-hidden=\"true\" width=\"0\" height=\"0\"><defs>\
     <pattern id=\"hatch\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
     <rect class=\"denied\" width=\"5\" height=\"5\"/><rect class=\"gap\" width=\"1.4\" height=\"5\"/></pattern>\
     <pattern id=\"dots\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\">\
     <rect class=\"other\" width=\"5\" height=\"5\"/><circle class=\"gap\" cx=\"2.5\" cy=\"2.5\" r=\"1.1\"/></pattern>\
     </defs></svg>\n"
}

/// The height of the highest stack.
fn stacked(series: &[Series], count: usize) -> u64 {
    let total = |at: usize| series.iter().filter_map(|series| series.counts.get(at)).sum();
    (0..count).map(total).max().unwrap_or(0)
}

fn titled(title: &str, scale: &Scale) -> String {
    if scale.is_by_factor() { format!("{title}, logarithmic") } else { title.to_owned() }
}

/// A name in a plot: as many characters as there is room for.
fn name(text: &str, most: usize) -> String {
    let text = printable(text);
    if text.chars().count() <= most {
        return text;
    }
    let end = most / 3;
    let tail: Vec<_> = text.chars().rev().take(end).collect();
    let head: String = text.chars().take(most.saturating_sub(end + 1)).collect();
    format!("{head}…{}", tail.iter().rev().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STYLE: &str = include_str!("style.css");

    #[test]
    fn the_style_sheet_has_a_colour_for_each_that_is_drawn() {
        let inks = [Ink::Allowed, Ink::Denied, Ink::Other, Ink::Plain].map(Ink::colour);
        for colour in inks.into_iter().chain([INK, QUIET, GRID]) {
            assert!(STYLE.contains(&format!("[fill=\"{}\"]", hex(colour))), "fill {}", hex(colour));
            assert!(STYLE.contains(&format!("[stroke=\"{}\"]", hex(colour))), "stroke {}", hex(colour));
        }
    }

    /// The luminance of a colour of the style sheet, by the formula of WCAG.
    fn luminance(colour: &str) -> f64 {
        let number = u32::from_str_radix(colour, 16).unwrap_or_else(|_| panic!("{colour}"));
        let channel = |shift: u32| {
            let share = f64::from(number >> shift & 0xff) / 255.0;
            if share <= 0.040_45 { share / 12.92 } else { ((share + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(16) + 0.7152 * channel(8) + 0.0722 * channel(0)
    }

    fn contrast(one: &str, other: &str) -> f64 {
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    /// 4.5 to 1 for text, 3 to 1 for what must be visible in a plot; in the light style, which is also printed, and in
    /// the dark one.
    #[test]
    fn all_that_is_drawn_can_be_told_from_the_paper() {
        for block in STYLE.split(":root {").skip(1) {
            let colour = |name: &str| {
                let (_, rest) = block.split_once(&format!("--{name}: #")).unwrap_or_else(|| panic!("{name}"));
                rest[..6].to_owned()
            };
            let paper = colour("paper");
            for (name, least) in [("ink", 7.0), ("quiet", 4.5), ("link", 4.5)]
                .into_iter()
                .chain(["allowed", "denied", "other", "plain"].map(|name| (name, 3.0)))
            {
                let ratio = contrast(&colour(name), &paper);
                assert!(ratio >= least, "{name} on {paper}: {ratio:.2}");
            }
        }
    }
}
