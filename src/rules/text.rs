//! The text of a rules file, as TOML: what it says, and where each thing stands.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use super::definition::{Definition, Document};
use super::error::{Fault, Field, RuleSetError, Within};
use crate::rule::Rule;

/// One file that was read.
#[derive(Hash)]
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// Line and column, from 1; columns in characters.
type Position = (usize, usize);

impl Source {
    /// What it says; or what has another type or name than expected, of each rule the first.
    pub(super) fn document(&self) -> Result<Document, RuleSetError> {
        let mut table = self.table()?;
        let rules = table.get_mut().remove("rule");
        let settings = Document::deserialize(Deserializer::from(table.clone()));
        let settings = settings.map_err(|error| {
            let name = error.span().and_then(|span| name_of_span(table.get_ref(), &span));
            self.fault(in_words(None, name, error.message()), error.span())
        });
        let mut faults: Vec<_> = settings.as_ref().err().cloned().into_iter().collect();
        let rules = match rules.map(|rules| (rules.span(), rules.into_inner())) {
            None => Vec::new(),
            Some((_, DeValue::Array(rules))) => rules.into_iter().collect(),
            Some((span, other)) => {
                let why = format!("expected rules that begin with [[rule]] each, got rule as {}", kind(&other));
                faults.push(self.fault(why, Some(span)));
                Vec::new()
            }
        };
        let mut definitions = Vec::with_capacity(rules.len());
        for rule in rules {
            match self.definition(rule) {
                Ok(definition) => definitions.push(definition),
                Err(fault) => faults.push(fault),
            }
        }
        match settings {
            Ok(settings) if faults.is_empty() => Ok(Document { rules: definitions, ..settings }),
            _ => Err(RuleSetError::new(faults)),
        }
    }

    fn definition(&self, rule: Spanned<DeValue<'_>>) -> Result<Definition, Fault> {
        Definition::deserialize(rule.clone().into_deserializer()).map_err(|error| {
            let table = rule.get_ref().as_table();
            let name = table.and_then(|table| table.get("name")?.get_ref().as_str());
            let subject = name.map_or_else(|| "rule".to_owned(), |name| format!("rule {name}"));
            let field = error.span().and_then(|span| name_of_span(table?, &span));
            self.fault(in_words(Some(subject), field, error.message()), error.span())
        })
    }

    /// The files that it includes, as they are written.
    pub(super) fn include(&self) -> Result<Vec<String>, Fault> {
        let Some(include) = self.table()?.get_mut().remove("include") else { return Ok(Vec::new()) };
        Vec::deserialize(include.into_deserializer())
            .map_err(|error| self.fault(in_words(Some("include".into()), None, error.message()), error.span()))
    }

    fn table(&self) -> Result<Spanned<DeTable<'_>>, Fault> {
        DeTable::parse(&self.text).map_err(|error| {
            let again = || error.span().and_then(|span| self.text.get(span)).unwrap_or_default();
            let why = match error.message() {
                "duplicate key" => format!("expected each name once, got {} again", again()),
                message => message.to_owned(),
            };
            self.fault(why, error.span())
        })
    }

    /// A fault of `include`.
    pub(super) fn fault_of_include(&self, why: String) -> Fault {
        let span = self.table().ok().and_then(|table| Some(table.get_ref().get("include")?.span()));
        self.fault(format!("include: {why}"), span)
    }

    fn fault(&self, why: String, span: Option<Range<usize>>) -> Fault {
        let at = span.map(|span| position(&self.text, span.start));
        Fault::new(why).in_file(&self.path, at)
    }
}

/// The key whose value this is, or is within: `status`, or `defaults.status` of a table with a header.
fn name_of_span(table: &DeTable<'_>, span: &Range<usize>) -> Option<String> {
    table.iter().find_map(|(name, value)| {
        let (name, at) = (name.get_ref(), value.span());
        if at.start <= span.start && span.end <= at.end {
            return Some(name.to_string());
        }
        let within = name_of_span(value.get_ref().as_table()?, span)?;
        Some(format!("{name}.{within}"))
    })
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::Table(_) => "a table",
        _ => value.type_str(),
    }
}

/// What a deserializer says, in the words of someone who writes the file.
fn in_words(rule: Option<String>, field: Option<String>, message: &str) -> String {
    let mut words = String::new();
    // A field that isn't known is all that is wrong.
    for subject in rule.into_iter().chain(field.filter(|_| !message.starts_with("unknown field"))) {
        let _ = write!(words, "{subject}: ");
    }
    let (what, expected) = message.split_once(", expected ").unwrap_or((message, ""));
    let kinds = ["invalid type: ", "invalid value: ", "invalid length "];
    if let Some(got) = kinds.iter().find_map(|kind| what.strip_prefix(kind)) {
        let _ = write!(words, "expected {}, got {}", expected_in_words(expected), got_in_words(got));
    } else if let Some(name) = what.strip_prefix("missing field ") {
        let _ = write!(words, "expected a {}, got none", name.trim_matches('`'));
    } else if let Some(got) = ["unknown field ", "unknown variant "].iter().find_map(|kind| what.strip_prefix(kind)) {
        let got = got.trim_matches('`');
        let known: Vec<_> = expected.split('`').skip(1).step_by(2).collect();
        let expected = match nearest(&known, got) {
            Some(near) => format!("a known name (did you mean {near}?)"),
            None => format!("one of {}", known.join(", ")),
        };
        let _ = write!(words, "expected {expected}, got {got:?}");
    } else {
        words.push_str(message);
    }
    words
}

