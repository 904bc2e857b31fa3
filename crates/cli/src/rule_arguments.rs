//! The arguments of a command that say what it is about: a rule, where its keys are, and what its limits count.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use tollgate::{KeySecret, Limiter, Rule};

use crate::attributes::{self, Pairs, pairs};
use crate::options;
use crate::rules_file::{NeededCosts, RulesFile, Ruling};
use crate::subject::Subject;

/// The name of a rule that is given without one.
pub(crate) const UNNAMED: &str = "cli";

/// At the end of the help of every command that takes a rule.
pub(crate) const SEE_RULES: &str = "How a RULE is written: tollgate help rules";

/// How rules are written.
pub(crate) const GRAMMAR: &str = "\
How a RULE is written:
  A RULE is a limit in one line:

    ALGORITHM UNITS/PERIOD [burst N] [max-debt N|none]
      [start PERIOD|first-hit|spread] [max N] [shards N]
    fixed-window UNITS/day|week|month|year [shards N] [tz ZONE]
    concurrency N ttl PERIOD [shards N]

  Not every algorithm has every option; a PERIOD is in us, ms, s, m, h or d,
  such as 10s or 1h30m.

    token-bucket 100/1s burst 20           100 a second, up to 20 at once;
                                           gcra 100/1s burst 20 is the same
    token-bucket 10/1s max-debt 50         reservations may owe up to 50 units
    fixed-window 100/1h                    100 from each full hour on
    fixed-window 250/day tz Europe/Zurich  each day there (UTC without tz)
    sliding-window 1000/1h                 a sliding estimate, in little memory:
                                           sometimes 1001, so for small limits
                                           take sliding-log
    sliding-log 5/10s                      exactly 5 in any 10 seconds
    concurrency 8 ttl 30s                  8 held at once, each for 30 seconds
    token-bucket 100000/1s shards 8        on a cluster in eight keys, since it
                                           is too hot for one node

  max-debt unlimited: reservations may owe any number of units.
  max N: the largest rate allowed for a sliding-log (10000 without it).
  start 10m: windows begin 10 minutes after each multiple of the period.
  start first-hit: a window begins at a key's first request.
  start spread: each key's windows have an offset of their own.

  Several limits, as further RULEs or separated by commas, are decided
  together, all or nothing. Their keys in Redis are those of a rule called
  cli, unless --name gives another. Give any other rule of a service as JSON:

    {\"limits\": [\"gcra 9/s\", {\"limit\": \"gcra 99/m\", \"key\": \"org\"}], \"tag\": \"org\"}

  In JSON, a limit may have a name, and may count another part of the request
  (key) than the rest. tag names the part whose value goes in the braces of
  every key, so that Redis Cluster keeps them together. --attr gives these
  parts. A rule may also have name, cost, on_change, overage, block_for,
  hash_keys, on_error and processes.

Examples:
  tollgate probe \"token-bucket 5/10s\" user:42 --count 7
  tollgate probe \"token-bucket 10/1s\" \"fixed-window 250/1d\" user:42 --name api
  tollgate probe '{\"limits\":[\"gcra 9/s\"],\"tag\":\"org\"}' user:42 --attr org=acme

A service's own file of rules:
  --rules gives the file, and RULE is then the name of one of its rules:

    tollgate inspect --rules rules.toml uploads user:42 --attr org=acme \\
      --prefix shop --url redis://127.0.0.1:6379

  Spell the key as the rule counts it; --attr gives what else the rule counts.
  `tollgate rules explain` says which rule applies to a request, and which keys
  it writes.

Keys:
  A key is any bytes. Printable keys are shown as they are. \\xff stands for a
  byte that isn't UTF-8, \\n or \\u{1b} for a character that can't be printed,
  and \\\\ for a backslash.
";

/// The usage of a command on several rules and one key: clap would show `<RULE> <KEY>...`.
macro_rules! usage_of_rules_and_key {
    ($command:literal) => {
        concat!(
            "tollgate ",
            $command,
            " [OPTIONS] <RULE>... <KEY>\n       tollgate ",
            $command,
            " [OPTIONS] --rules <FILE> <NAME> [KEY]"
        )
    };
}
pub(crate) use usage_of_rules_and_key;

/// Rules and a key, as positional arguments.
#[derive(Debug, Args)]
pub(crate) struct RulesAndKey {
    /// The rule, such as "token-bucket 5/10s", and the key, such as user:42.
    ///
    /// Several rules are decided together, all or nothing. The key comes last: who is limited.
    // Options may stand between them, so clap takes them one by one: this is shown as <RULE> <KEY>...
    #[arg(value_name = "RULE> <KEY", num_args = 1.., required = true)]
    rules_and_key: Vec<OsString>,
}

impl RulesAndKey {
    /// The name of a rule in a service's set, and the key.
    fn name_and_key(&self) -> Result<(String, Option<&[u8]>)> {
        let name = |name: &OsString| name.to_string_lossy().into_owned();
        match self.rules_and_key.as_slice() {
            [one] => Ok((name(one), None)),
            [one, key] => Ok((name(one), Some(key.as_encoded_bytes()))),
            several => {
                let expected = "with --rules, expected the NAME of one of the file's rules and a KEY";
                bail!("{expected}, got {} words", several.len())
            }
        }
    }

    pub(crate) fn split(&self) -> Result<(Vec<String>, &[u8])> {
        let Some((key, rules @ [_, ..])) = self.rules_and_key.split_last() else {
            bail!("RULE or KEY is missing: give both, such as \"token-bucket 5/10s\" user:42");
        };
        Ok((rules.iter().map(|rule| rule.to_string_lossy().into_owned()).collect(), key.as_encoded_bytes()))
    }
}

/// The options of a rule: its name, the file it is in, and what its limits count.
#[derive(Debug, Args)]
pub(crate) struct RuleOptions {
    /// The rule's name, which is part of its keys.
    ///
    /// Default: cli, or the name in its JSON.
    #[arg(long, value_name = "NAME", conflicts_with = "set", help_heading = "Rule")]
    name: Option<String>,
    /// The service's own set of rules, in TOML.
    ///
    /// RULE is then the name of one of them, and KEY is spelled as that rule counts it, such as user:42; it may be left
    /// out if --attr gives its parts.
    #[arg(long = "rules", value_name = "FILE", help_heading = "Rule")]
    set: Option<PathBuf>,
    /// An attribute of the request, such as org=acme; once for each.
    ///
    /// With --rules, what the rule reads; else what limits count instead of the key, and the tag.
    #[arg(long = "attr", alias = "part", value_name = "NAME=VALUE", help_heading = "Rule")]
    parts: Vec<OsString>,
    #[command(flatten)]
    place: KeyOptions,
}

/// What a rule's denials do.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Denials {
    /// How long a denied key is blocked, such as 15m.
    ///
    /// Denials meanwhile don't extend the block. Default: no block, or what a rule in JSON or from --rules says.
    #[arg(long, value_name = "D", value_parser = options::duration, help_heading = "Rule")]
    block_for: Option<Duration>,
}

