//! The text of a rules file, as TOML: its content, and where each value is.

mod cut;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::de::{DeFloat, DeTable, DeValue, Deserializer};

use self::cut::Cut;
use super::definition::{Definition, Document};
use super::error::{Fault, Field, MOST_FAULTS, Step};
use crate::rule::Rule;

/// One file that was read.
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// Where its rules are. None if only reading all of it can tell.
    cut: Option<Cut>,
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

impl Hash for Source {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.path, &self.text).hash(state);
    }
}

impl Source {
    pub(super) fn new(path: PathBuf, text: String) -> Self {
        let cut = Cut::of(&text);
        Self { path, text, cut }
    }

    /// Its content, as far as it is TOML.
    pub(super) fn read(&self) -> Result<Said, Fault> {
        self.read_by_rule().map_or_else(|| self.read_whole(), Ok)
    }

    /// The same, one rule after the other: the tables of a whole file take ten times the memory of its rules. None if
    /// anything is wrong: only reading the whole says what.
    fn read_by_rule(&self) -> Option<Said> {
        let Cut { settings, rules } = self.cut.as_ref()?;
        let document = |text| Document::deserialize(Deserializer::from(text)).ok();
        let settings = document(table_of(settings).ok().filter(|settings| !settings.get_ref().contains_key("rule"))?)?;
        let mut definitions = Vec::with_capacity(rules.len());
        for (at, rule) in rules.iter().enumerate() {
            let mut one = document(table_of(self.text.get(rule.clone())?).ok()?)?;
            let mut definition = one.rules.pop().filter(|_| one.rules.is_empty())?;
            definition.limits.shrink_to_fit();
            definitions.push((at, definition));
        }
        Some(Said { settings, rules: definitions, faults: Vec::new() })
    }

    fn read_whole(&self) -> Result<Said, Fault> {
        let lines = Lines::of(&self.text);
        let mut table = self.table()?;
        let rules = table.get_mut().remove("rule");
        let mut faults = Vec::new();
        let settings = Document::deserialize(Deserializer::from(table.clone())).unwrap_or_else(|error| {
            let name = error.span().and_then(|span| name_of_span(table.get_ref(), &span));
            faults.push(self.fault(&lines, self.in_words(None, name, &error), error.span()));
            Document::default()
        });
        let rules = match rules.map(|rules| (rules.span(), rules.into_inner())) {
            None => Vec::new(),
            Some((_, DeValue::Array(rules))) => rules.into_iter().collect(),
            Some((span, other)) => {
                let got = if other.is_table() { "a table" } else { self.text.get(span.clone()).unwrap_or_default() };
                let why = format!("write [[rule]] before each rule: here, rule is {got}");
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
            self.fault(lines, self.in_words(Some(subject), field, &error), error.span())
        })
    }

    /// The files that it includes, as written.
    pub(super) fn include(&self) -> Result<Vec<String>, Fault> {
        if let Some(cut) = &self.cut
            && let Ok(mut settings) = table_of(&cut.settings)
        {
            let include = settings.get_mut().remove("include");
            if let Ok(include) = include.map_or(Ok(Vec::new()), |include| Vec::deserialize(include.into_deserializer()))
            {
                return Ok(include);
            }
        }
        let Some(include) = self.table()?.get_mut().remove("include") else { return Ok(Vec::new()) };
        Vec::deserialize(include.into_deserializer()).map_err(|error| {
            let why = self.in_words(Some("include".into()), None, &error);
            self.fault(&Lines::of(&self.text), why, error.span())
        })
    }

    fn table(&self) -> Result<Spanned<DeTable<'_>>, Fault> {
        table_of(&self.text).map_err(|error| {
            let again = || error.span().and_then(|span| self.text.get(span)).unwrap_or_default();
            let why = match error.message() {
                "duplicate key" => format!("{} is given twice", again()),
                message => message.to_owned(),
            };
            self.fault(&Lines::of(&self.text), why, error.span())
        })
    }

    /// A fault of one of the entries of `include`.
    pub(super) fn fault_of_include(&self, entry: usize, why: &str) -> Fault {
        let span = self.table().ok().and_then(|table| {
            let include = table.get_ref().get("include")?;
            let entry = include.get_ref().as_array().and_then(|entries| entries.get(entry));
            Some(entry.unwrap_or(include).span())
        });
        self.fault(&Lines::of(&self.text), format!("include: {why}"), span)
    }

    /// A deserializer's message, in the terms of the file's author.
    fn in_words(&self, rule: Option<String>, field: Option<String>, error: &toml::de::Error) -> String {
        let written = error.span().and_then(|span| self.text.get(span)).unwrap_or_default();
        in_words(rule, field, error.message(), written)
    }

    fn fault(&self, lines: &Lines<'_>, why: String, span: Option<Range<usize>>) -> Fault {
        Fault::new(why).in_file(&self.path, span.map(|span| lines.position(span.start)))
    }
}

