//! The lines above the tables: the server, its memory, its scripts, and the service.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::figures::{age, bytes, count, micros, percent, rate};
use super::snapshot::{Figures, Node, Service, Snapshot};
use crate::output::{bars, counted};

/// Rates of the last intervals, the latest last.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    pub(super) scripts: Vec<f64>,
    pub(super) decisions: Vec<f64>,
}

/// The styles in use; without colours under NO_COLOR.
#[derive(Clone, Copy, Debug)]
pub(super) struct Theme {
    pub(super) colours: bool,
}

/// A name, and pieces that lines are broken between.
#[derive(Debug)]
pub(super) struct Group {
    name: &'static str,
    pieces: Vec<Span<'static>>,
}

/// The width of names.
const NAMES: usize = 10;
const BARS: usize = 20;
const MOST_HISTORY: usize = 120;

impl History {
    pub(super) fn add(&mut self, snapshot: &Snapshot) {
        let service = snapshot.service.as_ref();
        let last = [
            (&mut self.scripts, snapshot.scripts.calls_per_second),
            (&mut self.decisions, service.and_then(|service| service.decisions_per_second)),
        ];
        for (numbers, last) in last {
            numbers.push(last.unwrap_or(0.0));
            let surplus = numbers.len().saturating_sub(MOST_HISTORY);
            numbers.drain(..surplus);
        }
    }
}

impl Theme {
    pub(super) fn wrong(self) -> Style {
        if self.colours { Style::new().fg(Color::Red) } else { Style::new().add_modifier(Modifier::BOLD) }
    }

