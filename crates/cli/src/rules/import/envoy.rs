//! The configuration of Envoy's rate limit service.
//!
//! A request carries lists of entries, and each list is looked up in the tree: level by level by its key and value,
//! then by the first value that ends in `*`, then by its key alone, without going back. The limit is that of the node
//! where the list ends. A rule's attributes are flat, so each request is taken to carry every list of which it has the
//! keys.

mod descriptor;

use super::account::lines;
use super::attribute::{Attributes, literal};
use super::draft::{Does, Names, Rule, period};
use super::fault::Fault;
use super::{Imported, yaml};
use descriptor::{Descriptor, Domain, Limit, Rate};

const ABOUT: [&str; 3] = [
    "In Envoy, the route says which descriptors a request carries; here, it carries each one for whose keys it has \
     attributes.",
    "Every rule matches on the attribute domain: have the service set it, or delete it from each match.",
    "All limits of a request are one decision: a request that one of them denies is counted by none, as Envoy's service \
     does with STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT.",
];

/// An entry on the way to a limit.
#[derive(Clone, Debug)]
struct Step {
    attribute: String,
    is: Is,
}

#[derive(Clone, Debug)]
enum Is {
    Exactly(String),
    /// Any path under a prefix, as a pattern.
    Under(String),
    Any,
}

/// Values of an attribute that take another way in the tree.
#[derive(Clone, Debug)]
struct Except {
    attribute: String,
    values: Vec<String>,
}

/// A way into the tree.
#[derive(Clone, Debug, Default)]
struct Way {
    steps: Vec<Step>,
    excepts: Vec<Except>,
    shown: Vec<String>,
    /// The keys so far, as the source has them.
    keys: Vec<String>,
}

/// A limit's rule, and its relation to others.
#[derive(Debug)]
struct Found {
    rule: Rule,
    line: usize,
    name: String,
    replaces: Vec<String>,
}

#[derive(Debug, Default)]
struct Translation {
    imported: Imported,
    attributes: Attributes,
    names: Names,
    found: Vec<Found>,
}

pub(super) fn translated(text: &str) -> Result<Imported, Fault> {
    let mut translation = Translation::default();
    for document in yaml::documents(text)? {
        let domain = descriptor::domain(&document, &mut translation.imported.account)?;
        translation.level(&domain, &domain.descriptors, &Way::default())?;
        translation.order();
    }
    let mut imported = translation.imported;
    imported.about.splice(..0, ABOUT.map(str::to_owned));
    let renamed = translation.attributes.renamed();
    if !renamed.is_empty() {
        imported.about.push(format!("Attributes with another name than their key: {renamed}."));
    }
    Ok(imported)
}

impl Translation {
    fn level(&mut self, domain: &Domain, descriptors: &[Descriptor], way: &Way) -> Result<(), Fault> {
        for descriptor in descriptors {
            let is_any = |other: &Descriptor| other.key == descriptor.key && other.value == "*";
            if descriptor.value.is_empty() && descriptors.iter().any(is_any) {
                let why = format!("{}=* is looked up before it, and matches every value", descriptor.shown());
                limited(descriptor).into_iter().for_each(|one| self.imported.account.leave(one.lines.clone(), &why));
                continue;
            }
            let attribute = self.attribute(way, &descriptor.key);
            let Some(is) = self.step(descriptor, &attribute)? else { continue };
            let mut way = way.clone();
            self.except(&mut way, descriptors, descriptor, &attribute);
            way.steps.push(Step { attribute, is });
            way.shown.push(descriptor.shown());
            way.keys.push(descriptor.key.clone());
            if let Some(limit) = &descriptor.limit {
                self.limit(domain, descriptor, limit, &way);
            } else if descriptor.descriptors.is_empty() {
                self.imported.about.push(format!(
                    "{} isn't limited ({}).",
                    way.shown.join(", "),
                    lines(&descriptor.lines)
                ));
            }
            self.level(domain, &descriptor.descriptors, &way)?;
        }
        Ok(())
    }

