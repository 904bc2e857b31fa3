//! The kinds of plots. Every plot has a table with it, so it needn't show everything.

/// A plot of one of these kinds.
#[derive(Clone, Debug)]
pub(crate) enum Plot {
    Columns(Columns),
    Bars(Bars),
    Lines(Lines),
    Points(Points),
}

/// Counts in consecutive intervals of times or values, as upright columns with the kinds stacked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Columns {
    /// The ends of the intervals: one more than there are intervals.
    pub(crate) edges: Vec<String>,
    /// The title of the horizontal axis.
    pub(crate) across: String,
    /// The title of the vertical axis.
    pub(crate) up: String,
    pub(crate) series: Vec<Series>,
    /// Named places, such as a percentile.
    pub(crate) marks: Vec<Mark>,
    /// The highest number of the scale, so that several plots can share one. Default: the highest column.
    pub(crate) top: Option<u64>,
}

/// Counts by name, as horizontal bars with the kinds end to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bars {
    pub(crate) names: Vec<String>,
    /// A note beside each name.
    pub(crate) notes: Vec<String>,
    pub(crate) series: Vec<Series>,
    /// The count of a bar that fills the width, at least.
    pub(crate) full: Option<u64>,
}

/// Values over time.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    /// The time of each value.
    pub(crate) labels: Vec<String>,
    pub(crate) across: String,
    pub(crate) up: String,
    pub(crate) measure: Measure,
    pub(crate) lines: Vec<Line>,
}

/// Choices between two numbers, such as the rate and the burst of a rule.
#[derive(Clone, Debug)]
pub(crate) struct Points {
    pub(crate) across: String,
    pub(crate) across_measure: Measure,
    pub(crate) up: String,
    pub(crate) up_measure: Measure,
    pub(crate) points: Vec<Point>,
    /// What the points are, and what the chosen one is.
    pub(crate) names: [String; 2],
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Set for the point to choose, which stands out with this text beside it.
    pub(crate) chosen: Option<String>,
}

/// Counts of one kind, one for each interval or name.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) ink: Ink,
    pub(crate) counts: Vec<u64>,
}

/// Values of one kind; where there is none, the line has a gap.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) ink: Ink,
    pub(crate) values: Vec<Option<f64>>,
}

/// A named position among the columns: 1.5 is the middle of the second.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    pub(crate) at: f64,
    pub(crate) name: String,
}

/// What distinguishes a kind: a colour, and a pattern or a line style.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ink {
    Allowed,
    Denied,
    Other,
    Plain,
}

/// How the numbers of an axis are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    Count,
    /// In microseconds.
    Time,
}

impl Plot {
    /// Its kinds, for a legend.
    pub(super) fn legend(&self) -> Vec<(&str, Ink)> {
        match self {
            Self::Columns(Columns { series, .. }) | Self::Bars(Bars { series, .. }) => {
                series.iter().map(|series| (series.name.as_str(), series.ink)).collect()
            }
            Self::Lines(Lines { lines, .. }) => lines.iter().map(|line| (line.name.as_str(), line.ink)).collect(),
            Self::Points(Points { names: [all, chosen], .. }) => vec![(all, Ink::Plain), (chosen, Ink::Denied)],
        }
    }
}
