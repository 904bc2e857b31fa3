//! Sets of rules in files, as TOML.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::attributes::Reading;
use super::definition::{Definition, Document};
use super::error::{Place, Within};
use super::{Fault, RuleSet, RuleSetError};
use crate::rule::Rule;

/// Some 100,000 rules. Nobody writes more into one file, and a file that grows without end is read no further.
const LONGEST_FILE: u64 = 64 << 20;

/// Where a fault stands.
pub(super) struct Located {
    pub(super) file: PathBuf,
    pub(super) at: Option<(usize, usize)>,
}

/// One file that was read.
#[derive(Hash)]
struct Source {
    path: PathBuf,
    text: String,
}

/// A set's file and those that it includes, as they were at one moment.
pub(super) struct Files {
    sources: Result<Vec<Source>, RuleSetError>,
    /// All that a change of the set would show on: its files, and the directories of which it includes each file.
    pub(super) watched: Vec<PathBuf>,
}

/// Which rule of which file a definition is.
#[derive(Clone, Copy)]
struct Origin {
    source: usize,
    rule: usize,
}

/// The set in a file.
pub(super) fn read(path: &Path) -> Result<RuleSet, RuleSetError> {
    Files::read(path).compiled()
}

impl Files {
    pub(super) fn read(path: &Path) -> Self {
        let mut watched = vec![path.to_owned()];
        let sources = sources(path, &mut watched);
        Self { sources, watched }
    }

    /// What tells these contents, or what kept them from being read, from others.
    pub(super) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        match &self.sources {
            Ok(sources) => sources.hash(&mut hasher),
            Err(error) => error.to_string().hash(&mut hasher),
        }
        hasher.finish()
    }

    /// The set. One without rules would allow everything: it is more likely a file that is still being written.
    pub(super) fn compiled(self) -> Result<RuleSet, RuleSetError> {
        let sources = self.sources?;
        let rules = of_sources(&sources)?;
        match sources.first() {
            Some(main) if rules.is_empty() => {
                Err(Fault::new("expected at least one [[rule]], got none").in_file(&main.path, None).into())
            }
            _ => Ok(rules),
        }
    }
}

/// The file and those that it includes; what it takes to see that they change is added to the list.
fn sources(path: &Path, watched: &mut Vec<PathBuf>) -> Result<Vec<Source>, RuleSetError> {
    let main = Source { path: path.to_owned(), text: text_of(path)? };
    including(main, path.parent().unwrap_or(Path::new("")), watched)
}

/// This, and what it includes.
fn including(main: Source, directory: &Path, watched: &mut Vec<PathBuf>) -> Result<Vec<Source>, RuleSetError> {
    let include = document(&main)?.include;
    let mut sources = vec![main];
    for pattern in include {
        if pattern.ends_with("*.toml") {
            watched.extend(directory.join(&pattern).parent().map(Path::to_owned));
        }
        let mut files = included(directory, &pattern).map_err(|why| {
            let (at, path) = (place_of_include(&sources[0].text), &sources[0].path);
            Fault::new(format!("include: {why}")).in_file(path, at)
        })?;
        // A pattern may match the file that it stands in.
        files.retain(|path| *path != sources[0].path);
        watched.extend(files.iter().cloned());
        for path in files {
            let text = text_of(&path)?;
            sources.push(Source { path, text });
        }
    }
    Ok(sources)
}

pub(super) fn parse(text: &str) -> Result<RuleSet, RuleSetError> {
    let source = Source { path: PathBuf::from("rules"), text: text.to_owned() };
    of_sources(&including(source, Path::new(""), &mut Vec::new())?)
}

/// A set that isn't a file's: it has nothing to include.
pub(super) fn of_document(document: Document) -> Result<RuleSet, RuleSetError> {
    if !document.include.is_empty() {
        return Err(Fault::new("include: expected none of rules that aren't read from a file, got some").into());
    }
    let Document { ignore_case, paths, variables, defaults, rules, .. } = document;
    if let Some((_, why)) = bad_variable(&variables) {
        return Err(Fault::new(why).into());
    }
    let rules = rules.into_iter().map(|rule| rule.with(&variables).or(&defaults)).collect();
    RuleSet::compiled(rules, Reading { ignore_case, paths }, &|_, _| None)
}

fn of_sources(sources: &[Source]) -> Result<RuleSet, RuleSetError> {
    let (mut settings, mut rules, mut origins) = (Document::default(), Vec::new(), Vec::new());
    for (at, source) in sources.iter().enumerate() {
        let mut read = document(source)?;
        origins.extend((0..read.rules.len()).map(|rule| Origin { source: at, rule }));
        rules.append(&mut read.rules);
        if at == 0 {
            settings = read;
        } else if read != Document::default() {
            let why = "expected [[rule]] alone in an included file, got what belongs into the one that includes it";
            return Err(Fault::new(why).in_file(&source.path, None).into());
        }
    }
    let Document { ignore_case, paths, variables, defaults, .. } = settings;
    let rules: Vec<Definition> = rules.into_iter().map(|rule| rule.with(&variables).or(&defaults)).collect();
    let positions = Positions::of(sources);
    if let Some((name, why)) = bad_variable(&variables) {
        return Err(Fault::new(why).in_file(&sources[0].path, positions.of_variable(name)).into());
    }
    RuleSet::compiled(rules, Reading { ignore_case, paths }, &|rule, place| {
        let Origin { source, rule } = *origins.get(rule)?;
        Some(Located { file: sources[source].path.clone(), at: positions.at(source, rule, place) })
    })
}

/// The text of a file: not of what only looks like one, which might have no end.
fn text_of(path: &Path) -> Result<String, Fault> {
    let fault = |why: String| Fault::new(why).in_file(path, None);
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::InvalidData => fault("expected UTF-8, got bytes that aren't".into()),
        _ => fault(format!("expected a file of rules that can be read, got: {error}")),
    };
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        let got = if metadata.is_dir() { "a directory" } else { "something else" };
        return Err(fault(format!("expected a file of rules, got {got}")));
    }
    let mut text = String::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    file.take(LONGEST_FILE + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > LONGEST_FILE {
        return Err(fault(format!("expected a file of at most {} MiB, got a longer one", LONGEST_FILE >> 20)));
    }
    Ok(text)
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
