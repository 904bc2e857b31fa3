//! Sets of rules in files, as TOML.

use std::path::{Path, PathBuf};

use super::compiled::Compiled;
use super::definition::{Defaults, Definition, Document, Reading};
use super::error::{Field, MOST_FAULTS};
use super::snapshot::{Seen, Snapshot, including};
use super::text::{Positions, Said, Source, bad_variable, with_variables};
use super::throttle::Limits;
use super::{Fault, RuleSet, RuleSetError};
use crate::telemetry;

/// Finds where a field of a rule is, if the rules come from a file.
pub(super) type Locate<'l> = dyn Fn(usize, &Field) -> Option<Located> + 'l;

pub(super) struct Located {
    file: PathBuf,
    at: Option<(usize, usize)>,
}

/// Which rule of which file a definition is.
#[derive(Clone, Copy)]
struct Origin {
    source: usize,
    rule: usize,
}

/// How often a file that keeps changing while it is read is read again.
const TRIES: u32 = 10;

/// The set in a file.
pub(super) fn read(path: &Path) -> Result<RuleSet, RuleSetError> {
    let rules = compiled(&read_at_rest(path))?;
    warn(&rules);
    Ok(rules)
}

/// Reports what is doubtful in a set that is put in force.
pub(super) fn warn(rules: &RuleSet) {
    rules.warnings().iter().for_each(|warning| telemetry::doubtful_rule(warning));
}

/// The files as they were at one moment, if they stop changing for long enough.
pub(super) fn read_at_rest(path: &Path) -> Snapshot {
    let mut snapshot = Snapshot::of(path);
    for _ in 1..TRIES {
        if snapshot.is_of_one_moment() {
            break;
        }
        snapshot = Snapshot::of(path);
    }
    snapshot
}

/// The set. One without rules would allow everything, and is probably a file that is still being written.
pub(super) fn compiled(snapshot: &Snapshot) -> Result<RuleSet, RuleSetError> {
    let sources = snapshot.sources.as_ref().map_err(RuleSetError::clone)?;
    let rules = of_sources(sources)?;
    match sources.first() {
        Some(main) if rules.is_empty() => {
            Err(Fault::new("the rules are missing: write at least one [[rule]]").in_file(&main.path, None).into())
        }
        _ => Ok(rules),
    }
}

pub(super) fn parse(text: &str) -> Result<RuleSet, RuleSetError> {
    let source = Source::new(PathBuf::from("rules"), text.to_owned());
    of_sources(&including(source, Path::new(""), &mut Seen::default())?)
}

/// A set that doesn't come from a file, so it can't include any.
pub(super) fn of_document(mut document: Document) -> Result<RuleSet, RuleSetError> {
    if !document.include.is_empty() {
        return Err(Fault::new("include: only rules that are read from a file can have it").into());
    }
    let rules = std::mem::take(&mut document.rules);
    let rules = rules.into_iter().enumerate().map(|(rule, definition)| (Origin { source: 0, rule }, definition));
    of_rules(&document, rules.collect(), Vec::new(), &[])
}

fn of_sources(sources: &[Source]) -> Result<RuleSet, RuleSetError> {
    let (mut settings, mut all, mut faults) = (Document::default(), Vec::new(), Vec::new());
    for (source, file) in sources.iter().enumerate() {
        let Said { settings: read, rules, faults: more } = match file.read() {
            Ok(said) => said,
            Err(fault) => {
                faults.push(fault);
                continue;
            }
        };
        faults.extend(more);
        all.extend(rules.into_iter().map(|(rule, definition)| (Origin { source, rule }, definition)));
        if source == 0 {
            settings = read;
        } else if let Some(setting) = read.setting() {
            let why =
                format!("expected only [[rule]] in an included file (settings belong in the main one), got {setting}");
            faults.push(Fault::new(why).in_file(&file.path, None));
        }
    }
    of_rules(&settings, all, faults, sources)
}

/// Fills in defaults and variables. Faults in one rule don't hide those of others.
fn of_rules(
    settings: &Document,
    rules: Vec<(Origin, Definition)>,
    mut faults: Vec<Fault>,
    sources: &[Source],
) -> Result<RuleSet, RuleSetError> {
    let Document { ignore_case, paths, descriptors, variables, defaults, .. } = settings;
    let positions = Positions::of(sources);
    let in_main = |why: String, at| match sources.first() {
        Some(main) => Fault::new(why).in_file(&main.path, at),
        None => Fault::new(why),
    };
    if let Some((name, why)) = bad_variable(variables) {
        faults.push(in_main(why, positions.of_setting("variables", name)));
    }
    if let Some((field, why)) = bad_default(defaults) {
        faults.push(in_main(why, positions.of_setting("defaults", field)));
        return Err(RuleSetError::new(faults));
    }
    let locate = |origin: Origin, field: &Field| {
        let file = sources.get(origin.source)?.path.clone();
        Some(Located { file, at: positions.of_field(origin.source, origin.rule, field) })
    };
    let (mut origins, mut definitions) = (Vec::with_capacity(rules.len()), Vec::with_capacity(rules.len()));
    for (origin, rule) in rules {
        let name = rule.name.clone();
        match with_variables(rule, variables) {
            Ok(rule) => {
                origins.push(origin);
                definitions.push(rule.or(defaults));
            }
            Err((field, why)) if faults.len() < MOST_FAULTS => {
                faults.push(located(&|_, field| locate(origin, field), 0, &field, format!("rule {name}: {why}")));
            }
            Err(_) => {}
        }
    }
    let reading = Reading { ignore_case: *ignore_case, paths: *paths, descriptors: *descriptors };
    match RuleSet::compiled(definitions, reading, &|rule, field| locate(*origins.get(rule)?, field)) {
        Ok(rules) if faults.is_empty() => return Ok(rules),
        Ok(_) => {}
        Err(error) => faults.extend(error.into_faults()),
    }
    faults.sort_by_key(|fault| (sources.iter().position(|source| Some(&*source.path) == fault.file()), fault.at));
    Err(RuleSetError::new(faults))
}

/// A default that no rule could have, whether or not a rule uses it.
fn bad_default(defaults: &Defaults) -> Option<(&'static str, String)> {
    let mut rule = Definition::new("defaults");
    (rule.key, rule.limits) = ("global".into(), vec!["gcra 1000000/1s".into()]);
    let (field, why) = Compiled::new(&rule.or(defaults), Reading::default(), &mut Limits::default()).err()?;
    Some((field.name, format!("defaults: {why}")))
}

/// What is wrong with the rule of this name.
pub(super) fn of_rule(name: &str, why: &str) -> String {
    let subject = if name.is_empty() { "rule".to_owned() } else { format!("rule {name}") };
    if why.starts_with(&format!("{subject}: ")) && !name.is_empty() {
        return why.to_owned();
    }
    // A limit's own error says `rule`, since its text may be a whole rule elsewhere.
    match why.strip_prefix("rule: ") {
        Some(why) => format!("{subject}: limits: {why}"),
        None => format!("{subject}: {why}"),
    }
}

/// A rule's fault, with its location if known.
pub(super) fn located(locate: &Locate<'_>, rule: usize, field: &Field, why: String) -> Fault {
    match locate(rule, field) {
        Some(Located { file, at }) => Fault::new(why).in_file(&file, at),
        None => Fault::new(why),
    }
}
