//! Explains what a set of rules does with a request, step by step.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use tollgate::rules::{
    Action, Applies, Attributes, Charge, Definition, Effect, OnErrorName, OneOrMore, PassedOver, RuleSet,
};
use tollgate::{Error, Limit, Limiter, Request, Rule};

use crate::attributes::Pairs;
use crate::escape::shown;
use crate::output::{QUIET, counted, human, micros, width, wrapped};
use crate::subject::title;
use crate::verdict::{self, AMBIGUOUS, reason};

/// The most rules shown that didn't apply, unless all are asked for.
const SHOWN: usize = 20;

/// The field names and order are those that other programs rely on.
#[derive(Debug, Serialize)]
pub(super) struct Explained<'a> {
    /// The attributes as rules see them.
    attrs: BTreeMap<String, String>,
    /// Attributes that were given in another spelling.
    given: BTreeMap<&'a str, String>,
    #[serde(flatten)]
    step: Step<'a>,
    /// All rules that apply, in their order, if several do: `step` is the one that blocks, or the first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    together: Vec<Step<'a>>,
    passed_over: Vec<Passed>,
    /// How many more didn't apply.
    passed_over_more: usize,
    shadows: Vec<Step<'a>>,
}

#[derive(Debug, Serialize)]
struct Passed {
    rule: String,
    why: String,
}

/// A rule, and what it does with the request.
#[derive(Clone, Debug, Default, Serialize)]
struct Step<'a> {
    rule: Option<&'a str>,
    priority: Option<i64>,
    #[serde(rename = "match")]
    conditions: Option<&'a BTreeMap<String, OneOrMore>>,
    action: Option<Action>,
    /// The reason as in a replay: no-rule, allowed, blocked, missing, limits or ambiguous.
    reason: &'static str,
    missing: Option<&'a str>,
    #[serde(rename = "override")]
    overridden: Option<String>,
    /// The key that it counts, or that an override names.
    key: Option<String>,
    cost: Option<u64>,
    /// The minimum for a cost from the request's attributes, if the rule has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    min_cost: Option<u64>,
    limits: Vec<Counted>,
    /// Limits that don't apply to the request, since it lacks an attribute.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<String>,
    /// The statuses of responses with which the request stays charged, if not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<&'a OneOrMore>,
    on_error: Option<OnErrorName>,
    /// How long a denied key is blocked.
    block_for: Option<&'a str>,
    /// The HTTP status of a denial.
    status: Option<u16>,
    message: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_us: Option<u64>,
}

/// One limit, and the keys that it counts in.
#[derive(Clone, Debug, Serialize)]
struct Counted {
    name: String,
    limit: String,
    /// The key that it counts.
    key: String,
    /// The one key in Redis; null if it can't be known. On a cluster, each shard of a limit has one instead.
    redis_keys: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<String>,
    /// What the request takes of it, if that differs from the rule's cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<u64>,
    /// Its capacity, if the request takes more, so that it is never allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    exceeds: Option<u64>,
}

impl<'a> Explained<'a> {
    pub(super) fn of(
        rules: &'a RuleSet,
        given: &'a Pairs,
        request: &Attributes<'_>,
        limiter: &Limiter,
        all: bool,
    ) -> Result<Self, Error> {
        let (mut attrs, mut differs) = (BTreeMap::new(), BTreeMap::new());
        for (name, value) in given {
            let Some(seen) = rules.sees(request, name) else { continue };
            if *seen != **value {
                differs.insert(name.as_str(), shown(value));
            }
            attrs.insert(name.clone(), shown(&seen));
        }
        if rules.reads_two_ways(request) {
            let step = Step { reason: AMBIGUOUS, status: Some(400), ..Step::default() };
            let (together, passed_over, shadows) = (Vec::new(), Vec::new(), Vec::new());
            return Ok(Self { attrs, given: differs, step, together, passed_over, passed_over_more: 0, shadows });
        }
        let step = |applies: Applies<'a>| Step::of(rules, applies, limiter);
        let shadows = rules.shadows(request);
        let mut passed = rules.passed_over(request);
        // Shadow rules are listed separately.
        passed.retain(|passed| !shadows.iter().any(|shadow| shadow.rule == Some(&*passed.rule)));
        let shown = if all { passed.len() } else { SHOWN.min(passed.len()) };
        let passed_over_more = passed.split_off(shown).len();
        let passed_over = passed.into_iter().map(Passed::from).collect();
        let shadows = shadows.into_iter().map(step).collect();
        let mut applies = rules.applies(request)?;
        let mut decisive = None;
        let mut together = Vec::new();
        for own in std::mem::take(&mut applies.together) {
            let (is_decisive, own) = (own.rule == applies.rule, step(own));
            if is_decisive {
                decisive = Some(own.clone());
            }
            together.push(own);
        }
        let step = decisive.unwrap_or_else(|| step(applies));
        Ok(Self { attrs, given: differs, step, together, passed_over, passed_over_more, shadows })
    }