    pub(super) fn quiet(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(super) fn name(self) -> Style {
        if self.colours { Style::new().fg(Color::Cyan) } else { Style::new() }
    }

    pub(super) fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

/// The most important first.
pub(super) fn groups(snapshot: &Snapshot, history: &History, theme: Theme) -> Vec<Group> {
    let mut groups = vec![redis(snapshot, theme)];
    let all: Vec<_> = snapshot.nodes.iter().filter_map(|node| node.figures.as_ref()).collect();
    if !all.is_empty() {
        groups.extend([scripts(snapshot, history), memory(&all, theme)]);
    }
    if let Some(service) = &snapshot.service {
        groups.extend(of_service(service, history, theme));
    }
    groups
}

/// Lines of this width, each group with its name before its first line.
pub(super) fn lines(groups: Vec<Group>, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    for Group { name, pieces } in groups {
        let mut line = vec![Span::styled(format!("{name:<NAMES$}"), theme.name())];
        let mut used = NAMES;
        for piece in pieces {
            let length = piece.width();
            if used > NAMES && used + 2 + length > width {
                lines.push(Line::from(std::mem::take(&mut line)));
                line.push(Span::raw(" ".repeat(NAMES)));
                used = NAMES;
            } else if used > NAMES {
                line.push(Span::raw("  "));
                used += 2;
            }
            used += length;
            line.push(piece);
        }
        lines.push(Line::from(line));
    }
    lines
}

fn redis(snapshot: &Snapshot, theme: Theme) -> Group {
    let mut pieces = Vec::new();
    if let [Node { address, figures, .. }] = snapshot.nodes.as_slice() {
        pieces.push(Span::raw(address.clone()));
        if let Some(figures) = figures {
            pieces.push(Span::raw(figures.version.clone()));
            if figures.role != "master" {
                pieces.push(Span::styled(format!("a {}", figures.role.replace("slave", "replica")), theme.wrong()));
            }
            pieces.push(Span::raw(format!("up {}", age(figures.uptime_seconds))));
            if figures.restarted {
                pieces.push(Span::styled("restarted", theme.wrong()));
            }
        }
    } else {
        pieces.push(Span::raw(format!("{} nodes", snapshot.nodes.len())));
    }
    let mut away = snapshot.nodes.iter().filter_map(|node| Some((node, node.error.as_ref()?)));
    if let Some((node, why)) = away.next() {
        let of = if snapshot.nodes.len() > 1 { format!("{}: ", node.address) } else { String::new() };
        let more = match away.count() {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        pieces.push(Span::styled(format!("error: {of}{why}{more}"), theme.wrong()));
    }
    let all: Vec<_> = snapshot.nodes.iter().filter_map(|node| node.figures.as_ref()).collect();
    if !all.is_empty() {
        let most = |of: fn(&Figures) -> Option<f64>| all.iter().filter_map(|figures| of(figures)).reduce(f64::max);
        let commands = sum(&all, |figures| figures.commands_per_second);
        let errors = sum(&all, |figures| figures.errors_per_second);
        pieces.push(Span::raw(format!("{} commands/s", rate(commands))));
        pieces.push(Span::raw(format!("cpu {}", percent(most(|figures| figures.cpu_share)))));
        if errors.is_some_and(|errors| errors > 0.0) {
            pieces.push(Span::styled(format!("{} errors/s", rate(errors)), theme.wrong()));
        }
        pieces.push(Span::styled(format!("watching {}", percent(most(|figures| figures.watch_share))), theme.quiet()));
    }
    Group { name: "redis", pieces }
}

fn scripts(snapshot: &Snapshot, history: &History) -> Group {
    let scripts = &snapshot.scripts;
    let mut pieces = vec![
        Span::raw(format!("{} calls/s", rate(scripts.calls_per_second))),
        Span::raw(format!("{} each", micros(scripts.us_per_call))),
        Span::raw(format!("{} of a core", percent(scripts.core_share))),
    ];
    let others = scripts.by_command.iter().filter(|command| command.command != "evalsha");
    pieces.extend(
        others.map(|command| Span::raw(format!("{} {}/s", command.command, rate(Some(command.calls_per_second))))),
    );
    if let [Node { figures: Some(figures), .. }] = snapshot.nodes.as_slice()
        && figures.evalsha_p50_us.is_some()
    {
        let (p50, p99) = (micros(figures.evalsha_p50_us), micros(figures.evalsha_p99_us));
        pieces.push(Span::raw(format!("p50 {p50} p99 {p99}")));
    }
    pieces.extend(bars_of(&history.scripts));
    Group { name: "scripts", pieces }
}

fn memory(all: &[&Figures], theme: Theme) -> Group {
    let total = |of: fn(&Figures) -> u64| all.iter().map(|figures| of(figures)).sum::<u64>();
    let (used, most) = (total(|figures| figures.used_memory), total(|figures| figures.maxmemory));
    let mut pieces = Vec::new();
    if most > 0 {
        let share = used as f64 / most as f64;
        let style = if share > 0.9 { theme.wrong() } else { Style::new() };
        pieces.push(Span::styled(format!("{} of {} ({})", bytes(used), bytes(most), percent(Some(share))), style));
    } else {
        pieces.push(Span::raw(format!("{}, no maxmemory", bytes(used))));
    }
    pieces.push(Span::raw(all[0].maxmemory_policy.clone()));
    pieces.push(Span::raw(format!("{} keys", count(total(|figures| figures.keys)))));
    pieces.push(Span::raw(format!("{} expired/s", rate(sum(all, |figures| figures.expired_per_second)))));
    let (evicted, so_far) = (sum(all, |figures| figures.evicted_per_second), total(|figures| figures.evicted));
    let style = if evicted.is_some_and(|rate| rate > 0.0) { theme.wrong() } else { Style::new() };
    pieces.push(Span::styled(format!("{} evicted/s ({} so far)", rate(evicted), count(so_far)), style));
    Group { name: "memory", pieces }
}

fn of_service(service: &Service, history: &History, theme: Theme) -> Vec<Group> {
    let mut groups = Vec::new();
    let away: Vec<_> = service.endpoints.iter().filter_map(|one| Some((&one.url, one.error.as_ref()?))).collect();
    if let Some((url, why)) = away.first() {
        let more = if away.len() > 1 { format!(" (and {} more)", away.len() - 1) } else { String::new() };
        groups
            .push(Group { name: "metrics", pieces: vec![Span::styled(format!("{url}: {why}{more}"), theme.wrong())] });
        if away.len() == service.endpoints.len() {
            return groups;
        }
    }
    let by = |of: fn(&super::snapshot::Decisions) -> &String| {
        let mut sums: Vec<(&String, f64)> = Vec::new();
        for one in &service.decisions {
            let rate = one.per_second.unwrap_or(0.0);
            match sums.iter_mut().find(|(name, _)| *name == of(one)) {
                Some((_, sum)) => *sum += rate,
                None => sums.push((of(one), rate)),
            }
        }
        sums.sort_by(|one, other| one.0.cmp(other.0));
        sums
    };
    let mut pieces = vec![Span::raw(format!("{}/s", rate(service.decisions_per_second)))];
    for (outcome, of_it) in by(|one| &one.outcome) {
        let style = if outcome == "error" && of_it > 0.0 { theme.wrong() } else { Style::new() };
        pieces.push(Span::styled(format!("{outcome} {}", rate(Some(of_it))), style));
    }
    let sources = by(|one| &one.source).into_iter().map(|(source, of_it)| format!("{source} {}", rate(Some(of_it))));
    let sources = sources.collect::<Vec<_>>().join(", ");
    if !sources.is_empty() {
        pieces.push(Span::raw(format!("by {sources}")));
    }
    pieces.extend(bars_of(&history.decisions));
    groups.push(Group { name: "decisions", pieces });
    let latency = service
        .latency
        .iter()
        .map(|one| Span::raw(format!("{} p50 {} p99 {}", one.source, micros(one.p50_us), micros(one.p99_us))));
    let latency: Vec<_> = latency.collect();
    if !latency.is_empty() {
        groups.push(Group { name: "latency", pieces: latency });
    }
    let open = service.breakers_open.unwrap_or(0.0);
    let style = if open > 0.0 { theme.wrong() } else { Style::new() };
    let mut pieces = vec![
        Span::raw(format!("batches of {} keys, p99 {}", rate(service.batch_mean), rate(service.batch_p99))),
        Span::styled(format!("{} open", counted(open.max(0.0) as u64, "breaker")), style),
    ];
    if let Some(dropped) = service.background_dropped_per_second {
        pieces.push(Span::styled(format!("{} dropped/s", rate(Some(dropped))), theme.wrong()));
    }
    pieces.extend(service.errors.iter().map(|one| {
        let style = if one.per_second.is_some_and(|rate| rate > 0.0) { theme.wrong() } else { Style::new() };
        Span::styled(format!("{} {}/s", one.class, rate(one.per_second)), style)
    }));
    groups.push(Group { name: "client", pieces });
    groups
}

fn bars_of(numbers: &[f64]) -> Option<Span<'static>> {
    // A single interval has no history to draw.
    (numbers.len() > 1).then(|| Span::raw(bars(numbers.iter().copied(), BARS)))
}

fn sum(all: &[&Figures], of: fn(&Figures) -> Option<f64>) -> Option<f64> {
    all.iter().filter_map(|figures| of(figures)).reduce(|sum, one| sum + one)
}
