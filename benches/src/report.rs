//! Medians, and their comparison with targets. Everything is printed as Markdown, to be read as it is and kept in the
//! README.

use std::fmt;

/// The median.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What is promised and what is wanted beyond that, with the measurements.
#[derive(Debug, Default)]
pub struct Targets(Vec<Target>);

#[derive(Debug)]
pub struct Target {
    what: String,
    bound: Bound,
    promised: f64,
    wanted: Option<f64>,
    measured: f64,
}

#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast,
    AtMost,
    Exactly,
}

impl Targets {
    pub fn at_least(&mut self, what: impl Into<String>, promised: f64, measured: f64) -> &mut Target {
        self.add(what.into(), Bound::AtLeast, promised, measured)
    }

    pub fn at_most(&mut self, what: impl Into<String>, promised: f64, measured: f64) -> &mut Target {
        self.add(what.into(), Bound::AtMost, promised, measured)
    }

    pub fn exactly(&mut self, what: impl Into<String>, promised: f64, measured: f64) {
        self.add(what.into(), Bound::Exactly, promised, measured);
    }

    fn add(&mut self, what: String, bound: Bound, promised: f64, measured: f64) -> &mut Target {
        let target = Target { what, bound, promised, wanted: None, measured };
        self.0.push(target);
        let last = self.0.len() - 1;
        &mut self.0[last]
    }
}

impl Target {
    /// What is wanted beyond the promise.
    pub fn wanted(&mut self, wanted: f64) {
        self.wanted = Some(wanted);
    }
}

impl Bound {
    fn holds(self, bound: f64, measured: f64) -> bool {
        match self {
            Self::AtLeast => measured >= bound,
            Self::AtMost => measured <= bound,
            Self::Exactly => measured == bound,
        }
    }

    fn of(self, bound: f64) -> String {
        let word = match self {
            Self::AtLeast => "at least",
            Self::AtMost => "at most",
            Self::Exactly => "exactly",
        };
        format!("{word} {}", (bound * 100.0).round() / 100.0)
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", header(&["promised", "", "measured", ""]))?;
        for Target { what, bound, promised, measured, .. } in &self.0 {
            let verdict = if bound.holds(*promised, *measured) { "met" } else { "MISSED" };
            writeln!(f, "{}", row([what, &bound.of(*promised), &short(*measured), verdict]))?;
        }
        let wanted = |target: &Target| target.wanted.filter(|wanted| !target.bound.holds(*wanted, target.measured));
        let wanted: Vec<_> = self.0.iter().filter_map(|target| Some((target, wanted(target)?))).collect();
        if !wanted.is_empty() {
            writeln!(f, "\n{}", header(&["still wanted", "", "measured"]))?;
            for (Target { what, bound, measured, .. }, wanted) in wanted {
                writeln!(f, "{}", row([what, &bound.of(wanted), &short(*measured)]))?;
            }
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
