//! The text of a rules file, as TOML: its content, and where each value is.

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
use super::error::{Fault, Field, MOST_FAULTS, Step};
use crate::rule::Rule;

/// One file that was read.
#[derive(Hash)]
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// A file's content.
pub(super) struct Said {
    /// Everything but its rules.
    pub(super) settings: Document,
    /// With their indices in the file.
    pub(super) rules: Vec<(usize, Definition)>,
    /// Values of another type or name than expected: the first of each rule.
    pub(super) faults: Vec<Fault>,
}

/// More names than this aren't worth reading in a message.
const MOST_NAMES: usize = 8;
/// A longer name isn't a typo.
const LONGEST_NAME: usize = 64;

/// Line and column, from 1; columns in characters.
type Position = (usize, usize);

impl Source {
    /// Its content, as far as it is TOML.
    pub(super) fn read(&self) -> Result<Said, Fault> {
        let lines = Lines::of(&self.text);
        let mut table = self.table()?;
        let rules = table.get_mut().remove("rule");
        let mut faults = Vec::new();
        let settings = Document::deserialize(Deserializer::from(table.clone())).unwrap_or_else(|error| {
            let name = error.span().and_then(|span| name_of_span(table.get_ref(), &span));
            faults.push(self.fault(&lines, in_words(None, name, error.message()), error.span()));
            Document::default()
        });
        let rules = match rules.map(|rules| (rules.span(), rules.into_inner())) {
            None => Vec::new(),
            Some((_, DeValue::Array(rules))) => rules.into_iter().collect(),
            Some((span, other)) => {
                let why = format!("expected rules that begin with [[rule]] each, got rule as {}", kind(&other));
                faults.push(self.fault(&lines, why, Some(span)));
                Vec::new()
            }
        };
        let mut definitions = Vec::with_capacity(rules.len());
        for (at, rule) in rules.into_iter().enumerate() {
            match self.definition(&lines, rule) {
                Ok(definition) => definitions.push((at, definition)),
                Err(fault) if faults.len() < MOST_FAULTS => faults.push(fault),
                Err(_) => break,
            }
        }
        Ok(Said { settings, rules: definitions, faults })
    }

    fn definition(&self, lines: &Lines<'_>, rule: Spanned<DeValue<'_>>) -> Result<Definition, Fault> {
        Definition::deserialize(rule.clone().into_deserializer()).map_err(|error| {
            let table = rule.get_ref().as_table();
            let name = table.and_then(|table| table.get("name")?.get_ref().as_str());
            let subject = name.map_or_else(|| "rule".to_owned(), |name| format!("rule {name}"));
            let field = error.span().and_then(|span| name_of_span(table?, &span));
            self.fault(lines, in_words(Some(subject), field, error.message()), error.span())
        })
    }

    /// The files that it includes, as written.
    pub(super) fn include(&self) -> Result<Vec<String>, Fault> {
        let Some(include) = self.table()?.get_mut().remove("include") else { return Ok(Vec::new()) };
        Vec::deserialize(include.into_deserializer()).map_err(|error| {
            let why = in_words(Some("include".into()), None, error.message());
            self.fault(&Lines::of(&self.text), why, error.span())
        })
    }

    fn table(&self) -> Result<Spanned<DeTable<'_>>, Fault> {
        DeTable::parse(&self.text).map_err(|error| {
            let again = || error.span().and_then(|span| self.text.get(span)).unwrap_or_default();
            let why = match error.message() {
                "duplicate key" => format!("expected each name once, got {} again", again()),
                message => message.to_owned(),
            };
            self.fault(&Lines::of(&self.text), why, error.span())
        })
    }

    /// A fault of `include`.
    pub(super) fn fault_of_include(&self, why: String) -> Fault {
        let span = self.table().ok().and_then(|table| Some(table.get_ref().get("include")?.span()));
        self.fault(&Lines::of(&self.text), format!("include: {why}"), span)
    }

    fn fault(&self, lines: &Lines<'_>, why: String, span: Option<Range<usize>>) -> Fault {
        Fault::new(why).in_file(&self.path, span.map(|span| lines.position(span.start)))
    }
}

/// The key whose value contains this span: `status`, or `defaults.status` in a table with a header.
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

/// A deserializer's message, in the terms of the file's author.
fn in_words(rule: Option<String>, field: Option<String>, message: &str) -> String {
    let mut words = String::new();
    // For an unknown field, the message already names it.
    for subject in rule.into_iter().chain(field.filter(|_| !message.starts_with("unknown field"))) {
        let _ = write!(words, "{subject}: ");
    }
    // The value that was found may contain the same words.
    let (what, expected) = message.rsplit_once(", expected ").unwrap_or((message, ""));
    let kinds = ["invalid type: ", "invalid value: ", "invalid length "];
    if let Some(got) = kinds.iter().find_map(|kind| what.strip_prefix(kind)) {
        let _ = write!(words, "expected {}, got {}", expected_in_words(expected), got_in_words(got));
    } else if let Some(name) = what.strip_prefix("missing field ") {
        let _ = write!(words, "expected a {}, got none", name.trim_matches('`'));
    } else if let Some(got) = ["unknown field ", "unknown variant "].iter().find_map(|kind| what.strip_prefix(kind)) {
        let got = got.trim_matches('`');
        let known: Vec<_> = expected.split('`').skip(1).step_by(2).collect();
        let expected = match nearest(known.iter().copied(), got) {
            Some(near) => format!("a known name (did you mean {near}?)"),
            None => format!("one of {}", known.join(", ")),
        };
        let _ = write!(words, "expected {expected}, got {got:?}");
    } else if message == "wanted string or table" {
        words.push_str("expected a string, got something else");
    } else {
        words.push_str(message.strip_prefix("on-change: ").unwrap_or(message));
    }
    words
}