/// Where a service's keys are, and how they are spelled.
#[derive(Debug, Args)]
pub(crate) struct KeyOptions {
    /// The prefix of the service's keys.
    ///
    /// A replay or a load appends a name of its own, so that it starts with no keys, touches no others, and can remove
    /// its keys at the end.
    #[arg(long, default_value = "tollgate", help_heading = "Rule")]
    prefix: String,
    /// A file with the secret that the service hashes its keys with.
    ///
    /// A newline at its end is ignored. Or put the secret itself in TOLLGATE_KEY_SECRET. Default: none, keys are stored
    /// in plain text.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_KEY_SECRET_FILE", help_heading = "Rule")]
    key_secret_file: Option<PathBuf>,
}

impl Denials {
    /// The subject, with a rule that blocks denied keys if asked for.
    pub(crate) fn applied(self, mut subject: Subject) -> Result<Subject> {
        subject.rule = self.applied_to(subject.rule)?;
        Ok(subject)
    }

    /// The rule, which blocks denied keys if asked for.
    pub(crate) fn applied_to(self, rule: Rule) -> Result<Rule> {
        Ok(match self.block_for {
            Some(time) => rule.block_for(time)?,
            None => rule,
        })
    }
}

impl RuleOptions {
    /// The path of the service's own file, if given.
    pub(crate) fn rules_path(&self) -> Option<&Path> {
        self.set.as_deref()
    }

