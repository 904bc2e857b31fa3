//! The descriptors of a configuration, as written.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::super::account::Account;
use super::super::fault::{Fault, expected, fault, quoted};
use super::super::yaml::{Entry, Node};

/// Envoy's service counts in 32-bit numbers.
const MOST: u64 = u32::MAX as u64;

/// The units with their seconds, counted from 1970.
const UNITS: [(&str, u64); 7] = [
    ("second", 1),
    ("minute", 60),
    ("hour", 3600),
    ("day", 86_400),
    ("week", 7 * 86_400),
    ("month", 30 * 86_400),
    ("year", 365 * 86_400),
];

const METRICS: &str = "is about metrics, and rules have their own";

#[derive(Debug)]
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) descriptors: Vec<Descriptor>,
}

#[derive(Debug)]
pub(super) struct Descriptor {
    /// Its own lines, without those of its descriptors.
    pub(super) lines: RangeInclusive<usize>,
    pub(super) key: String,
    /// Empty for any value.
    pub(super) value: String,
    pub(super) limit: Option<Limit>,
    pub(super) shadow: bool,
    pub(super) descriptors: Vec<Descriptor>,
}

#[derive(Debug)]
pub(super) struct Limit {
    pub(super) line: usize,
    pub(super) rate: Rate,
    pub(super) name: String,
    pub(super) replaces: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Rate {
    Unlimited,
    /// Requests in each window of so many seconds.
    Per(u64, u64),
}

impl Descriptor {
    /// `message_type=marketing`
    pub(super) fn shown(&self) -> String {
        if self.value.is_empty() { quoted(&self.key) } else { format!("{}={}", quoted(&self.key), quoted(&self.value)) }
    }
}

pub(super) fn domain(document: &Node, account: &mut Account) -> Result<Domain, Fault> {
    let (mut name, mut descriptors) = (String::new(), Vec::new());
    for entry in document.entries("domain and descriptors")? {
        account.take(entry.line..=entry.line);
        match &*entry.key {
            "domain" => entry.node.text("the name of a domain")?.clone_into(&mut name),
            "descriptors" => descriptors = list(&entry.node, account)?,
            _ => return Err(unknown(entry, "domain or descriptors")),
        }
    }
    if name.is_empty() {
        return Err(fault(document.line, "domain is missing"));
    }
    Ok(Domain { name, descriptors })
}

fn unknown(entry: &Entry, known: &str) -> Fault {
    expected(entry.line, known, &entry.key)
}

fn list(node: &Node, account: &mut Account) -> Result<Vec<Descriptor>, Fault> {
    let all = node.items("a list of descriptors")?.iter().map(|item| descriptor(item, account));
    let all = all.collect::<Result<Vec<_>, _>>()?;
    let mut seen = BTreeSet::new();
    for one in &all {
        if !seen.insert((&one.key, &one.value)) {
            return Err(fault(*one.lines.start(), format!("{} is given twice in its list", one.shown())));
        }
    }
    Ok(all)
}

fn descriptor(node: &Node, account: &mut Account) -> Result<Descriptor, Fault> {
    let mut one = Descriptor {
        lines: node.line..=node.line,
        key: String::new(),
        value: String::new(),
        limit: None,
        shadow: false,
        descriptors: Vec::new(),
    };
    let mut own_end = node.line;
    for entry in node.entries("a descriptor")? {
        let all = entry.line..=entry.node.end.max(entry.line);
        if entry.key == "descriptors" {
            account.take(entry.line..=entry.line);
            one.descriptors = list(&entry.node, account)?;
            continue;
        }
        match &*entry.key {
            "key" => entry.node.text("the key of a descriptor")?.clone_into(&mut one.key),
            "value" if entry.node.is_null() => {}
            "value" => entry.node.text("the value of a descriptor")?.clone_into(&mut one.value),
            "rate_limit" if entry.node.is_null() => {}
            "rate_limit" => one.limit = Some(limit(&entry.node, account)?),
            "shadow_mode" => one.shadow = entry.node.switch("true or false")?,
            "detailed_metric" | "value_to_metric" => account.leave(all.clone(), METRICS),
            "share_threshold" | "quota_mode" => refused(entry, account)?,
            _ => return Err(unknown(entry, "a field of a descriptor")),
        }
        match &*entry.key {
            "detailed_metric" | "value_to_metric" | "share_threshold" | "quota_mode" => {}
            "rate_limit" => account.take(entry.line..=entry.line),
            _ => account.take(all.clone()),
        }
        own_end = own_end.max(*all.end());
    }
    if one.key.is_empty() {
        return Err(fault(node.line, "key is missing"));
    }
    one.lines = node.line..=own_end;
    Ok(one)
}

/// Fields of newer versions of the service, which a rule can't express.
fn refused(entry: &Entry, account: &mut Account) -> Result<(), Fault> {
    let lines = entry.line..=entry.node.end;
    if !entry.node.switch("true or false")? {
        account.take(lines);
        return Ok(());
    }
    let why = match &*entry.key {
        "share_threshold" => "share_threshold: each value is counted by itself here",
        _ => "quota_mode: over its quota, a request is denied here",
    };
    account.lose(lines, why);
    Ok(())
}

fn limit(node: &Node, account: &mut Account) -> Result<Limit, Fault> {
    let (mut requests, mut unit, mut unlimited) = (None, None, false);
    let mut limit = Limit { line: node.line, rate: Rate::Unlimited, name: String::new(), replaces: Vec::new() };
    for entry in node.entries("a rate_limit with unit and requests_per_unit")? {
        account.take(entry.line..=entry.node.end);
        match &*entry.key {
            "requests_per_unit" => requests = Some(entry.node.number("a number of requests up to 4294967295", MOST)?),
            "unit" => unit = Some((entry.line, seconds(&entry.node)?)),
            "unlimited" => unlimited = entry.node.switch("true or false")?,
            "name" => entry.node.text("the name of a limit")?.clone_into(&mut limit.name),
            "replaces" => limit.replaces = replaces(&entry.node)?,
            _ => return Err(unknown(entry, "unit, requests_per_unit, unlimited, name or replaces")),
        }
    }
    account.take(node.line..=node.line);
    limit.rate = match (unlimited, unit) {
        (true, None) => Rate::Unlimited,
        (true, Some((line, _))) => return Err(fault(line, "unit and unlimited exclude each other")),
        (false, Some((_, seconds))) => Rate::Per(requests.unwrap_or(0), seconds),
        (false, None) => return Err(fault(node.line, "unit is missing")),
    };
    if limit.replaces.contains(&limit.name) {
        return Err(fault(node.line, "replaces names the limit itself"));
    }
    Ok(limit)
}

fn seconds(node: &Node) -> Result<u64, Fault> {
    let what = "a unit: second, minute, hour, day, week, month or year";
    let unit = node.text(what)?;
    let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
    known.map(|(_, seconds)| *seconds).ok_or_else(|| expected(node.line, what, unit))
}

fn replaces(node: &Node) -> Result<Vec<String>, Fault> {
    let name = |item: &Node| {
        let entries = item.entries("the name of a limit to replace")?;
        let entry = entries.iter().find(|entry| entry.key == "name");
        let entry = entry.ok_or_else(|| fault(item.line, "the name of the limit to replace is missing"))?;
        Ok(entry.node.text("the name of a limit to replace")?.to_owned())
    };
    node.items("a list of limits to replace")?.iter().map(name).collect()
}
