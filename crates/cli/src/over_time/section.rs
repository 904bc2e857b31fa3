//! Decisions over time, as a part of a page.

use std::time::Duration;

use super::Counted;
use crate::output::{grouped, human, percent};
use crate::page::{Columns, Ink, Plot, Section, Series, Table};

/// From the beginning, length and number of intervals: the labels of their ends, and the title of the axis.
type Axis = fn(u64, u64, usize) -> (Vec<String>, String);

impl Counted {
    /// `what` is the plural of what is counted; sections with the same `top` have the same scale.
    pub(crate) fn section(&self, title: &str, what: &str, axis: Axis, top: Option<u64>) -> Section {
        let (edges, across) = axis(self.from_us, self.each_us, self.denied.len());
        let mut table = Table::new([&*across, "allowed", "denied", "denied, %"]);
        for (at, edge) in edges.iter().enumerate().take(self.denied.len()) {
            let share = if self.total(at) == 0 { "-".to_owned() } else { percent(self.share(at)) };
            table.row([edge.clone(), grouped(self.allowed[at]), grouped(self.denied[at]), share]);
        }
        let series = vec![
            Series { name: "allowed".into(), ink: Ink::Allowed, counts: self.allowed.clone() },
            Series { name: "denied".into(), ink: Ink::Denied, counts: self.denied.clone() },
        ];
        let each = human(Duration::from_micros(self.each_us));
        let says = self.says(what, &each, &edges);
        let up = format!("{what} per {each}");
        let plot = Columns { edges, across, up, series, marks: Vec::new(), top };
        Section { title: title.to_owned(), says, plot: Some(Plot::Columns(plot)), table }
    }

    fn says(&self, what: &str, each: &str, edges: &[String]) -> String {
        let denied: u64 = self.denied.iter().sum();
        let all = denied + self.allowed.iter().sum::<u64>();
        let columns = format!("Each column is {each}");
        // The first, if several are equally bad.
        let worst = (0..self.denied.len()).rev().max_by(|one, other| self.share(*one).total_cmp(&self.share(*other)));
        match worst.filter(|_| denied > 0) {
            None => format!("{columns}. None of the {} {what} were denied.", grouped(all)),
            Some(worst) => {
                let touched = self.denied.iter().filter(|denied| **denied > 0).count();
                let (of, share) = (self.denied.len(), percent(denied as f64 / all.max(1) as f64));
                let [denied, all] = [denied, all].map(grouped);
                let most = percent(self.share(worst));
                let [from, to] = [worst, worst + 1].map(|at| edges.get(at).map_or("", String::as_str));
                format!(
                    "{columns}, and its hatched part was denied. {denied} of {all} {what} were denied ({share}), in \
                     {touched} of {of} columns; the highest share was {most}, from {from} to {to}."
                )
            }
        }
    }
}