fn expected_in_words(expected: &str) -> &str {
    match expected {
        "i64" => "a whole number",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "a nonzero u32" => "a whole number from 1 to 4294967295",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a table",
        expected if expected.starts_with("struct ") => "a table",
        expected => expected,
    }
}

fn got_in_words(got: &str) -> &str {
    match got {
        "map" => "a table",
        "sequence" => "a list",
        _ => match got.strip_prefix("string ") {
            Some(text) => text,
            // integer `1`
            None => got.split('`').nth(1).unwrap_or(got),
        },
    }
}

/// The name among these that was most likely meant.
fn nearest<'n>(known: &[&'n str], got: &str) -> Option<&'n str> {
    let distance = |name: &str| strsim::damerau_levenshtein(name, got);
    known.iter().copied().filter(|name| distance(name) <= 2).min_by_key(|name| distance(name))
}

/// A rule with variables' values for their names, or which name is no variable's.
pub(super) fn with_variables(
    mut rule: Definition,
    variables: &BTreeMap<String, String>,
) -> Result<Definition, (Field, String)> {
    let fill = |text: &mut String| {
        let Some(name) = text.strip_prefix('$') else { return Ok(()) };
        let Some(value) = variables.get(name) else {
            let known: Vec<_> = variables.keys().map(String::as_str).collect();
            let which = match nearest(&known, name) {
                Some(near) => format!("did you mean ${near}?"),
                None if known.is_empty() => "of which there are none".to_owned(),
                None => known.join(", "),
            };
            return Err(format!("expected a limit or the name of a variable ({which}), got {text:?}"));
        };
        text.clone_from(value);
        Ok(())
    };
    for (at, limit) in rule.limits.iter_mut().enumerate() {
        fill(&mut limit.limit).map_err(|why| (Field::item("limits", at), format!("limits: {why}")))?;
    }
    for (key, text) in &mut rule.overrides {
        fill(text).map_err(|why| (Field::entry("overrides", key), format!("{key}: {why}")))?;
    }
    Ok(rule)
}

/// A variable that isn't a limit, whether a rule uses it or not.
pub(super) fn bad_variable(variables: &BTreeMap<String, String>) -> Option<(&str, String)> {
    variables.iter().find_map(|(name, text)| {
        let error = text.parse::<Rule>().err()?;
        Some((name.as_str(), format!("variables: {name}: {error}")))
    })
}

/// Where all values of the files stand. They are read a second time for it, and only if something is wrong.
pub(super) struct Positions<'s> {
    files: Vec<(&'s str, OnceCell<Option<Spanned<DeTable<'s>>>>)>,
}

impl<'s> Positions<'s> {
    pub(super) fn of(sources: &'s [Source]) -> Self {
        Self { files: sources.iter().map(|source| (source.text.as_str(), OnceCell::new())).collect() }
    }

    /// Of a variable, all of which stand in the first file.
    pub(super) fn of_variable(&self, name: &str) -> Option<Position> {
        let (text, table) = self.table(0)?;
        let variable = table.get("variables")?.get_ref().as_table()?.get(name)?;
        Some(position(text, variable.span().start))
    }

    /// Of a rule's field, of what stands there, or of the rule.
    pub(super) fn of_field(&self, source: usize, rule: usize, field: &Field) -> Option<Position> {
        let (text, table) = self.table(source)?;
        let rule: &Spanned<DeValue<'_>> = table.get("rule")?.get_ref().as_array()?.get(rule)?;
        let Some(value) = rule.get_ref().get(field.name) else { return Some(position(text, rule.span().start)) };
        let within = match &field.within {
            Within::All => None,
            Within::Item(index) => value.get_ref().as_array().and_then(|array| array.get(*index)),
            Within::Entry(key) => value.get_ref().as_table().and_then(|table| table.get(key.as_str())),
        };
        Some(position(text, within.unwrap_or(value).span().start))
    }

    fn table(&self, source: usize) -> Option<(&'s str, &DeTable<'s>)> {
        let (text, table) = self.files.get(source)?;
        let table = table.get_or_init(|| DeTable::parse(text).ok()).as_ref()?;
        Some((text, table.get_ref()))
    }
}

fn position(text: &str, at: usize) -> Position {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}