/// The table, in which fractions, which no field takes, replace what a deserializer would take although no field does:
/// dates (as a table with a name of the parser's own) and a list in place of a table (as its values in order).
fn table_of(text: &str) -> Result<Spanned<DeTable<'_>>, toml::de::Error> {
    let mut table = DeTable::parse(text)?;
    for (name, value) in table.get_mut().iter_mut() {
        let value = value.get_mut();
        without_dates(value);
        match value {
            DeValue::Array(_) if name.get_ref() == "defaults" => *value = refused(),
            DeValue::Array(rules) if name.get_ref() == "rule" => {
                let lists = rules.iter_mut().map(Spanned::get_mut).filter(|rule| rule.is_array());
                lists.for_each(|list| *list = refused());
            }
            _ => {}
        }
    }
    Ok(table)
}

fn refused() -> DeValue<'static> {
    DeValue::Float(DeFloat::default())
}

fn without_dates(value: &mut DeValue<'_>) {
    match value {
        DeValue::Datetime(_) => *value = refused(),
        DeValue::Array(values) => values.iter_mut().for_each(|value| without_dates(value.get_mut())),
        DeValue::Table(table) => table.iter_mut().for_each(|(_, value)| without_dates(value.get_mut())),
        _ => {}
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

/// The same, of a value that is written like this.
fn in_words(rule: Option<String>, field: Option<String>, message: &str, written: &str) -> String {
    let mut words = String::new();
    // For an unknown field, the message already names it.
    for subject in rule.into_iter().chain(field.filter(|_| !message.starts_with("unknown field"))) {
        let _ = write!(words, "{subject}: ");
    }
    // The value that was found may contain the same words.
    let (what, expected) = message.rsplit_once(", expected ").unwrap_or((message, ""));
    let kinds = ["invalid type: ", "invalid value: ", "invalid length "];
    if let Some(got) = kinds.iter().find_map(|kind| what.strip_prefix(kind)) {
        let _ = write!(words, "expected {}, got {}", expected_in_words(expected), got_in_words(got, written));
    } else if let Some(name) = what.strip_prefix("missing field ") {
        let _ = write!(words, "the {} is missing", name.trim_matches('`'));
    } else if let Some(got) = ["unknown field ", "unknown variant "].iter().find_map(|kind| what.strip_prefix(kind)) {
        let got = got.trim_matches('`');
        let known: Vec<_> = expected.split('`').skip(1).step_by(2).collect();
        let expected = match nearest(known.iter().copied(), got) {
            Some(near) => format!("a known name (did you mean {near}?)"),
            None => format!("one of {}", known.join(", ")),
        };
        let _ = write!(words, "expected {expected}, got {got:?}");
    } else if message == "wanted string or table" || message.starts_with("wanted exactly 1 element") {
        let got = match written.chars().next() {
            Some('[') => "a list",
            Some('{') | None => "a table",
            Some(_) => written,
        };
        let _ = write!(words, "expected a string, got {got}");
    } else {
        words.push_str(message.strip_prefix("on-change: ").unwrap_or(message));
    }
    words
}

fn expected_in_words(expected: &str) -> &str {
    match expected {
        "i64" => "a whole number",
        // Only the least cost is this large.
        "u64" => "a whole number of units, from 0",
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

fn got_in_words<'g>(got: &'g str, written: &'g str) -> &'g str {
    match got {
        "map" => "a table",
        "sequence" => "a list",
        _ => match got.strip_prefix("string ") {
            Some(text) => text,
            // As it is written, which may be a date.
            None if got.starts_with("floating point ") && !written.is_empty() => written,
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
        let parse = || Some(Parsed { table: table_of(&source.text).ok()?, lines: Lines::of(&source.text) });
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
