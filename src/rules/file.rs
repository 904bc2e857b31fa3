//! Sets of rules in files, as TOML.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::attributes::Reading;
use super::definition::Document;
use super::error::Field;
use super::text::{Positions, Source, bad_variable, with_variables};
use super::{Fault, RuleSet, RuleSetError};

/// Some 100,000 rules. Nobody writes more into one file, and a file that grows without end is read no further.
const LONGEST_FILE: u64 = 64 << 20;

/// Says where a field of a rule stands, if the rules are a file's.
pub(super) type Locate<'l> = dyn Fn(usize, &Field) -> Option<Located> + 'l;

pub(super) struct Located {
    file: PathBuf,
    at: Option<(usize, usize)>,
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
    let include = main.include()?;
    let mut sources = vec![main];
    for pattern in include {
        if pattern.ends_with("*.toml") {
            watched.extend(directory.join(&pattern).parent().map(Path::to_owned));
        }
        let mut files = included(directory, &pattern).map_err(|why| sources[0].fault_of_include(why))?;
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
    if let Some((_, why)) = bad_variable(&document.variables) {
        return Err(Fault::new(why).into());
    }
    of_settings(document, &|_, _| None)
}

fn of_sources(sources: &[Source]) -> Result<RuleSet, RuleSetError> {
    let (mut all, mut origins, mut faults) = (Document::default(), Vec::new(), Vec::new());
    for (at, source) in sources.iter().enumerate() {
        let mut read = match source.document() {
            Ok(read) => read,
            Err(error) => {
                faults.extend(error.into_faults());
                continue;
            }
        };
        origins.extend((0..read.rules.len()).map(|rule| Origin { source: at, rule }));
        let rules = std::mem::take(&mut read.rules);
        if at == 0 {
            all = read;
        } else if read != Document::default() {
            let why = "expected [[rule]] alone in an included file, got what belongs into the one that includes it";
            faults.push(Fault::new(why).in_file(&source.path, None));
        }
        all.rules.extend(rules);
    }
    if !faults.is_empty() {
        return Err(RuleSetError::new(faults));
    }
    let positions = Positions::of(sources);
    if let Some((name, why)) = bad_variable(&all.variables) {
        return Err(Fault::new(why).in_file(&sources[0].path, positions.of_variable(name)).into());
    }
    of_settings(all, &|rule, field| {
        let Origin { source, rule } = *origins.get(rule)?;
        Some(Located { file: sources[source].path.clone(), at: positions.of_field(source, rule, field) })
    })
}

/// With defaults and variables for what the rules don't say.
fn of_settings(document: Document, locate: &Locate<'_>) -> Result<RuleSet, RuleSetError> {
    let Document { ignore_case, paths, variables, defaults, rules, .. } = document;
    let (mut definitions, mut faults) = (Vec::with_capacity(rules.len()), Vec::new());
    for (at, rule) in rules.into_iter().enumerate() {
        let name = rule.name.clone();
        match with_variables(rule, &variables) {
            Ok(rule) => definitions.push(rule.or(&defaults)),
            Err((field, why)) => faults.push(located(locate, at, &field, format!("rule {name}: {why}"))),
        }
    }
    if faults.is_empty() {
        RuleSet::compiled(definitions, Reading { ignore_case, paths }, locate)
    } else {
        Err(RuleSetError::new(faults))
    }
}

/// A rule's fault, with its place if that is known.
pub(super) fn located(locate: &Locate<'_>, rule: usize, field: &Field, why: String) -> Fault {
    match locate(rule, field) {
        Some(Located { file, at }) => Fault::new(why).in_file(&file, at),
        None => Fault::new(why),
    }
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
