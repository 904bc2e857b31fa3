//! A picture as plain text without colours, printed once, for scripts, files and simple terminals.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;

use super::controls::Tab;
use super::snapshot::Snapshot;
use super::summary::{History, Theme, groups, lines};
use super::tables::{Table, table};
use super::view::{View, sampled};

/// The most rows of each table.
const MOST_ROWS: usize = 20;

/// The summary and every table that has rows.
pub(super) fn picture(snapshot: &Snapshot, history: &History, width: u16) -> String {
    let view = View { snapshot, history, theme: Theme { colours: false } };
    let summary = lines(groups(snapshot, history, view.theme), width.into(), view.theme);
    // Text from an endpoint may contain any characters.
    let plain = |line: &Line<'_>| line.to_string().replace(char::is_control, " ");
    let mut text: String = summary.iter().map(|line| format!("{}\n", plain(line).trim_end())).collect();
    for tab in Tab::ALL {
        let mut shown = table(tab, snapshot, 0, "", width);
        let left_out = match tab {
            Tab::Decisions => snapshot.service.is_none(),
            Tab::Nodes => snapshot.nodes.len() < 2,
            Tab::Keys | Tab::Rules => false,
        };
        if left_out {
            continue;
        }
        let more = shown.rows.len().saturating_sub(MOST_ROWS);
        shown.rows.truncate(MOST_ROWS);
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        text += &format!("\n{} by {}{more}\n{}", tab.name(), shown.sorted_by, rows(&view, &shown, width));
    }
    text + &format!("\n{}\n", sampled(&snapshot.sample, width))
}

fn rows(view: &View<'_>, table: &Table, width: u16) -> String {
    let height = u16::try_from(table.rows.len()).unwrap_or(u16::MAX).saturating_add(1);
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    view.draw_table(table, 0, area, &mut buffer);
    let line = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
    let lines = buffer.content().chunks(usize::from(width.max(1))).map(line);
    let lines: String = lines.map(|line| format!("{}\n", line.trim_end())).collect();
    // A message takes one line.
    format!("{}\n", lines.trim_end())
}