fn expected_in_words(expected: &str) -> &str {
    match expected {
        "i64" => "a whole number",
        // Only prefix lengths and statuses are this small.
        "u8" => "a whole number from 1 to 128",
        "u16" => "a whole number from 400 to 599",
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

/// The one of these names that was probably meant.
fn nearest<'n>(known: impl Iterator<Item = &'n str>, got: &str) -> Option<&'n str> {
    // Short names are nearly all alike.
    let most = (got.len() / 2).min(2);
    let alike = known.filter(|name| got.len() <= LONGEST_NAME && name.len().abs_diff(got.len()) <= most);
    let distances = alike.map(|name| (strsim::damerau_levenshtein(name, got), name));
    distances.filter(|(distance, _)| *distance <= most).min_by_key(|(distance, _)| *distance).map(|(_, name)| name)
}

/// A rule with variables replaced by their values, or the name that is no variable.
pub(super) fn with_variables(
    mut rule: Definition,
    variables: &BTreeMap<String, String>,
) -> Result<Definition, (Field, String)> {
    let fill = |text: &mut String| {
        let Some(name) = text.strip_prefix('$') else { return Ok(()) };
        let Some(value) = variables.get(name) else {
            let known = || variables.keys().map(String::as_str);
            let which = match nearest(known(), name) {
                Some(near) => format!("did you mean ${near}?"),
                None if variables.is_empty() => "of which there are none".to_owned(),
                None => {
                    let more = if variables.len() > MOST_NAMES { ", ..." } else { "" };
                    known().take(MOST_NAMES).collect::<Vec<_>>().join(", ") + more
                }
            };
            return Err(format!("expected a limit or the name of a variable ({which}), got {text:?}"));
        };
        text.clone_from(value);
        Ok(())
    };
    for (at, limit) in rule.limits.iter_mut().enumerate() {
        fill(&mut limit.limit).map_err(|why| (Field::named("limits").item(at), format!("limits: {why}")))?;
    }
    for (key, text) in &mut rule.overrides {
        fill(text).map_err(|why| (Field::named("overrides").entry(key), format!("{key}: {why}")))?;
    }
    Ok(rule)
}

/// A variable that isn't a limit, whether or not a rule uses it.
pub(super) fn bad_variable(variables: &BTreeMap<String, String>) -> Option<(&str, String)> {
    variables.iter().find_map(|(name, text)| {
        let error = text.parse::<Rule>().err()?;
        Some((name.as_str(), format!("variables: {name}: {error}")))
    })
}

/// The positions of all values in the files. Parsed a second time, and only after an error.
pub(super) struct Positions<'s> {
    files: Vec<(&'s Source, OnceCell<Option<Parsed<'s>>>)>,
}

struct Parsed<'s> {
    table: Spanned<DeTable<'s>>,
    lines: Lines<'s>,
}

impl<'s> Positions<'s> {
    pub(super) fn of(sources: &'s [Source]) -> Self {
        Self { files: sources.iter().map(|source| (source, OnceCell::new())).collect() }
    }

    /// Of a variable or a default, which are all in the first file.
    pub(super) fn of_setting(&self, table: &str, name: &str) -> Option<Position> {
        let Parsed { table: settings, lines } = self.parsed(0)?;
        let setting = settings.get_ref().get(table)?.get_ref().as_table()?.get(name)?;
        Some(lines.position(setting.span().start))
    }

    /// Of a rule's field, a value in it, or the rule itself.
    pub(super) fn of_field(&self, source: usize, rule: usize, field: &Field) -> Option<Position> {
        let Parsed { table, lines } = self.parsed(source)?;
        let rule: &Spanned<DeValue<'_>> = table.get_ref().get("rule")?.get_ref().as_array()?.get(rule)?;
        let Some(mut value) = rule.get_ref().get(field.name) else { return Some(lines.position(rule.span().start)) };
        for step in &field.within {
            let within = match step {
                Step::Item(index) => value.get_ref().as_array().and_then(|array| array.get(*index)),
                Step::Entry(key) => value.get_ref().as_table().and_then(|table| table.get(key.as_str())),
            };
            // A list of one may be written without brackets.
            value = within.unwrap_or(value);
        }
        Some(lines.position(value.span().start))
    }

    fn parsed(&self, source: usize) -> Option<&Parsed<'s>> {
        let (source, parsed) = self.files.get(source)?;
        let parse = || Some(Parsed { table: DeTable::parse(&source.text).ok()?, lines: Lines::of(&source.text) });
        parsed.get_or_init(parse).as_ref()
    }
}

/// The start of each line in a text.
struct Lines<'s> {
    text: &'s str,
    starts: Vec<usize>,
}

impl<'s> Lines<'s> {
    fn of(text: &'s str) -> Self {
        let after_ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Self { text, starts: std::iter::once(0).chain(after_ends).collect() }
    }

    fn position(&self, at: usize) -> Position {
        let line = self.starts.partition_point(|start| *start <= at);
        let start = self.starts[line - 1];
        let column = self.text.get(start..at).map_or(0, |before| before.chars().count()) + 1;
        (line, column)
    }
}
