//! Which limit applies to a request: rules with conditions and priorities, from a file or made in code.
//!
//! ```
//! # #[cfg(feature = "embedded")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tollgate::rules::{Attributes, RuleSet};
//! use tollgate::{Embedded, Limiter};
//!
//! let rules: RuleSet = r#"
//!     [[rule]]
//!     name = "office"
//!     match = { ip = "10.0.0.0/8" }
//!     action = "allow"
//!
//!     [[rule]]
//!     name = "uploads"
//!     match = { path = "/api/*/files/*", method = "POST" }
//!     key = "user"
//!     limits = ["token-bucket 10/1s", "fixed-window 1000/1d"]
//! "#
//! .parse()?;
//!
//! let limiter = Limiter::new(Embedded::new());
//! let request = Attributes::new().user("42").method("POST").path("/api/v1/files/7");
//! let verdict = limiter.acquire_by(&rules, &request).await?;
//! assert_eq!((verdict.allowed, verdict.rule.as_deref()), (true, Some("uploads")));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "embedded"))]
//! # fn main() {}
//! ```
#![doc = include_str!("guide/rustdoc_links.md")]
#![cfg_attr(feature = "http", doc = "[answers]: crate::middleware\n")]
#![cfg_attr(any(not(doctest), feature = "embedded"), doc = include_str!("rules/format.md"))]

mod account;
mod api_key;
mod applies;
mod attributes;
mod changes;
mod charge;
mod compiled;
mod condition;
mod deciding;
mod definition;
mod error;
mod file;
mod find;
mod index;
mod named_values;
mod names;
mod optional;
mod path;
mod reload;
mod rule_request;
mod snapshot;
mod source;
mod statuses;
mod text;
mod throttle;
mod together;
mod verdict;
mod warnings;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;

use crate::error::Error;
use crate::rule::Rule;

use compiled::{Compiled, CompiledAction};
use error::{Field, MOST_FAULTS};
use index::Index;
use throttle::Limits;
use together::Together;

pub use crate::rule::fields::{Missing, OnErrorName};
pub use account::{Account, UserBlock, UserLimits};
pub use api_key::{ApiKeyError, ApiKeyLookup, FoundAccount};
pub(crate) use applies::Shadow;
pub use applies::{Applies, Effect};
pub use attributes::Attributes;
pub use changes::RuleChanges;
pub use charge::Charge;
pub use compiled::Response;
#[cfg(feature = "http")]
pub(crate) use condition::net;
pub use deciding::HoldVerdict;
#[cfg(feature = "http")]
pub(crate) use deciding::{Acquisition, FollowUp};
pub use definition::{Action, Cost, Definition, Descriptors, LimitDefinition, OneOrMore, Paths, Reading};
pub use error::{Fault, RuleSetError};
pub use reload::WatchedRules;
pub use rule_request::RuleRequest;
pub use source::{DecisionSink, OnResponse, RuleSource};
#[cfg(feature = "http")]
pub(crate) use statuses::{CountedBy, GivenBack};
pub use verdict::{Reason, ShadowVerdict, Verdict};

/// Rules, of which one applies to a request: among those whose conditions hold, the one with the highest priority, and
/// among equals the first. If that [continues](Definition::continues), the next applies as well, and so on.
///
/// Immutable and cheap to clone. Finding a request's rule costs no round trip and takes some 0.7 µs, or 1 µs among
/// 10,000 rules; more if many rules have the same values in all their conditions.
#[derive(Clone, Debug, Default)]
pub struct RuleSet {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// As written, with defaults and variables filled in.
    definitions: Vec<Definition>,
    /// All attributes that the rules match, count or cost by.
    attributes: BTreeSet<Box<str>>,
    /// Those of rules that take effect: all but shadow rules.
    enforced: BTreeSet<Box<str>>,
    reading: Reading,
    /// In the order in which they apply.
    rules: Vec<Compiled>,
    /// What is left to check of each rule once the index has found it. Stored together, since most rules need no more.
    checks: Vec<Check>,
    index: Index,
    together: Together,
    warnings: Vec<Fault>,
}

#[derive(Clone, Copy, Debug)]
struct Check {
    /// The condition by which the index finds it, which then holds.
    found_by: Option<u8>,
    /// Whether it has others, or may skip a request.
    more: bool,
    shadow: bool,
    continues: bool,
    /// Whether it hides later rules that match no more than it does.
    hides: bool,
}

/// A rule that was passed over, and why: what it expected, and what the request has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// The rule's name.
    pub rule: Arc<str>,
    /// Why it doesn't apply.
    pub why: String,
}