    /// These files, and the others that are read.
    pub(crate) fn files_read<'p>(&'p self, files: &'p [PathBuf]) -> Vec<Option<&'p Path>> {
        let others = [self.set.as_deref(), self.place.key_secret_file.as_deref()];
        files.iter().map(|file| Some(file.as_path())).chain(others).collect()
    }

    /// The rule written in these arguments, with the parts that its limits count.
    pub(crate) fn subject(&self, rules: &[String]) -> Result<Subject> {
        let rule = match rules {
            [one] if is_json(one) => from_json(one, self.name.as_deref())?,
            [] => bail!("a rule is missing: give at least one, such as \"token-bucket 5/10s\""),
            lines => from_lines(lines, self.name.as_deref().unwrap_or(UNNAMED))?,
        };
        Subject::of(rule, pairs("--attr", &self.parts)?)
    }

    /// The rule, and the key that it counts. If `costs` is false, the rule's cost needn't be known.
    pub(crate) fn ruling(&self, target: &RulesAndKey, needed: NeededCosts) -> Result<Ruling> {
        let Some(service) = self.rules_file()? else {
            let (rules, key) = target.split()?;
            return Ok(Ruling::Limits(Box::new(self.subject(&rules)?), key.to_vec()));
        };
        let (name, key) = target.name_and_key()?;
        service.ruling(&name, key, self.attributes()?, needed)
    }

    /// The service's set of rules, if it was given.
    pub(crate) fn rules_file(&self) -> Result<Option<RulesFile>> {
        self.set.as_deref().map(RulesFile::read).transpose()
    }

    /// The request's attributes as given, for a set of rules.
    pub(crate) fn attributes(&self) -> Result<Pairs> {
        let given = pairs("--attr", &self.parts)?;
        attributes::check(&given).map_err(|why| anyhow!("--attr: {why}"))?;
        Ok(given)
    }

    /// Whether a secret for hashing keys was given.
    pub(crate) fn has_key_secret(&self) -> Result<bool> {
        self.place.key_secret().map(|secret| secret.is_some())
    }

    /// The limiter for the service's keys.
    pub(crate) fn of_service(&self, limiter: Limiter) -> Result<Limiter> {
        self.place.of_service(limiter)
    }

    /// The limiter for keys under this prefix, spelled as the service's are.
    pub(crate) fn of_prefix(&self, prefix: &str, limiter: Limiter) -> Result<Limiter> {
        self.place.of_prefix(prefix, limiter)
    }

    /// A way to make any limiter one for keys of this prefix.
    pub(crate) fn to_prefix(&self, prefix: &str) -> Result<impl Fn(Limiter) -> Result<Limiter>> {
        self.place.to_prefix(prefix)
    }

    /// A prefix under the service's that no other run uses.
    pub(crate) fn own_prefix(&self, what: &str) -> String {
        own_prefix(&self.place.prefix, what)
    }
}

impl KeyOptions {
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn of_service(&self, limiter: Limiter) -> Result<Limiter> {
        self.of_prefix(&self.prefix, limiter)
    }

    fn of_prefix(&self, prefix: &str, limiter: Limiter) -> Result<Limiter> {
        self.to_prefix(prefix)?(limiter)
    }

    fn to_prefix(&self, prefix: &str) -> Result<impl Fn(Limiter) -> Result<Limiter>> {
        // Read once: the file may be a pipe.
        let secret = self.key_secret()?;
        Ok(move |limiter: Limiter| {
            let with_prefix = limiter.to_builder().prefix(prefix)?;
            Ok(match &secret {
                Some(secret) => with_prefix.key_secret(secret).build(),
                None => with_prefix.build(),
            })
        })
    }

