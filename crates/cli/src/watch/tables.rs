//! The tables: the columns that fit the width, and the rows in the chosen order.

use std::cmp::Ordering;

use ratatui::layout::Constraint;

use super::controls::Tab;
use super::figures::{age, bytes, count, percent, rate};
use super::snapshot::{Decisions, Key, Node, Rule, Snapshot};

#[derive(Debug)]
pub(super) struct Table {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<String>>,
    /// What the rows are sorted by.
    pub(super) sorted_by: &'static str,
    /// What is shown if there are none.
    pub(super) empty: String,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: Constraint,
    pub(super) is_number: bool,
}

/// From this width on, all columns fit.
const WIDE: u16 = 60;

/// The table, in the sort order of this number, with the rows that contain this text.
pub(super) fn table(tab: Tab, snapshot: &Snapshot, sort: usize, filter: &str, width: u16) -> Table {
    let mut table = match tab {
        Tab::Keys => keys(snapshot, sort, width),
        Tab::Rules => rules(snapshot, sort),
        Tab::Decisions => decisions(snapshot, sort, width),
        Tab::Nodes => nodes(snapshot, sort, width),
    };
    let filter = filter.to_lowercase();
    if !filter.is_empty() {
        table.rows.retain(|row| row.iter().any(|cell| cell.to_lowercase().contains(&filter)));
        table.empty = format!("no row contains {filter:?}");
    }
    table
}

fn keys(snapshot: &Snapshot, sort: usize, width: u16) -> Table {
    let (sorted_by, keys) = sorted(
        &snapshot.keys,
        sort,
        &[
            ("writes", |one: &Key, other: &Key| {
                by(other.writes_per_second, one.writes_per_second).then(other.touches().total_cmp(&one.touches()))
            }),
            ("touched", |one, other| {
                other.touches().total_cmp(&one.touches()).then(by(other.writes_per_second, one.writes_per_second))
            }),
            ("key", |one, other| one.key.cmp(&other.key)),
        ],
    );
    let frequency = snapshot.sample.touches == "freq";
    let touched = if frequency { "freq" } else { "touched" };
    let mut columns = vec![number("writes/s", 8), number(touched, 7), text("key", Constraint::Fill(1))];
    if width >= WIDE {
        columns.push(text("rule/limit", Constraint::Fill(1)));
    }
    let row = |key: &Key| {
        let shard = key.shard.map(|shard| format!(" (shard {shard})")).unwrap_or_default();
        let touched = match (frequency, key.freq) {
            (true, freq) => freq.map_or_else(|| "-".to_owned(), |freq| freq.to_string()),
            (false, _) => percent(key.touched_share),
        };
        vec![rate(key.writes_per_second), touched, format!("{}{shard}", key.key), key.of.text()]
    };
    let sample = &snapshot.sample;
    let empty = match (&sample.no_writes, &sample.no_scan) {
        (Some(_), Some(why)) => format!("keys can't be scanned: {why}"),
        _ => "no key in use was seen so far".to_owned(),
    };
    Table { columns, rows: keys.into_iter().map(row).collect(), sorted_by, empty }
}

fn rules(snapshot: &Snapshot, sort: usize) -> Table {
    let (sorted_by, rules) = sorted(
        &snapshot.rules,
        sort,
        &[
            ("writes", |one: &Rule, other: &Rule| {
                by(other.writes_per_second, one.writes_per_second).then(other.keys.cmp(&one.keys))
            }),
            ("keys", |one, other| other.keys.cmp(&one.keys)),
            ("rule", |one, other| one.of.cmp(&other.of)),
        ],
    );
    let columns = vec![number("writes/s", 8), number("keys", 10), text("rule/limit", Constraint::Fill(1))];
    let is_estimate = !snapshot.sample.complete;
    let row = |rule: &Rule| {
        let keys = rule
            .keys
            .map_or_else(|| "-".to_owned(), |keys| format!("{}{}", if is_estimate { "~" } else { "" }, count(keys)));
        vec![rate(rule.writes_per_second), keys, rule.of.text()]
    };
    Table { columns, rows: rules.into_iter().map(row).collect(), sorted_by, empty: "no key was seen so far".to_owned() }
}

fn decisions(snapshot: &Snapshot, sort: usize, width: u16) -> Table {
    let none = Vec::new();
    let all = snapshot.service.as_ref().map_or(&none, |service| &service.decisions);
    let (sorted_by, decisions) = sorted(
        all,
        sort,
        &[
            ("rate", |one: &Decisions, other: &Decisions| by(other.per_second, one.per_second)),
            ("rule", |one, other| (&one.rule, &one.outcome).cmp(&(&other.rule, &other.outcome))),
            ("outcome", |one, other| one.outcome.cmp(&other.outcome).then(by(other.per_second, one.per_second))),
            ("source", |one, other| one.source.cmp(&other.source).then(by(other.per_second, one.per_second))),
        ],
    );
    let mut columns =
        vec![number("/s", 9), text("outcome", Constraint::Length(7)), text("source", Constraint::Length(12))];
    columns.push(text("rule", Constraint::Fill(1)));
    if width >= WIDE {
        columns.push(text("algorithm", Constraint::Length(22)));
        columns.push(number("so far", 13));
    }
    let row = |one: &Decisions| {
        let rule = if one.rule.is_empty() { "(unnamed)" } else { &one.rule };
        let so_far = count(one.total.max(0.0) as u64);
        vec![
            rate(one.per_second),
            one.outcome.clone(),
            one.source.clone(),
            rule.to_owned(),
            one.algorithm.clone(),
            so_far,
        ]
    };
    let empty = match &snapshot.service {
        None => "no --metrics URL of a service was given",
        Some(_) => "no decision was counted so far",
    };
    Table { columns, rows: decisions.into_iter().map(row).collect(), sorted_by, empty: empty.to_owned() }
}