    /// A key that occurs twice on the way has two attributes.
    fn attribute(&mut self, way: &Way, key: &str) -> String {
        let before = way.keys.iter().filter(|other| *other == key).count();
        if before == 0 { self.attributes.of(key) } else { self.attributes.of(&format!("{key}.{}", before + 1)) }
    }

    /// The condition for a value; `None` if no rule can express it.
    fn step(&mut self, descriptor: &Descriptor, attribute: &str) -> Result<Option<Is>, Fault> {
        let value = &descriptor.value;
        Ok(match value.strip_suffix('*') {
            None if value.is_empty() => Some(Is::Any),
            Some("") => Some(Is::Any),
            Some(prefix) if attribute == "path" && prefix.starts_with('/') && prefix.ends_with('/') => {
                Some(Is::Under(value.clone()))
            }
            Some(_) => {
                self.lose(descriptor, "only a path has patterns, and they end in /*");
                None
            }
            None => {
                let said = literal(*descriptor.lines.start(), attribute, value)?;
                if said.is_none() {
                    self.lose(descriptor, "no condition can express this value");
                }
                said.map(Is::Exactly)
            }
        })
    }

    /// Notes that no rule can express a descriptor and everything within it.
    fn lose(&mut self, descriptor: &Descriptor, why: &str) {
        for one in limited(descriptor) {
            self.lose_limit(one, &format!("{}: {why}", descriptor.shown()));
        }
    }

    fn lose_limit(&mut self, descriptor: &Descriptor, why: &str) {
        self.imported.account.lose(descriptor.lines.clone(), &format!("{why}, so the limit is left out"));
    }

    /// Excludes the values of sibling descriptors that are looked up before this one.
    fn except(&mut self, way: &mut Way, beside: &[Descriptor], descriptor: &Descriptor, attribute: &str) {
        let prefix = if descriptor.value.is_empty() { Some("") } else { descriptor.value.strip_suffix('*') };
        let Some(prefix) = prefix else { return };
        let others = beside.iter().filter(|other| other.key == descriptor.key && !other.value.is_empty());
        let (patterns, values): (Vec<_>, Vec<_>) = others.partition(|other| other.value.ends_with('*'));
        let values: Vec<_> =
            values.iter().map(|other| &other.value).filter(|value| value.starts_with(prefix)).collect();
        if !values.is_empty() {
            let values = values.into_iter().cloned().collect();
            way.excepts.push(Except { attribute: attribute.to_owned(), values });
        }
        // Those before it in the file, or all if it is looked up last.
        for pattern in patterns.into_iter().take_while(|pattern| !std::ptr::eq(*pattern, descriptor)) {
            let other = pattern.value.trim_end_matches('*');
            if other.starts_with(prefix) || prefix.starts_with(other) {
                let how = format!("{}: such values are also counted by {} here", pattern.shown(), descriptor.shown());
                self.imported.account.differ(*pattern.lines.start(), &how);
            }
        }
    }

    fn limit(&mut self, domain: &Domain, descriptor: &Descriptor, limit: &Limit, way: &Way) {
        let wanted = if limit.name.is_empty() { way.shown.join(".").replace('=', "_") } else { limit.name.clone() };
        let shown = way.shown.join(", ");
        if matches!(limit.rate, Rate::Unlimited) && limit.replaces.is_empty() {
            self.imported.about.push(format!("{shown} is unlimited ({}).", lines(&descriptor.lines)));
            return;
        }
        let line = *descriptor.lines.start();
        let mut rule = Rule { name: self.names.of(&wanted), line, continues: true, ..Rule::default() };
        rule.comments.push(format!("{shown} ({})", lines(&descriptor.lines)));
        rule.must_have("domain", &domain.name);
        for step in &way.steps {
            match &step.is {
                Is::Exactly(value) | Is::Under(value) => _ = rule.must_have(&step.attribute, value),
                Is::Any => {}
            }
        }
        let counted = way.steps.iter().filter(|step| !matches!(step.is, Is::Exactly(_)));
        let counted: Vec<_> = counted.map(|step| step.attribute.clone()).collect();
        self.count(&mut rule, descriptor, way, counted);
        match limit.rate {
            Rate::Unlimited => rule.allow(),
            Rate::Per(0, _) if !rule.deny() => {
                self.lose_limit(descriptor, &format!("{shown}: no rule can deny all but some values"));
                return;
            }
            Rate::Per(0, _) => {}
            Rate::Per(requests, seconds) => rule.limit = format!("fixed-window {requests}/{}", period(seconds)),
        }
        rule.shadow = descriptor.shadow;
        let (line, name, replaces) = (limit.line, limit.name.clone(), limit.replaces.clone());
        self.found.push(Found { rule, line, name, replaces });
    }

