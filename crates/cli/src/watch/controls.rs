//! What the user has chosen to see: which table, how it is sorted, filtered and scrolled, and whether it is paused.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tab {
    #[default]
    Keys,
    Rules,
    Decisions,
    Nodes,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Controls {
    pub(super) tab: Tab,
    /// The number of the sort order in each table.
    sorts: [usize; 4],
    pub(super) filter: String,
    /// Whether keys are letters of the filter.
    pub(super) typing: bool,
    /// The first row that is shown.
    pub(super) first: usize,
    pub(super) paused: bool,
    pub(super) help: bool,
    pub(super) quit: bool,
}

/// The keys, and what they do.
pub(super) const HELP: [(&str, &str); 12] = [
    ("q", "quit (also Ctrl-C)"),
    ("p, space", "pause or resume"),
    ("s", "sort by the next column"),
    ("/", "only rows that contain a text"),
    ("Esc", "show all rows again"),
    ("Tab, 1-4", "another table"),
    ("j k, arrows", "scroll by a row"),
    ("PgUp PgDn g G", "scroll by a page, to either end"),
    ("?", "this help"),
    ("touched", "share of samples that found it in use"),
    ("writes", "calls that were allowed: denied ones write nothing"),
    ("", "touched without writes: its calls are denied"),
];
const LONGEST_FILTER: usize = 64;
/// Rows that a page scrolls.
const PAGE: usize = 10;

impl Tab {
    pub(super) const ALL: [Self; 4] = [Self::Keys, Self::Rules, Self::Decisions, Self::Nodes];

    pub(super) fn name(self) -> &'static str {
        ["keys", "rules", "decisions", "nodes"][self as usize]
    }

    fn next(self, back: bool) -> Self {
        let step = if back { Self::ALL.len() - 1 } else { 1 };
        Self::ALL[(self as usize + step) % Self::ALL.len()]
    }
}

impl Controls {
    pub(super) fn sort(&self, tab: Tab) -> usize {
        self.sorts[tab as usize]
    }

    /// Keeps the first row within this many rows.
    pub(super) fn settle(&mut self, rows: usize) {
        self.first = self.first.min(rows.saturating_sub(1));
    }

    pub(super) fn press(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            self.quit = true;
        } else if self.typing {
            self.type_filter(key.code, control);
        } else if self.help {
            self.help = false;
        } else if !control {
            self.choose(key.code);
        }
    }

    fn choose(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char('q') => self.quit = true,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('s') => self.sorts[self.tab as usize] += 1,
            KeyCode::Char('/') => (self.typing, self.first) = (true, 0),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('?') | KeyCode::F(1) => self.help = true,
            KeyCode::Tab | KeyCode::Right | KeyCode::Char('l') => self.show(self.tab.next(false)),
            KeyCode::BackTab | KeyCode::Left | KeyCode::Char('h') => self.show(self.tab.next(true)),
            KeyCode::Char(digit @ '1'..='4') => self.show(Tab::ALL[digit as usize - '1' as usize]),
            KeyCode::Char('j') | KeyCode::Down => self.first += 1,
            KeyCode::Char('k') | KeyCode::Up => self.first = self.first.saturating_sub(1),
            KeyCode::PageDown => self.first += PAGE,
            KeyCode::PageUp => self.first = self.first.saturating_sub(PAGE),
            KeyCode::Char('g') | KeyCode::Home => self.first = 0,
            // Later limited by the number of rows.
            KeyCode::Char('G') | KeyCode::End => self.first = usize::MAX / 2,
            _ => {}
        }
    }

    fn show(&mut self, tab: Tab) {
        (self.tab, self.first) = (tab, 0);
    }

    fn type_filter(&mut self, code: KeyCode, control: bool) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Char('u') if control => self.filter.clear(),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(character) if !control && self.filter.chars().count() < LONGEST_FILTER => {
                self.filter.push(character);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressed(controls: &mut Controls, keys: &[KeyCode]) {
        keys.iter().for_each(|code| controls.press(KeyEvent::new(*code, KeyModifiers::NONE)));
    }

    #[test]
    fn each_key_does_what_the_help_says() {
        let mut controls = Controls::default();
        pressed(&mut controls, &[KeyCode::Char('p'), KeyCode::Char('s'), KeyCode::Char('s')]);
        assert_eq!((controls.paused, controls.sort(Tab::Keys), controls.sort(Tab::Rules)), (true, 2, 0));
        pressed(&mut controls, &[KeyCode::Char(' '), KeyCode::Tab, KeyCode::Char('s')]);
        assert_eq!((controls.paused, controls.tab, controls.sort(Tab::Rules)), (false, Tab::Rules, 1));
        pressed(&mut controls, &[KeyCode::BackTab, KeyCode::BackTab]);
        assert_eq!(controls.tab, Tab::Nodes);
        pressed(&mut controls, &[KeyCode::Char('3'), KeyCode::Char('?')]);
        assert_eq!((controls.tab, controls.help), (Tab::Decisions, true));
        pressed(&mut controls, &[KeyCode::Char('q')]);
        assert_eq!((controls.help, controls.quit), (false, false), "any key ends the help");
        pressed(&mut controls, &[KeyCode::Char('q')]);
        assert!(controls.quit);
    }

    #[test]
    fn while_a_filter_is_typed_keys_are_its_letters() {
        let mut controls = Controls::default();
        pressed(&mut controls, &[KeyCode::Char('/'), KeyCode::Char('q'), KeyCode::Char('s'), KeyCode::Char('x')]);
        pressed(&mut controls, &[KeyCode::Backspace, KeyCode::Enter]);
        assert_eq!((controls.filter.as_str(), controls.typing, controls.quit), ("qs", false, false));
        pressed(&mut controls, &[KeyCode::Esc]);
        assert_eq!(controls.filter, "");
        pressed(&mut controls, &[KeyCode::Char('/')]);
        pressed(&mut controls, &[KeyCode::Char('x'); 200]);
        assert_eq!(controls.filter.len(), LONGEST_FILTER);
        pressed(&mut controls, &[KeyCode::Esc]);
        assert_eq!((controls.filter.as_str(), controls.typing), ("", false));
    }

    #[test]
    fn control_c_quits_whatever_is_on() {
        for before in ['/', '?', 'p'] {
            let mut controls = Controls::default();
            pressed(&mut controls, &[KeyCode::Char(before)]);
            controls.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
            assert!(controls.quit, "{before}");
        }
    }

    #[test]
    fn rows_are_scrolled_as_far_as_there_are_any() {
        let mut controls = Controls::default();
        pressed(&mut controls, &[KeyCode::Up, KeyCode::Char('G')]);
        controls.settle(30);
        assert_eq!(controls.first, 29);
        pressed(&mut controls, &[KeyCode::PageUp, KeyCode::Char('k'), KeyCode::Char('j')]);
        assert_eq!(controls.first, 19);
        controls.settle(0);
        assert_eq!(controls.first, 0);
    }
}