fn nodes(snapshot: &Snapshot, sort: usize, width: u16) -> Table {
    fn figure(node: &Node, of: fn(&super::snapshot::Figures) -> Option<f64>) -> Option<f64> {
        node.figures.as_ref().and_then(of)
    }
    let (sorted_by, nodes) = sorted(
        &snapshot.nodes,
        sort,
        &[
            ("address", |one: &Node, other: &Node| one.address.cmp(&other.address)),
            ("scripts", |one, other| {
                let scripts = |node| figure(node, |figures| figures.script_calls_per_second);
                by(scripts(other), scripts(one))
            }),
            ("memory", |one, other| {
                let memory = |node| figure(node, |figures| Some(figures.used_memory as f64));
                by(memory(other), memory(one))
            }),
        ],
    );
    let mut columns = vec![text("node", Constraint::Fill(1)), number("scripts/s", 9), number("cpu", 5)];
    if width >= WIDE {
        columns.extend([number("memory", 12), number("keys", 11), number("evicted/s", 9), number("up", 4)]);
    }
    let row = |node: &Node| match (&node.figures, &node.error) {
        (Some(figures), None) => vec![
            node.address.clone(),
            rate(figures.script_calls_per_second),
            percent(figures.cpu_share),
            bytes(figures.used_memory),
            count(figures.keys),
            rate(figures.evicted_per_second),
            age(figures.uptime_seconds),
        ],
        (_, why) => vec![format!("{}: {}", node.address, why.as_deref().unwrap_or("not queried yet"))],
    };
    Table { columns, rows: nodes.into_iter().map(row).collect(), sorted_by, empty: "no node is known".to_owned() }
}

type Order<T> = (&'static str, fn(&T, &T) -> Ordering);

/// The rows in one of these orders, and its name. The sort is stable.
fn sorted<'a, T>(all: &'a [T], sort: usize, orders: &[Order<T>]) -> (&'static str, Vec<&'a T>) {
    let (name, order) = orders[sort % orders.len()];
    let mut all: Vec<_> = all.iter().collect();
    all.sort_by(|one, other| order(one, other));
    (name, all)
}

fn by(one: Option<f64>, other: Option<f64>) -> Ordering {
    one.unwrap_or(-1.0).total_cmp(&other.unwrap_or(-1.0))
}

fn number(title: &'static str, width: u16) -> Column {
    Column { title, width: Constraint::Length(width), is_number: true }
}

fn text(title: &'static str, width: Constraint) -> Column {
    Column { title, width, is_number: false }
}

#[cfg(test)]
mod tests {
    use super::super::key_name::Label;
    use super::*;

    fn key(name: &str, writes: f64, touched: f64) -> Key {
        Key {
            key: name.into(),
            shard: None,
            of: Label { under: None, rule: "api".into(), limit: Some("token-bucket-1s".into()) },
            writes_per_second: Some(writes),
            touched_share: Some(touched),
            freq: None,
        }
    }

    fn names(table: &Table) -> Vec<&str> {
        table.rows.iter().map(|row| row[2].as_str()).collect()
    }

    #[test]
    fn keys_are_sorted_by_each_order_in_turn() {
        let keys = vec![key("b", 5.0, 0.1), key("c", 9.0, 0.5), key("a", 0.0, 1.0)];
        let snapshot = Snapshot { keys, ..Snapshot::default() };
        let sorted = |sort| table(Tab::Keys, &snapshot, sort, "", 80);
        assert_eq!((names(&sorted(0)), sorted(0).sorted_by), (vec!["c", "b", "a"], "writes"));
        assert_eq!((names(&sorted(1)), sorted(1).sorted_by), (vec!["a", "c", "b"], "touched"));
        assert_eq!((names(&sorted(2)), sorted(2).sorted_by), (vec!["a", "b", "c"], "key"));
        assert_eq!(sorted(3).sorted_by, "writes");
    }

    #[test]
    fn a_filter_keeps_rows_with_its_text_in_any_case_and_in_any_column() {
        let keys = vec![key("User:1", 5.0, 0.1), key("org:2", 9.0, 0.5)];
        let snapshot = Snapshot { keys, ..Snapshot::default() };
        assert_eq!(names(&table(Tab::Keys, &snapshot, 0, "uSER", 80)), ["User:1"]);
        assert_eq!(
            table(Tab::Keys, &snapshot, 0, "api/token-bucket", 40).rows.len(),
            2,
            "also what is too narrow to show"
        );
        let none = table(Tab::Keys, &snapshot, 0, "x\u{1b}y", 80);
        assert_eq!((none.rows.len(), none.empty.as_str()), (0, "no row contains \"x\\u{1b}y\""));
    }

    #[test]
    fn every_order_of_every_table_takes_numbers_that_are_missing() {
        let nodes = vec![Node::default(), Node { address: "x".into(), error: Some("away".into()), figures: None }];
        let service =
            super::super::snapshot::Service { decisions: vec![Decisions::default(); 2], ..Default::default() };
        let of = Label { under: None, rule: "api".into(), limit: None };
        let rule = Rule { of, writes_per_second: None, keys: None };
        let unknown = Key { writes_per_second: None, touched_share: None, ..key("k", 0.0, 0.0) };
        let snapshot = Snapshot {
            nodes,
            service: Some(service),
            rules: vec![rule; 2],
            keys: vec![unknown; 2],
            ..Snapshot::default()
        };
        for tab in Tab::ALL {
            for sort in 0..5 {
                assert_eq!(table(tab, &snapshot, sort, "", 40).rows.len(), 2, "{tab:?}");
            }
        }
    }
}