    /// Sets what the rule counts by, and what it leaves to others.
    fn count(&mut self, rule: &mut Rule, descriptor: &Descriptor, way: &Way, counted: Vec<String>) {
        // Only the values of one attribute can be left out; those of others are counted here too.
        let (last, others) = match way.excepts.split_last() {
            Some((last, others)) => (Some(last), others),
            None => (None, &[][..]),
        };
        for other in others {
            let (by, values) = (&other.attribute, other.values.join(" or "));
            let how = format!("{}: requests with {by} {values} are counted here too", way.shown.join(", "));
            self.imported.account.differ(*descriptor.lines.start(), &how);
        }
        match last {
            Some(except) => rule.count_all_but(&except.attribute, &except.values, counted),
            None => rule.key = counted,
        }
    }

    /// A limit that replaces others ends the rules for its requests, and those that it replaces come after it.
    fn order(&mut self) {
        let found = std::mem::take(&mut self.found);
        let is_replaced =
            |one: &Found| !one.name.is_empty() && found.iter().any(|other| other.replaces.contains(&one.name));
        let replacing: Vec<_> = found.iter().filter(|one| !one.replaces.is_empty()).collect();
        let sound = match &replacing[..] {
            [] => true,
            [one] => !one.rule.shadow && one.rule.allow.is_empty() && !is_replaced(one),
            _ => false,
        };
        if !sound {
            for one in replacing {
                let how = "replaces: only a single limit that isn't a shadow and has no exceptions can replace others; \
                           here they all apply";
                self.imported.account.differ(one.line, how);
            }
        }
        let replaced: Vec<_> = found.iter().map(is_replaced).collect();
        let sound = sound && replaced.contains(&true);
        // Blocking rules come after counting ones, so that each rule has requests of its own.
        let place = |one: &Found, replaced: bool| match (replaced, one.replaces.is_empty()) {
            (true, _) if sound => 3,
            (false, false) if sound => 2,
            _ => u8::from(one.rule.does == Does::Block),
        };
        let places = found.into_iter().zip(replaced).map(|(one, replaced)| (place(&one, replaced), one));
        // An unlimited descriptor has a rule only to replace others.
        let mut placed: Vec<_> = places.filter(|(_, one)| sound || one.rule.does != Does::Allow).collect();
        placed.sort_by_key(|(place, _)| *place);
        let always =
            placed.iter().find(|(place, one)| *place == 2 && one.rule.key.is_empty()).map(|(_, one)| one.rule.clone());
        for (place, mut one) in placed {
            match place {
                2 => {
                    one.rule.continues = false;
                    one.rule.comments.push(format!("In place of {}, which follows", one.replaces.join(", ")));
                }
                3 if always.as_ref().is_some_and(|rule| rule.covers(&one.rule)) => {
                    let line = one.line;
                    self.imported.account.leave(line..=line, "is always replaced by another limit");
                    continue;
                }
                _ => {}
            }
            self.imported.rules.push(one.rule);
        }
        self.imported.uncover();
    }
}

/// A descriptor and those within it that have limits.
fn limited(descriptor: &Descriptor) -> Vec<&Descriptor> {
    let within = descriptor.descriptors.iter().flat_map(limited);
    descriptor.limit.iter().map(|_| descriptor).chain(within).collect()
}
