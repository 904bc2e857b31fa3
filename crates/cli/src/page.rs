//! A report as one HTML page that needs nothing else: no network, no script, no other file.
//!
//! A command describes what it found as a [`Page`], and [`ReportFile`] writes it:
//!
//! - `html` writes the text, and `style.css` styles it for light and dark screens and for paper;
//! - `plot` says what can be drawn, and `draw` draws it, each kind in a file of its own;
//! - `bins` counts times by intervals, `axis` labels the axis of time, `text` escapes and shortens any text;
//! - `file` is the option `--report`, and the file.
//!
//! It knows nothing of commands, rules or Redis.

mod axis;
mod bins;
#[cfg(feature = "reports")]
mod draw;
mod file;
#[cfg(feature = "reports")]
mod html;
/// The option is refused, so there is nothing to write.
#[cfg(not(feature = "reports"))]
mod html {
    pub(super) fn page(_: &super::Page) -> anyhow::Result<String> {
        anyhow::bail!(crate::version::lacking("--report", "reports"))
    }
}
#[allow(dead_code, reason = "without postgres no command draws lines")]
mod plot;
mod text;

pub(crate) use axis::{since_start, times};
pub(crate) use bins::Bins;
pub(crate) use file::ReportFile;
pub(crate) use plot::{Bars, Columns, Ink, Plot, Series};
#[allow(unused_imports, reason = "as above")]
pub(crate) use plot::{Line, Lines, Measure, Point, Points};

/// The content of a page.
#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    /// What was done, and with what.
    pub(crate) title: String,
    /// The result, in a sentence or two.
    pub(crate) says: String,
    /// Names and values.
    pub(crate) facts: Vec<(String, String)>,
    pub(crate) sections: Vec<Section>,
}

/// A part of a page: a title, what it shows, a plot, and its numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    pub(crate) title: String,
    /// What the plot shows, and the result in words and numbers: also for screen readers.
    pub(crate) says: String,
    pub(crate) plot: Option<Plot>,
    pub(crate) table: Table,
}

/// Rows of text: the first cell of each names it, the others are numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) heads: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Page {
    /// Adds a fact.
    pub(crate) fn fact(&mut self, name: &str, value: impl Into<String>) {
        self.facts.push((name.to_owned(), value.into()));
    }
}

impl Table {
    pub(crate) fn new<'h>(heads: impl IntoIterator<Item = &'h str>) -> Self {
        Self { heads: heads.into_iter().map(str::to_owned).collect(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}
