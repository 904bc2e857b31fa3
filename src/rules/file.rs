//! Sets of rules in files, as TOML.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::definition::{Definition, Document};
use super::error::{Place, Within};
use super::{Fault, RuleSet, RuleSetError};
use crate::rule::Rule;

/// Where a fault stands.
pub(super) struct Located {
    pub(super) file: PathBuf,
    pub(super) at: Option<(usize, usize)>,
}

/// One file that was read.
struct Source {
    path: PathBuf,
    text: String,
}

/// Which rule of which file a definition is.
#[derive(Clone, Copy)]
struct Origin {
    source: usize,
    rule: usize,
}

/// The set in a file. One without rules would allow everything: it is more likely a file that is still being written.
pub(super) fn read(path: &Path) -> Result<RuleSet, RuleSetError> {
    let text = text_of(path).map_err(RuleSetError::from)?;
    let directory = path.parent().unwrap_or(Path::new(""));
    let rules = of_text(Source { path: path.to_owned(), text }, directory)?;
    if rules.is_empty() {
        return Err(Fault::new("expected at least one [[rule]], got none").in_file(path, None).into());
    }
    Ok(rules)
}

/// All that a change of the set would show on: its files, and the directories of which it includes each file.
pub(super) fn watched(path: &Path) -> Vec<PathBuf> {
    let mut watched = vec![path.to_owned()];
    let document = fs::read_to_string(path).ok().and_then(|text| toml::from_str::<Document>(&text).ok());
    let directory = path.parent().unwrap_or(Path::new(""));
    for pattern in document.iter().flat_map(|document| &document.include) {
        if pattern.ends_with("*.toml") {
            watched.extend(directory.join(pattern).parent().map(Path::to_owned));
        }
        watched.extend(included(directory, pattern).unwrap_or_default());
    }
    watched
}

pub(super) fn parse(text: &str) -> Result<RuleSet, RuleSetError> {
    let source = Source { path: PathBuf::from("rules"), text: text.to_owned() };
    of_text(source, Path::new(""))
}

/// A set that isn't a file's: it has nothing to include.
pub(super) fn of_document(document: Document) -> Result<RuleSet, RuleSetError> {
    if !document.include.is_empty() {
        return Err(Fault::new("include: expected none of rules that aren't read from a file, got some").into());
    }
    let Document { ignore_case, variables, defaults, rules, .. } = document;
    if let Some((_, why)) = bad_variable(&variables) {
        return Err(Fault::new(why).into());
    }
    let rules = rules.into_iter().map(|rule| rule.with(&variables).or(&defaults)).collect();
    RuleSet::compiled(rules, ignore_case, &|_, _| None)
}

fn of_text(main: Source, directory: &Path) -> Result<RuleSet, RuleSetError> {
    let Document { include, ignore_case, variables, defaults, mut rules } = document(&main)?;
    let mut origins: Vec<_> = (0..rules.len()).map(|rule| Origin { source: 0, rule }).collect();
    let mut sources = vec![main];
    for pattern in include {
        let files = included(directory, &pattern).map_err(|why| {
            let (at, path) = (place_of_include(&sources[0].text), &sources[0].path);
            Fault::new(format!("include: {why}")).in_file(path, at)
        })?;
        for path in files {
            let text = text_of(&path).map_err(RuleSetError::from)?;
            let source = Source { path, text };
            let more = document(&source)?;
            let others = Document { rules: Vec::new(), ..more.clone() };
            if others != Document::default() {
                let why = "expected [[rule]] alone in an included file, got what belongs into the one that includes it";
                return Err(Fault::new(why).in_file(&source.path, None).into());
            }
            origins.extend((0..more.rules.len()).map(|rule| Origin { source: sources.len(), rule }));
            rules.extend(more.rules);
            sources.push(source);
        }
    }
    let rules: Vec<Definition> = rules.into_iter().map(|rule| rule.with(&variables).or(&defaults)).collect();
    let positions = Positions::of(&sources);
    if let Some((name, why)) = bad_variable(&variables) {
        return Err(Fault::new(why).in_file(&sources[0].path, positions.of_variable(name)).into());
    }
    RuleSet::compiled(rules, ignore_case, &|rule, place| {
        let Origin { source, rule } = *origins.get(rule)?;
        Some(Located { file: sources[source].path.clone(), at: positions.at(source, rule, place) })
    })
}