impl RuleSet {
    /// A set of these rules.
    ///
    /// # Errors
    ///
    /// Bad fields, duplicate names, and rules that can never apply.
    pub fn new(definitions: impl IntoIterator<Item = Definition>) -> Result<Self, RuleSetError> {
        Self::with_reading(Reading::default(), definitions)
    }

    /// A set of this rule only, for all requests. Its limits count by these attributes, except those that count by a
    /// [part](Rule::and_by). Parts and tag are the attributes with the same names.
    ///
    /// # Errors
    ///
    /// A rule without a name.
    ///
    /// ```
    /// use tollgate::Rule;
    /// use tollgate::rules::RuleSet;
    ///
    /// let rule = Rule::new("api", "token-bucket 100/1m burst 20")?;
    /// let rules = RuleSet::single(&rule, "api_key")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn single(rule: &Rule, key: impl Into<OneOrMore>) -> Result<Self, RuleSetError> {
        Self::new([Definition::of(rule, key)])
    }

    /// The same as [`new`](Self::new), for rules that read requests in this way.
    ///
    /// # Errors
    ///
    /// The same as [`new`](Self::new).
    ///
    /// ```
    /// use tollgate::rules::{Definition, Paths, Reading, RuleSet};
    ///
    /// let mut reading = Reading::default();
    /// reading.paths = Paths::Segments;
    /// let rules = RuleSet::with_reading(reading, [Definition::new("everyone")]);
    /// assert!(rules.is_err(), "it says neither what it counts nor by which limit");
    /// ```
    pub fn with_reading(
        reading: Reading,
        definitions: impl IntoIterator<Item = Definition>,
    ) -> Result<Self, RuleSetError> {
        Self::compiled(definitions.into_iter().collect(), reading, &|_, _| None)
    }

    /// The set in a file, including the files that it includes.
    ///
    /// # Errors
    ///
    /// A file that can't be read or has no rules; the first fault of each rule, with its line.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, RuleSetError> {
        file::read(path.as_ref())
    }

    /// How many rules there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.rules.len()
    }

    /// Whether there are none, so that every request is allowed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shared.rules.is_empty()
    }

    /// The rules as written, with defaults and variables filled in, in the order in which they were written.
    #[must_use]
    pub fn definitions(&self) -> &[Definition] {
        &self.shared.definitions
    }

    /// What is valid and probably doesn't match as meant, such as a regular expression in a path: at most a hundred, in
    /// the order of the rules. The documentation of [the file](self#the-file) lists them.
    #[must_use]
    pub fn warnings(&self) -> &[Fault] {
        &self.shared.warnings
    }

    /// Whether there is another clone of it, such as one that a request still uses. Unstable: for the system of
    /// record.
    #[doc(hidden)]
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// The limits of the rule of this name, if it has any.
    #[must_use]
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        let rule = self.shared.rules.iter().find(|rule| *rule.name == *name)?;
        match &rule.action {
            CompiledAction::Throttle(throttle) => Some(throttle.rule()),
            _ => None,
        }
    }

    /// Which rule applies to a request, or which rules together, and what it is charged.
    ///
    /// # Errors
    ///
    /// The cost, taken from an attribute, is no whole number.
    pub fn applies<'a>(&self, request: impl Into<RuleRequest<'a>>) -> Result<Applies<'_>, Error> {
        self.found_for(&request.into()).map(|(applies, _)| applies)
    }

    /// What the rule with this name makes of a request, ignoring its conditions and whichever rule applies: to inspect
    /// or change what it has counted. None if there is no such rule.
    ///
    /// # Errors
    ///
    /// The same as [`applies`](Self::applies).
    ///
    /// ```
    /// use tollgate::rules::{Attributes, Effect, RuleSet};
    ///
    /// let rules: RuleSet = r#"
    ///     [[rule]]
    ///     name = "logins"
    ///     match = { path = "/login", method = "POST" }
    ///     key = "user"
    ///     limits = ["sliding-log 5/15m"]
    /// "#
    /// .parse()?;
    ///
    /// let request = Attributes::new().user("42");
    /// assert_eq!(rules.applies(&request)?.rule, None);
    /// let logins = rules.by_name("logins", &request)?.expect("a rule of this name");
    /// let Effect::Limit(charge) = logins.effect else { panic!("it has limits") };
    /// assert_eq!((charge.key(), charge.cost()), (&b"user:42"[..], 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn by_name(&self, name: &str, request: &Attributes<'_>) -> Result<Option<Applies<'_>>, Error> {
        let rule = self.shared.rules.iter().find(|rule| *rule.name == *name);
        rule.map(|rule| rule.effect(&self.as_read(request))).transpose()
    }

    /// The shadow rules that match a request before the last one that applies, in their order: what each would do.
    #[must_use]
    pub fn shadows(&self, request: &Attributes<'_>) -> Vec<Applies<'_>> {
        let request = self.as_read(request);
        self.shared.shadows(self.shared.find(&request).1, &request).filter_map(|(_, applies)| applies.ok()).collect()
    }

    /// The same, and what the shadow rules before it would have done.
    fn found_for(&self, request: &RuleRequest<'_>) -> Result<(Applies<'_>, Vec<Shadow<'_>>), Error> {
        let costs = request.costs_as_text();
        let (mut applies, mut shadows) = self.found(&request.attributes_with(self, &costs))?;
        request.charged_to(&mut applies);
        shadows
            .iter_mut()
            .filter_map(|(_, shadow)| shadow.as_mut().ok())
            .for_each(|own| request.charged_to_shadow(own));
        Ok((applies, shadows))
    }

    /// The same for a request with these attributes, at the rules' costs.
    pub(crate) fn found(&self, request: &Attributes<'_>) -> Result<(Applies<'_>, Vec<Shadow<'_>>), Error> {
        if let Some(block) = request.account.and_then(Account::block) {
            return Ok((Applies::blocked(block), Vec::new()));
        }
        let request = self.as_read(request);
        let (places, shadows) = self.shared.find(&request);
        let rule = |place: &u32| &self.shared.rules[*place as usize];
        let applies = match &*places {
            [] => Applies::none(),
            [only] => rule(only).effect(&request)?,
            several => {
                let rules: SmallVec<[_; 4]> = several.iter().map(rule).collect();
                self.shared.together.effect(&rules, &request)?
            }
        };
        let shadows = self.shared.shadows(shadows, &request).collect();
        Ok((applies, shadows))
    }

    /// The attributes that its rules match, count or cost by, in alphabetical order, in which a misspelled one stands
    /// out.
    pub fn attributes(&self) -> impl Iterator<Item = &str> {
        self.shared.attributes.iter().map(|name| &**name)
    }

    /// Whether its rules match, count or cost by this attribute.
    fn counts_by(&self, attribute: &str) -> bool {
        self.shared.attributes.contains(attribute)
    }

    /// Whether a rule other than a shadow rule looks at paths, and this path could be read in two ways, while the set
    /// doesn't choose one. The middleware refuses such a request before any rule; [`applies`](Self::applies) doesn't.
    #[must_use]
    pub fn reads_two_ways(&self, request: &Attributes<'_>) -> bool {
        self.shared.reading.paths == Paths::Unambiguous && self.enforces(names::PATH) && request.reads_two_ways()
    }

    /// How a rate limit service decides a gateway's request of several descriptors.
    #[must_use]
    pub fn descriptors(&self) -> Descriptors {
        self.shared.reading.descriptors
    }

    /// Whether a rule matches, counts or costs by this attribute.
    #[cfg(feature = "http")]
    pub(crate) fn uses(&self, attribute: &str) -> bool {
        self.shared.attributes.contains(attribute)
    }

    /// The same, of rules that take effect: a shadow rule refuses no request.
    pub(crate) fn enforces(&self, attribute: &str) -> bool {
        self.shared.enforced.contains(attribute)
    }

    /// Identifies the set: another one once it has been reloaded.
    #[cfg(feature = "http")]
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// An attribute of a request as this set compares it: as in [`Attributes::get`], with the path in lower case if the
    /// set ignores case. Unstable: for the tool.
    #[doc(hidden)]
    #[must_use]
    pub fn sees<'r>(&self, request: &'r Attributes<'_>, name: &str) -> Option<Cow<'r, [u8]>> {
        match self.as_read(request) {
            Cow::Borrowed(request) => request.get(name),
            Cow::Owned(request) => request.get(name).map(|value| Cow::Owned(value.into_owned())),
        }
    }

    /// The rules before the last one that applies, and why each doesn't; all others if that continues, or none applies.
    /// Unstable: for the tool.
    #[doc(hidden)]
    #[must_use]
    pub fn passed_over(&self, request: &Attributes<'_>) -> Vec<PassedOver> {
        let request = self.as_read(request);
        let (places, _) = self.shared.find(&request);
        let rules = self.shared.rules[..self.shared.looked_at(&places)].iter().enumerate();
        rules
            .filter(|(at, _)| !places.iter().any(|place| *place as usize == *at))
            .map(|(_, rule)| {
                let shadow = || "a shadow rule: it is evaluated and reported, but denies nothing".to_owned();
                PassedOver { rule: Arc::clone(&rule.name), why: rule.passes_over(&request).unwrap_or_else(shadow) }
            })
            .collect()
    }

    /// Whether a rule before the last one that applies might apply if the request had this attribute, which it lacks;
    /// or more limits of those that do.
    #[cfg(feature = "http")]
    pub(crate) fn misses(&self, attribute: &str, request: &Attributes<'_>) -> bool {
        let request = self.as_read(request);
        let (places, _) = self.shared.find(&request);
        let rules = &self.shared.rules;
        let before = rules[..self.shared.looked_at(&places)].iter();
        let more_limits = |place: &u32| rules[*place as usize].leaves_out(attribute, &request);
        places.iter().any(more_limits) || before.clone().any(|rule| !rule.shadow && rule.misses(attribute, &request))
    }

    /// The request as this set compares it.
    fn as_read<'r, 'a>(&self, request: &'r Attributes<'a>) -> Cow<'r, Attributes<'a>> {
        self.shared.reading.of(request)
    }

    /// A set of these rules, as written in code or in files.
    fn compiled(
        definitions: Vec<Definition>,
        reading: Reading,
        locate: &file::Locate<'_>,
    ) -> Result<Self, RuleSetError> {
        let mut wrong: Vec<(usize, (Field, String))> = Vec::new();
        let mut names = HashMap::new();
        let mut rules: Vec<(usize, Compiled)> = Vec::with_capacity(definitions.len());
        let mut limits = Limits::default();
        for (at, definition) in definitions.iter().enumerate() {
            if names.insert(definition.name.as_str(), at).is_some() {
                let why = format!("name: another rule is also named {:?}", definition.name);
                wrong.push((at, (Field::named("name"), why)));
                continue;
            }
            match Compiled::new(definition, reading, &mut limits) {
                Ok(rule) => rules.push((at, rule)),
                Err(fault) => wrong.push((at, fault)),
            }
        }
        // Stable: among equals, the first.
        rules.sort_by_key(|(at, _)| std::cmp::Reverse(definitions[*at].priority));
        let (places, rules): (Vec<_>, Vec<_>) = rules.into_iter().unzip();
        let (index, found_by) = Index::new(rules.iter().map(|rule| &*rule.conditions));
        let check = |(rule, found_by): (&Compiled, Option<usize>)| Check {
            found_by: found_by.and_then(|at| u8::try_from(at).ok()),
            more: rule.conditions.len() > usize::from(found_by.is_some()) || rule.may_skip(),
            shadow: rule.shadow,
            continues: rule.continues,
            hides: !rule.lets_through() && !rule.may_skip(),
        };
        let checks = rules.iter().zip(found_by).map(check).collect();
        let attributes = definitions.iter().flat_map(Definition::attributes).map(Into::into).collect();
        let enforced = definitions.iter().filter(|rule| rule.shadow != Some(true)).flat_map(Definition::attributes);
        let enforced = enforced.map(Into::into).collect();
        let shared = Shared { attributes, enforced, reading, rules, checks, index, ..Shared::default() };
        for (place, at) in places.iter().enumerate() {
            if wrong.len() < MOST_FAULTS
                && let Some(before) = shared.hidden_by(place)
            {
                let why = format!(
                    "never applies: rule {before:?}, before it, takes all of its requests: narrow that one, or write \
                     continue = true there"
                );
                wrong.push((*at, (Field::named("name"), why)));
            }
        }
        let located = |(at, (field, why)): (usize, (Field, String))| {
            file::located(locate, at, &field, file::of_rule(&definitions[at].name, &why))
        };
        if wrong.is_empty() {
            let doubted = definitions.iter().enumerate();
            let doubted =
                doubted.flat_map(|(at, rule)| warnings::of(rule, reading).into_iter().map(move |fault| (at, fault)));
            let doubted = doubted.chain(warnings::of_shards(&definitions));
            let warnings = doubted.take(MOST_FAULTS).map(located).collect();
            return Ok(Self { shared: Arc::new(Shared { warnings, definitions, ..shared }) });
        }
        // Rules that can't apply were found in the order of priority.
        wrong.sort_by_key(|(at, _)| *at);
        Err(RuleSetError::new(wrong.into_iter().take(MOST_FAULTS).map(located).collect()))
    }
}

/// Whether both say the same: their rules, in their order, and how they are read.
impl PartialEq for RuleSet {
    fn eq(&self, other: &Self) -> bool {
        self.shared.reading == other.shared.reading && self.shared.definitions == other.shared.definitions
    }
}

impl FromStr for RuleSet {
    type Err = RuleSetError;

    /// The text of a file, which may include others from the working directory.
    fn from_str(text: &str) -> Result<Self, RuleSetError> {
        file::parse(text)
    }
}

impl Serialize for RuleSet {
    /// As in a file, with defaults and variables filled in.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Reading { ignore_case, paths, descriptors } = self.shared.reading;
        let rules = self.shared.definitions.clone();
        definition::Document { rules, ignore_case, paths, descriptors, ..Default::default() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RuleSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let document = definition::Document::deserialize(deserializer)?;
        file::of_document(document).map_err(serde::de::Error::custom)
    }
}
