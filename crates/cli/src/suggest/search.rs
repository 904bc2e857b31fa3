//! Finds limits for each group of keys: windows first, since their needs show which rates are worth trying.

use anyhow::Result;
use tollgate::Algorithm;

use super::fit::fit;
use super::grid;
use super::meter::Meter;
use super::share::Bound;
use super::suggestion::{Kind, Suggestion};
use super::traffic::{Group, Traffic};
use super::trial::{Heaviest, Trial};

/// What is suggested for some groups: for each in order, what to paste, the frontier, and windows of other periods.
pub(super) fn search(
    traffic: &mut Traffic,
    groups: &[usize],
    bound: Bound,
    period_us: Option<u64>,
) -> Result<Vec<Suggestion>> {
    let Traffic { spool, keys, groups: all, .. } = traffic;
    let totals = totals(keys.iter().map(|key| (key.group, key.units)), all, bound);
    let mut windows: Vec<_> = groups
        .iter()
        .flat_map(|at| windows(&all[*at], period_us).into_iter().map(|meter| trial(*at, &all[*at], meter, bound)))
        .collect();
    fit(spool, keys, all, &mut windows, bound)?;
    let plans: Vec<_> = groups.iter().map(|at| Plan::new(*at, &all[*at], &windows, totals[*at], period_us)).collect();
    let mut buckets: Vec<_> = plans
        .iter()
        .flat_map(|plan| plan.buckets.iter().map(|meter| trial(plan.group, &all[plan.group], meter.clone(), bound)))
        .collect();
    fit(spool, keys, all, &mut buckets, bound)?;
    Ok(plans.iter().flat_map(|plan| plan.suggestions(&windows, &buckets)).collect())
}

/// What to try for a group.
struct Plan {
    group: usize,
    /// Of the rates, and of the windows to paste.
    period_us: u64,
    buckets: Vec<Meter>,
    /// The only algorithm to suggest.
    only: Option<Algorithm>,
    /// Whether windows of other periods are suggested too.
    others: bool,
}

impl Plan {
    /// `total` is enough units for each key that may not be hit, over all of the traffic.
    fn new(at: usize, group: &Group, windows: &[Trial], total: u64, asked: Option<u64>) -> Self {
        let present = group.present.as_ref().map(|present| Meter::of(&present.limit));
        let fixed = |trial: &&Trial| trial.group == at && trial.meter.algorithm == Algorithm::FixedWindow;
        let needed = windows.iter().filter(fixed).filter_map(|trial| Some((trial.meter.period_us, trial.units?)));
        let mut needed: Vec<_> = needed.collect();
        let period_us = match (&present, asked) {
            (Some(Some(meter)), _) => meter.period_us,
            (_, Some(period)) => period,
            _ => grid::main_period(&needed),
        };
        needed.push((group.span_us().max(1), total));
        let as_buckets = present.as_ref().is_none_or(|meter| meter.as_ref().is_some_and(Meter::is_bucket));
        let rates = if as_buckets { grid::rates(period_us, &needed) } else { Vec::new() };
        let buckets = rates.iter().map(|rate| Meter::bucket(*rate, period_us));
        let only = present.flatten().map(|meter| meter.algorithm);
        Self { group: at, period_us, buckets: buckets.collect(), only, others: only.is_none() && asked.is_none() }
    }

    fn suggestions(&self, windows: &[Trial], buckets: &[Trial]) -> Vec<Suggestion> {
        let of_group = |trial: &&Trial| trial.group == self.group;
        let found: Vec<_> = buckets.iter().filter(of_group).filter(|trial| trial.limit().is_some()).collect();
        let points: Vec<_> = found.iter().filter_map(|trial| Some((trial.meter.rate, trial.units?))).collect();
        let (frontier, knee) = grid::frontier(&points);
        let at =
            |point: &(u64, u64)| found.iter().find(|trial| trial.meter.rate == point.0).map(|trial| (*trial).clone());
        let mut suggestions = Vec::new();
        if let Some(best) = frontier.get(knee).and_then(at) {
            suggestions.extend(Suggestion::of(best, Kind::Recommended));
        }
        let shown = |trial: &&Trial| of_group(trial) && self.only.is_none_or(|only| only == trial.meter.algorithm);
        let windows = windows.iter().filter(shown).cloned();
        let (here, other): (Vec<_>, Vec<_>) = windows.partition(|trial| trial.meter.period_us == self.period_us);
        suggestions.extend(here.into_iter().filter_map(|trial| Suggestion::of(trial, Kind::Recommended)));
        let frontier = frontier.iter().filter_map(at);
        suggestions.extend(frontier.filter_map(|trial| Suggestion::of(trial, Kind::Frontier)));
        let other = other.into_iter().filter(|_| self.others);
        suggestions.extend(other.filter_map(|trial| Suggestion::of(trial, Kind::OtherPeriod)));
        suggestions
    }
}

fn trial(at: usize, group: &Group, meter: Meter, bound: Bound) -> Trial {
    Trial::new(at, meter, bound.of(group.requests, group.keys).min(group.keys))
}

/// The windows to try for a group.
fn windows(group: &Group, asked: Option<u64>) -> Vec<Meter> {
    match group.present.as_ref().map(|present| Meter::of(&present.limit)) {
        None => {
            let periods = grid::periods(asked, group.span_us());
            let around =
                asked.map(grid::around).into_iter().flatten().filter(|meter| !periods.contains(&meter.period_us));
            let around: Vec<_> = around.collect();
            periods.into_iter().flat_map(grid::windows).chain(around).collect()
        }
        Some(None) => Vec::new(),
        // They only tell which rates to try.
        Some(Some(meter)) if meter.is_bucket() => grid::around(meter.period_us).collect(),
        Some(Some(meter)) => vec![meter],
    }
}

/// For each group, enough units for each key that may not be hit, over all of the traffic.
fn totals(units: impl Iterator<Item = (usize, u64)>, groups: &[Group], bound: Bound) -> Vec<u64> {
    let may_be_hit = |group: &Group| bound.of(group.requests, group.keys).min(group.keys);
    let mut heaviest: Vec<_> = groups.iter().map(|group| Heaviest::new(may_be_hit(group))).collect();
    units.for_each(|(group, units)| heaviest[group].add(units, 0));
    let but = |(mut heaviest, group): (Heaviest, &Group)| {
        heaviest.end();
        heaviest.but(may_be_hit(group))
    };
    heaviest.into_iter().zip(groups).map(but).collect()
}