fn text_of(path: &Path) -> Result<String, Fault> {
    fs::read_to_string(path).map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::InvalidData => "expected UTF-8, got bytes that aren't".to_owned(),
            _ => format!("expected a file of rules that can be read, got: {error}"),
        };
        Fault::new(why).in_file(path, None)
    })
}

fn document(source: &Source) -> Result<Document, Fault> {
    toml::from_str(&source.text).map_err(|error| {
        let at = error.span().map(|span| line_and_column(&source.text, span.start));
        Fault::new(error.message()).in_file(&source.path, at)
    })
}

/// The files of one entry of `include`.
fn included(directory: &Path, pattern: &str) -> Result<Vec<PathBuf>, String> {
    let path = directory.join(pattern);
    if path.file_name().is_none_or(|name| name != "*.toml") {
        return if pattern.contains('*') {
            Err(format!("expected a file, or *.toml at the end for all of a directory, got {pattern:?}"))
        } else {
            Ok(vec![path])
        };
    }
    let within = path.parent().unwrap_or(Path::new(""));
    let entries = fs::read_dir(if within.as_os_str().is_empty() { Path::new(".") } else { within });
    let entries =
        entries.map_err(|error| format!("expected a directory that can be read, got {pattern:?}: {error}"))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| within.join(entry.file_name())))
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        // What editors and mounts keep beside a file begins with a dot.
        .filter(|path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')))
        .collect();
    files.sort();
    Ok(files)
}

/// The positions of all values in the files, read a second time where something is wrong.
struct Positions<'s> {
    files: Vec<(&'s str, OnceCell<Option<Spanned<DeTable<'s>>>>)>,
}

impl<'s> Positions<'s> {
    fn of(sources: &'s [Source]) -> Self {
        Self { files: sources.iter().map(|source| (source.text.as_str(), OnceCell::new())).collect() }
    }

    /// Line and column of a variable, all of which stand in the first file.
    fn of_variable(&self, name: &str) -> Option<(usize, usize)> {
        let (text, table) = self.files.first()?;
        let table = table.get_or_init(|| DeTable::parse(text).ok()).as_ref()?;
        let variable = table.get_ref().get("variables")?.get_ref().as_table()?.get(name)?;
        Some(line_and_column(text, variable.span().start))
    }

    /// Line and column of a rule's field, of what stands there, or of the rule.
    fn at(&self, source: usize, rule: usize, place: &Place) -> Option<(usize, usize)> {
        let (text, table) = &self.files[source];
        let table = table.get_or_init(|| DeTable::parse(text).ok()).as_ref()?;
        let rules = table.get_ref().get("rule")?.get_ref().as_array()?;
        let rule: &Spanned<DeValue<'_>> = rules.get(rule)?;
        let Some(field) = rule.get_ref().get(place.field) else {
            return Some(line_and_column(text, rule.span().start));
        };
        let within = match &place.within {
            Within::All => None,
            Within::Index(index) => field.get_ref().as_array().and_then(|array| array.get(*index)),
            Within::Key(key) => field.get_ref().as_table().and_then(|table| table.get(key.as_str())),
        };
        Some(line_and_column(text, within.unwrap_or(field).span().start))
    }
}

/// A variable that isn't a limit, whether a rule uses it or not.
fn bad_variable(variables: &BTreeMap<String, String>) -> Option<(&str, String)> {
    variables.iter().find_map(|(name, text)| {
        let error = text.parse::<Rule>().err()?;
        Some((name.as_str(), format!("variables: {name}: {error}")))
    })
}

fn place_of_include(text: &str) -> Option<(usize, usize)> {
    let table = DeTable::parse(text).ok()?;
    table.get_ref().get("include").map(|include| line_and_column(text, include.span().start))
}

/// From 1; columns in characters.
fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}
