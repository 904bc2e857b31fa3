//! Medians, and their comparison with targets. Everything is printed as Markdown, to be read as it is and kept in the
//! README.

use std::fmt;

/// The median.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Targets and their measurements.
#[derive(Debug, Default)]
pub struct Targets(Vec<(String, String, f64, bool)>);

impl Targets {
    pub fn at_least(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.0.push((what.into(), format!("at least {bound}"), measured, measured >= bound));
    }

    pub fn at_most(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.0.push((what.into(), format!("at most {bound}"), measured, measured <= bound));
    }

    pub fn exactly(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.0.push((what.into(), format!("exactly {bound}"), measured, measured == bound));
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| target | aimed at | measured | |\n| --- | --- | --- | --- |")?;
        for (what, bound, measured, met) in &self.0 {
            let verdict = if *met { "met" } else { "MISSED" };
            writeln!(f, "| {what} | {bound} | {} | {verdict} |", short(*measured))?;
        }
        Ok(())
    }
}

/// A ratio or a time in as few digits as are useful; `-` if there is none.
pub fn short(value: f64) -> String {
    match value {
        _ if value.is_nan() => "-".into(),
        _ if value.fract() == 0.0 || value >= 100.0 => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

/// A row of a table.
pub fn row(cells: impl IntoIterator<Item = impl fmt::Display>) -> String {
    cells.into_iter().fold(String::from("|"), |row, cell| row + &format!(" {cell} |"))
}

/// The header rows of a table.
pub fn header(cells: &[&str]) -> String {
    format!("{}\n{}", row(cells), row(cells.iter().map(|_| "---")))
}