    pub(super) fn print(&self, mut out: impl Write) -> io::Result<()> {
        let mut request: Vec<_> = self.attrs.iter().map(|(name, value)| self.attribute(name, value)).collect();
        if request.is_empty() {
            request.push("no attributes given".to_owned());
        }
        let mut lines: Vec<_> = request.into_iter().map(|line| ("request", line)).collect();
        match self.together.as_slice() {
            [] => lines.extend(self.step.lines()),
            several => lines.extend(several.iter().flat_map(Step::lines)),
        }
        if !self.together.is_empty() {
            lines.push(("together", self.together()));
        }
        for shadow in &self.shadows {
            let rule = shadow.rule.unwrap_or_default();
            lines.push(("shadow", format!("{rule}: evaluated and reported, but denies nothing")));
            lines.extend(shadow.lines().into_iter().skip(1));
        }
        lines.extend(self.passed_over.iter().map(|Passed { rule, why }| ("passed over", format!("{rule}: {why}"))));
        if self.passed_over_more > 0 {
            let more = counted(self.passed_over_more as u64, "more rule");
            lines.push(("passed over", format!("{more}: --all shows them")));
        }
        table(&mut out, &lines)
    }

    /// The outcome of a request to which several rules apply.
    fn together(&self) -> String {
        match self.step.reason {
            "blocked" | "missing" => {
                let rule = self.step.rule.unwrap_or_default();
                format!("denied by {rule}: no limits are checked, and nothing is counted")
            }
            "limits" => {
                "allowed if all their limits allow, and charged to all or none; the first that denies answers".into()
            }
            _ => "allowed, and nothing is counted".into(),
        }
    }

    fn attribute(&self, name: &str, value: &str) -> String {
        let given = self.given.get(name);
        let name = shown(name.as_bytes());
        match given {
            Some(given) => format!("{name} {value} (given as {given})"),
            None => format!("{name} {value}"),
        }
    }
}

impl From<PassedOver> for Passed {
    fn from(passed: PassedOver) -> Self {
        Self { rule: passed.rule.to_string(), why: shown(passed.why.as_bytes()) }
    }
}

impl<'a> Step<'a> {
    fn of(rules: &'a RuleSet, applies: Applies<'a>, limiter: &Limiter) -> Self {
        let reason = reason(&applies);
        let Some(name) = applies.rule else { return Self { reason, ..Self::default() } };
        let definition: Option<&Definition> = rules.definitions().iter().find(|rule| rule.name == name);
        let charge = match &applies.effect {
            Effect::Limit(charge) => Some(charge),
            _ => None,
        };
        let denies = definition.filter(|rule| rule.action != Action::Allow).and(applies.response);
        Self {
            rule: Some(name),
            priority: definition.map(|rule| rule.priority),
            conditions: definition.map(|rule| &rule.conditions),
            action: definition.map(|rule| rule.action),
            reason,
            missing: match applies.effect {
                Effect::Missing(attribute) => Some(attribute),
                _ => None,
            },
            overridden: applies.overridden.map(|key| shown(key.as_bytes())),
            key: charge.map(Charge::key).or(applies.overridden.map(str::as_bytes)).map(shown),
            cost: charge.map(Charge::cost),
            min_cost: definition.filter(|_| charge.is_some()).and_then(|rule| rule.min_cost),
            limits: charge.map(|charge| Counted::all(charge, limiter)).unwrap_or_default(),
            left_out: charge.map(|charge| left_out(rules, name, charge.rule())).unwrap_or_default(),
            count: definition.filter(|_| charge.is_some()).and_then(|rule| rule.count.as_ref()),
            on_error: definition.and_then(|rule| rule.on_error),
            block_for: definition.filter(|rule| rule.shadow != Some(true)).and_then(|rule| rule.block_for.as_deref()),
            status: denies.map(|response| response.status.get()),
            // If an attribute is missing, the answer names it instead.
            message: denies
                .filter(|_| !matches!(applies.effect, Effect::Missing(_)))
                .and_then(|response| response.message.as_deref()),
            retry_after_us: denies.and_then(|response| response.retry_after).map(micros),
        }
    }

