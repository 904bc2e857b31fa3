//! limitador's limits: all whose conditions hold and whose variables are present apply together, all or nothing.

mod condition;

use std::collections::{BTreeMap, BTreeSet};

use super::attribute::{Attributes, literal};
use super::draft::{Does, Names, Rule, period};
use super::fault::{Fault, expected, fault, quoted};
use super::yaml::{Entry, Node};
use super::{Imported, yaml};
use condition::{Condition, conditions, variable};

/// The largest count in tollgate.
const MOST: u64 = (1 << 53) - 1;

/// A century.
const LONGEST: u64 = 36_525 * 86_400;

const ABOUT: &str = "Every rule matches on the attribute domain, which stands for the namespace: have the service set \
                     it, or delete it from each match.";

/// A limit as written in the source.
#[derive(Debug, Default)]
struct Limit {
    namespace: String,
    max_value: Option<u64>,
    seconds: Option<u64>,
    name: String,
    conditions: Vec<(usize, String)>,
    variables: Vec<(usize, String)>,
}

#[derive(Debug, Default)]
struct Translation {
    imported: Imported,
    attributes: Attributes,
    names: Names,
}

pub(super) fn translated(text: &str) -> Result<Imported, Fault> {
    let mut translation = Translation::default();
    for document in yaml::documents(text)? {
        for item in document.items("a list of limits")? {
            let limit = translation.read(item)?;
            translation.limit(item, &limit)?;
        }
    }
    let mut imported = translation.imported;
    // Blocking rules come after counting ones, so that each rule has requests of its own.
    imported.rules.sort_by_key(|rule| rule.does == Does::Block);
    imported.uncover();
    imported.about.push(ABOUT.to_owned());
    let renamed = translation.attributes.renamed();
    if !renamed.is_empty() {
        imported.about.push(format!("Attributes with another name than their variable: {renamed}."));
    }
    Ok(imported)
}

impl Translation {
    fn read(&mut self, item: &Node) -> Result<Limit, Fault> {
        let mut limit = Limit::default();
        let mut id = String::new();
        for entry in item.entries("a limit")? {
            let node = &entry.node;
            match &*entry.key {
                "namespace" => node.text("the name of a namespace")?.clone_into(&mut limit.namespace),
                "max_value" => limit.max_value = Some(node.number("a number of requests up to 2^53 - 1", MOST)?),
                "seconds" => {
                    let seconds = node.number("a whole number of seconds, at most a century", LONGEST)?;
                    if seconds == 0 {
                        return Err(expected(node.line, "at least a second", "0"));
                    }
                    limit.seconds = Some(seconds);
                }
                "name" if node.is_null() => {}
                "name" => node.text("the name of a limit")?.clone_into(&mut limit.name),
                "id" if node.is_null() => {}
                "id" => node.text("the id of a limit")?.clone_into(&mut id),
                "conditions" => limit.conditions = texts(node, "a list of conditions")?,
                "variables" => limit.variables = texts(node, "a list of variables")?,
                _ => {
                    self.unknown(entry);
                    continue;
                }
            }
            self.imported.account.take(entry.line..=node.end.max(entry.line));
        }
        if limit.name.is_empty() {
            limit.name = id;
        }
        Ok(limit)
    }

    fn unknown(&mut self, entry: &Entry) {
        let how = format!("{}: not a field of a limit", quoted(&entry.key));
        self.imported.account.lose(entry.line..=entry.node.end, &how);
    }

    fn limit(&mut self, item: &Node, limit: &Limit) -> Result<(), Fault> {
        let none = |field: &str| fault(item.line, format!("{field} is missing"));
        if limit.namespace.is_empty() {
            return Err(none("namespace"));
        }
        let max_value = limit.max_value.ok_or_else(|| none("max_value"))?;
        let seconds = limit.seconds.ok_or_else(|| none("seconds"))?;
        let mut rule = Rule { line: item.line, continues: true, ..Rule::default() };
        rule.must_have("domain", &limit.namespace);
        let said = self.say(&mut rule, limit)?.and_then(|()| match max_value {
            0 if !rule.deny() => Err((item.line, "no rule can deny all but some values".to_owned())),
            _ => Ok(()),
        });
        if let Err((line, why)) = said {
            // The whole limit is left out, with the reason at the line that causes it.
            self.imported.account.differ(line, &format!("{why}, so the limit is left out"));
            self.imported.account.leave(item.line..=item.end, "is part of a limit that is left out, see above");
            return Ok(());
        }
        rule.limit = format!("fixed-window {max_value}/{} start first-hit", period(seconds));
        rule.name = self.names.of(&self.wanted_name(&rule, limit));
        rule.comments.push(super::account::lines(&(item.line..=item.end)));
        self.imported.rules.push(rule);
        Ok(())
    }

    fn wanted_name(&self, rule: &Rule, limit: &Limit) -> String {
        if !limit.name.is_empty() {
            return limit.name.clone();
        }
        let conditions = rule.conditions.iter().flat_map(|(name, values)| {
            let name = (name != "domain").then_some(name);
            name.into_iter().chain(values)
        });
        let all: Vec<_> = conditions.chain(&rule.key).map(String::as_str).collect();
        all.join(".")
    }

    /// Adds conditions and variables, or returns the line that no rule can express, and why.
    fn say(&mut self, rule: &mut Rule, limit: &Limit) -> Result<Result<(), (usize, String)>, Fault> {
        let mut excepts = BTreeMap::<String, BTreeSet<String>>::new();
        for (line, text) in &limit.conditions {
            let Some(all) = conditions(text) else {
                return Ok(Err((*line, format!("{}: expected comparisons with == or !=, joined by &&", quoted(text)))));
            };
            for Condition { name, is_equal, value } in all {
                let attribute = self.attributes.of(&name);
                let Some(said) = literal(*line, &attribute, &value)? else {
                    return Ok(Err((*line, format!("{}: no condition can express this value", quoted(text)))));
                };
                if !is_equal {
                    excepts.entry(attribute).or_default().insert(value);
                } else if !rule.must_have(&attribute, &said) {
                    let why = "never holds together with the other conditions";
                    return Ok(Err((*line, format!("{}: {why}", quoted(text)))));
                }
            }
        }
        let mut variables = Vec::new();
        for (line, text) in &limit.variables {
            match variable(text.trim()) {
                Some((name, "")) => variables.push(self.attributes.of(&name)),
                _ => {
                    let why = "expected the name of a descriptor's entry, such as descriptors[0].user";
                    return Ok(Err((*line, format!("{}: {why}", quoted(text)))));
                }
            }
        }
        variables.sort();
        variables.dedup();
        let first_line = limit.conditions.first().map_or(0, |(line, _)| *line);
        let mut excepts = excepts.into_iter();
        match (excepts.next(), excepts.next()) {
            (None, _) => rule.key = variables,
            (Some((by, values)), None) => rule.count_all_but(&by, &values.into_iter().collect::<Vec<_>>(), variables),
            _ => return Ok(Err((first_line, "only one variable can have !=".to_owned()))),
        }
        Ok(Ok(()))
    }
}

fn texts(node: &Node, what: &str) -> Result<Vec<(usize, String)>, Fault> {
    let text = |item: &Node| Ok((item.line, item.text("a text")?.to_owned()));
    node.items(what)?.iter().map(text).collect()
}
