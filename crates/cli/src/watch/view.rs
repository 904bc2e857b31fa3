//! The picture of a snapshot: a function of the snapshot and the user's choices, without I/O.

use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Clear, Paragraph, Row, Table as Rows, Widget};

use super::controls::{Controls, HELP, Tab};
use super::figures::{count, percent};
use super::snapshot::{Sample, Snapshot};
use super::summary::{History, Theme, groups, lines};
use super::tables::{Table, table};

/// From this width on, there are two tables side by side.
const TWO_TABLES: u16 = 120;
/// The least height of the tables, with their titles.
const LEAST_TABLE: u16 = 4;

#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) history: &'a History,
    pub(super) theme: Theme,
}

impl View<'_> {
    /// Draws the picture, and keeps the rows in view.
    pub(super) fn draw(&self, controls: &mut Controls, area: Rect, buffer: &mut Buffer) {
        let summary = lines(groups(self.snapshot, self.history, self.theme), area.width.into(), self.theme);
        let room = area.height.saturating_sub(LEAST_TABLE + 2);
        let height = u16::try_from(summary.len()).unwrap_or(u16::MAX).min(room);
        let parts = [Constraint::Length(height), Constraint::Fill(1), Constraint::Length(1), Constraint::Length(1)];
        let [above, tables, sample, keys] = Layout::vertical(parts).areas(area);
        Paragraph::new(Text::from(summary)).render(above, buffer);
        self.draw_tables(controls, tables, buffer);
        Paragraph::new(sampled(&self.snapshot.sample, area.width)).style(self.theme.quiet()).render(sample, buffer);
        self.draw_keys(controls, keys, buffer);
        if controls.help {
            self.draw_help(area, buffer);
        }
    }

    fn draw_tables(&self, controls: &mut Controls, area: Rect, buffer: &mut Buffer) {
        let (left, right) = if area.width >= TWO_TABLES {
            let [left, _, right] =
                Layout::horizontal([Constraint::Fill(3), Constraint::Length(2), Constraint::Fill(2)]).areas(area);
            (left, Some(right))
        } else {
            (area, None)
        };
        let chosen = controls.tab;
        let shown = table(chosen, self.snapshot, controls.sort(chosen), &controls.filter, left.width);
        controls.settle(shown.rows.len());
        let [title, rows] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(left);
        self.tabs(chosen, &shown, controls).render(title, buffer);
        self.draw_table(&shown, controls.first, rows, buffer);
        if let Some(right) = right {
            let beside = if chosen == Tab::Rules { Tab::Keys } else { Tab::Rules };
            let [title, rows] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(right);
            Line::styled(beside.name(), self.theme.quiet()).render(title, buffer);
            let other = table(beside, self.snapshot, controls.sort(beside), &controls.filter, right.width);
            self.draw_table(&other, 0, rows, buffer);
        }
    }

    fn tabs(&self, chosen: Tab, shown: &Table, controls: &Controls) -> Line<'static> {
        let mut spans = Vec::new();
        for tab in Tab::ALL {
            let style = if tab == chosen { self.theme.chosen() } else { self.theme.quiet() };
            spans.extend([Span::styled(tab.name(), style), Span::raw(" ")]);
        }
        spans.push(Span::raw(format!(" by {}", shown.sorted_by)));
        if !controls.filter.is_empty() && !controls.typing {
            spans.push(Span::styled(format!(", only {:?}", controls.filter), self.theme.wrong()));
        }
        Line::from(spans)
    }

    pub(super) fn draw_table(&self, table: &Table, first: usize, area: Rect, buffer: &mut Buffer) {
        if table.rows.is_empty() {
            return Paragraph::new(table.empty.as_str()).style(self.theme.quiet()).render(area, buffer);
        }
        let titles = table.columns.iter().map(|column| aligned(column.title.to_owned(), column.is_number));
        let header = Row::new(titles).style(self.theme.name().add_modifier(Modifier::BOLD));
        let rows = table.rows.iter().skip(first).take(area.height.into()).map(|row| {
            // A row with a message alone takes the whole width.
            let is_message = row.len() == 1;
            let cells = row.iter().zip(&table.columns);
            Row::new(cells.map(|(cell, column)| aligned(cell.clone(), column.is_number))).style(if is_message {
                self.theme.wrong()
            } else {
                Style::new()
            })
        });
        let widths = table.columns.iter().map(|column| column.width);
        Rows::new(rows, widths).header(header).column_spacing(2).render(area, buffer);
    }

    fn draw_keys(&self, controls: &Controls, area: Rect, buffer: &mut Buffer) {
        let (text, style) = match (controls.typing, controls.paused) {
            (true, _) => {
                (format!("/{}_  Enter applies the filter, Esc clears it", controls.filter), self.theme.chosen())
            }
            (false, true) => ("paused: p resumes, q quits".to_owned(), self.theme.chosen()),
            (false, false) => {
                let all = "q quit  p pause  s sort  / filter  Tab table  jk scroll  ? help";
                let few = "q quit  p pause  s sort  / filter  ?";
                (if usize::from(area.width) < all.len() { few } else { all }.to_owned(), self.theme.quiet())
            }
        };
        Line::styled(text, style).render(area, buffer);
    }

    fn draw_help(&self, area: Rect, buffer: &mut Buffer) {
        let lines = HELP.map(|(keys, what)| Line::from(format!(" {keys:<14} {what}")));
        let height = u16::try_from(lines.len()).unwrap_or(u16::MAX).min(area.height);
        let longest = lines.iter().map(Line::width).max().unwrap_or_default() + 1;
        let width = u16::try_from(longest).unwrap_or(u16::MAX).min(area.width);
        let middle =
            Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
        Clear.render(middle, buffer);
        Paragraph::new(Text::from(lines.to_vec())).style(self.theme.chosen()).render(middle, buffer);
    }
}

/// How much of the writes and keys was seen.
pub(super) fn sampled(sample: &Sample, width: u16) -> String {
    /// The least width for whole words.
    const WORDS: u16 = 60;
    let of_time = if width >= WORDS { " of the time" } else { "" };
    let writes = match (&sample.no_writes, sample.time_share) {
        (Some(why), _) => format!("writes not seen: {why}"),
        (None, Some(share)) => format!("writes seen {}{of_time}", percent(Some(share))),
        (None, None) => "writes not seen yet".to_owned(),
    };
    let keys = match &sample.no_scan {
        Some(why) => format!("keys not scanned: {why}"),
        None if sample.complete => format!("all {} keys scanned", count(sample.of)),
        None => format!("{} of {} keys scanned", count(sample.scanned), count(sample.of)),
    };
    format!("{writes}, {keys}")
}

fn aligned(text: String, is_number: bool) -> Cell<'static> {
    let alignment = if is_number { Alignment::Right } else { Alignment::Left };
    Cell::from(Text::from(text).alignment(alignment))
}

#[cfg(test)]
mod tests;