    /// Names and values, for people.
    fn lines(&self) -> Vec<(&'static str, String)> {
        if self.reason == AMBIGUOUS {
            let why = "none is looked for: the middleware refuses a path that servers read in two ways, unless the \
                       file says how to read it (paths = \"decoded\" or \"segments\")";
            return vec![("rule", why.to_owned()), ("denied as", "status 400".to_owned())];
        }
        let Some(rule) = self.rule else {
            return vec![("rule", "none applies: the request is allowed, and nothing is counted".to_owned())];
        };
        let mut lines = vec![("rule", format!("{rule} (priority {})", self.priority.unwrap_or_default()))];
        let values = |(name, values): (&String, &OneOrMore)| format!("{name} {}", values.0.join(" or "));
        let conditions: Vec<_> = self.conditions.into_iter().flatten().map(values).collect();
        let asked = if conditions.is_empty() {
            "every request, since it has no conditions".to_owned()
        } else {
            conditions.join(", and ")
        };
        lines.push(("matches", shown(asked.as_bytes())));
        let overridden = self.overridden.as_ref().map(|key| format!("the override of {key}"));
        if let Some(by) = &overridden {
            lines.push(("override", by.replacen("the override of ", "", 1)));
        }
        let by = overridden.map(|by| format!(" by {by}")).unwrap_or_default();
        lines.push((
            "action",
            match (self.reason, self.missing) {
                ("allowed", _) => format!("allow: the request is allowed{by}, and nothing is counted"),
                ("blocked", _) => format!("block: the request is denied{by}, and nothing is counted"),
                ("missing", Some(missing)) => {
                    format!("the request is denied: it lacks {missing}, which the rule needs for its keys or its cost")
                }
                _ => format!("throttle{by}"),
            },
        ));
        if let Some(cost) = self.cost {
            let least = self.min_cost.map(|least| format!(" (min_cost {least})")).unwrap_or_default();
            lines.push(("cost", format!("{}{least}", counted(cost, "unit"))));
        }
        for limit in &self.limits {
            let named = if limit.name == limit.limit { String::new() } else { format!("{}: ", limit.name) };
            let cost = limit.cost.map(|cost| format!(", {}", counted(cost, "unit"))).unwrap_or_default();
            let most = limit.exceeds.map(|most| format!(": never allowed, since {most} is the most at once"));
            lines.push(("limit", format!("{named}{} of {}{cost}{}", limit.limit, limit.key, most.unwrap_or_default())));
            lines.extend(limit.unknown.iter().map(|why| ("redis key", format!("unknown: {why}"))));
            lines.extend(limit.redis_keys.iter().flatten().map(|key| ("redis key", shown(key.as_bytes()))));
        }
        for limit in &self.left_out {
            lines.push(("left out", format!("{limit}: the request lacks an attribute of its key or cost")));
        }
        if let Some(OneOrMore(statuses)) = self.count {
            let statuses = statuses.join(" or ");
            lines.push(("counts", format!("if its response has status {statuses}; otherwise it is given back")));
        }
        if let Some(time) = self.block_for.filter(|_| !self.limits.is_empty()) {
            lines.push(("block for", format!("{time}, once it is denied")));
        }
        // Without limits, Redis is never called, so the policy has no effect.
        if let Some(policy) =
            self.on_error.filter(|_| !self.limits.is_empty()).and_then(|policy| serde_json::to_value(policy).ok())
        {
            lines.push(("on error", policy.as_str().unwrap_or_default().to_owned()));
        }
        if let Some(status) = self.status.filter(|_| self.reason != "allowed") {
            let message = self.message.map(|message| format!(", {:?}", shown(message.as_bytes()))).unwrap_or_default();
            let wait = self.retry_after_us.map(|us| format!(", retry after {}", human(Duration::from_micros(us))));
            lines.push(("denied as", format!("status {status}{message}{}", wait.unwrap_or_default())));
        }
        lines
    }
}

/// The limits of this rule that aren't among these, unless an override has taken their place.
fn left_out(rules: &RuleSet, name: &str, charged: &Rule) -> Vec<String> {
    let Some(whole) = rules.rule(name) else { return Vec::new() };
    let is_charged = |limit: &&Limit| charged.limits().any(|one| one == *limit);
    match charged.limits().all(|limit| whole.limits().any(|one| one == limit)) {
        true => whole.limits().filter(|limit| !is_charged(limit)).map(title).collect(),
        false => Vec::new(),
    }
}

impl Counted {
    fn all(charge: &Charge<'_>, limiter: &Limiter) -> Vec<Self> {
        let keys = keys(limiter, charge.rule(), charge.request());
        let costs = charge.costs(None);
        let of = |(at, (limit, counted)): (usize, (&Limit, Vec<u8>))| Self {
            cost: costs.get(at).copied().filter(|cost| *cost != charge.cost()),
            exceeds: Some(limit.capacity()).filter(|most| costs.get(at).is_some_and(|cost| cost > most)),
            name: title(limit),
            limit: limit.to_string(),
            key: shown(&counted),
            redis_keys: keys.as_ref().ok().map(|keys| keys.get(at).cloned().into_iter().collect()),
            unknown: keys.as_ref().err().cloned(),
        };
        charge.rule().limits().zip(verdict::counted_keys(charge)).enumerate().map(of).collect()
    }
}

fn keys(limiter: &Limiter, rule: &Rule, request: Request<'_>) -> Result<Vec<String>, String> {
    limiter.keys(rule, request).map_err(|error| format!("{error} (--key-secret-file)"))
}

/// Names and values in lines no wider than the terminal, unless a word is. A repeated name is left out.
fn table(out: &mut impl Write, lines: &[(&str, String)]) -> io::Result<()> {
    let names = lines.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let width = width().saturating_sub(names + 2).max(30);
    let mut before = "";
    for (name, value) in lines {
        // The keys of several limits stay below their own limit.
        let name_shown = if *name == before && *name != "limit" { "" } else { name };
        before = name;
        for (at, line) in wrapped(value, width).iter().enumerate() {
            let name = if at == 0 { name_shown } else { "" };
            writeln!(out, "{QUIET}{name:<names$}{QUIET:#}  {line}")?;
        }
    }
    Ok(())
}