    fn key_secret(&self) -> Result<Option<KeySecret>> {
        let given = |path: &&PathBuf| !path.as_os_str().is_empty();
        let (secret, whence) = match self.key_secret_file.as_ref().filter(given) {
            Some(path) => {
                let whence = format!("--key-secret-file {}", path.display());
                let mut secret = std::fs::read(path).with_context(|| whence.clone())?;
                if secret.pop_if(|byte| *byte == b'\n').is_some() {
                    secret.pop_if(|byte| *byte == b'\r');
                }
                (secret, whence)
            }
            None => match std::env::var_os("TOLLGATE_KEY_SECRET").filter(|secret| !secret.is_empty()) {
                Some(secret) => (secret.into_encoded_bytes(), "TOLLGATE_KEY_SECRET".to_owned()),
                None => return Ok(None),
            },
        };
        KeySecret::new(secret).map(Some).context(whence)
    }
}

/// A rule in one text, limits or JSON, all of whose limits count the key.
pub(crate) fn subject_of(text: &str) -> Result<Subject> {
    let rule = if is_json(text) { from_json(text, None)? } else { from_lines(&[text.to_owned()], UNNAMED)? };
    if let Some(part) = rule.counted_parts().flatten().chain(rule.tag()).next() {
        bail!("rule: must count the key alone, but counts or is tagged by {part}");
    }
    Subject::of(rule, Vec::new())
}

/// A prefix under this one that no other run uses, so that keys start empty and other keys aren't touched.
pub(crate) fn own_prefix(prefix: &str, what: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{prefix}:{what}-{}-{}", std::process::id(), now.as_nanos())
}

/// Whether it was made by [`own_prefix`].
pub(crate) fn is_own_prefix(prefix: &str) -> bool {
    let number = |text: Option<&str>| text.is_some_and(|text| text.parse::<u128>().is_ok());
    let mut words = prefix.rsplit(':').next().unwrap_or_default().rsplitn(3, '-');
    number(words.next()) && number(words.next()) && words.next().is_some()
}

/// The name of a rule, given by its name or as JSON.
pub(crate) fn name_of(rule: &str) -> Result<String> {
    if is_json(rule) { Ok(from_json(rule, None)?.name().unwrap_or_default().to_owned()) } else { Ok(rule.to_owned()) }
}

fn is_json(rule: &str) -> bool {
    rule.trim_start().starts_with(['{', '['])
}

/// A rule as JSON in the form of a service's own file, with this name unless it has one.
fn from_json(text: &str, name: Option<&str>) -> Result<Rule> {
    let rule: Rule = serde_json::from_str(text).map_err(|error| {
        let form = "{\"name\": \"api\", \"limits\": [\"token-bucket 10/1s\"]}";
        anyhow!("rule in JSON: {error}; the form is {form}")
    })?;
    match (rule.name(), name) {
        (Some(own), Some(name)) if own != name => {
            bail!("--name: expected {own}, as the rule in JSON says, got {name}")
        }
        (Some(_), _) => Ok(rule),
        (None, name) => Ok(rule.named(name.unwrap_or(UNNAMED))?),
    }
}

/// A rule with this name and these limits.
pub(crate) fn from_lines(rules: &[String], name: &str) -> Result<Rule> {
    if let Some(json) = rules.iter().find(|rule| is_json(rule)) {
        bail!("rule: a rule in JSON takes no others beside it: put all limits in the list of {}", json.trim());
    }
    let read = rules.iter().map(|rule| line(rule)).collect::<Result<Vec<_>, _>>()?;
    let mut limits = read.iter().flat_map(Rule::limits).cloned();
    let first = limits.next().context("rule: no limit is given")?;
    limits.try_fold(Rule::new(name, first)?, |rule, limit| Ok(rule.and(limit)?))
}

/// One limit, or several separated by commas, with a hint where quotes seem to be missing.
fn line(text: &str) -> Result<Rule> {
    text.parse().map_err(|error| {
        let unquoted = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
        let hint = if unquoted { "; is a rule not quoted, as in \"token-bucket 5/10s\"?" } else { "" };
        anyhow!("{error}{hint}")
    })
}
