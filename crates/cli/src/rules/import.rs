//! `tollgate rules import`: rules from the configuration of another limiter.

mod account;
mod attribute;
mod draft;
mod envoy;
mod fault;
mod limitador;
mod nginx;
mod yaml;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use tollgate::rules::RuleSet;

use crate::messages;
use crate::output::wrapped;
use crate::rules_file::expect_no_address;
use account::{Account, lines};
use draft::Rule;
use fault::Fault;

/// The largest source, in bytes: far more than the limits of a whole company.
const LARGEST: u64 = 16 << 20;

/// The width of comments, with their `# `.
const WIDTH: usize = 118;

#[derive(Debug, Args)]
pub(crate) struct Import {
    /// The other limiter's configuration; - reads standard input.
    file: PathBuf,
    /// Which limiter's configuration it is. Default: detected from its content.
    #[arg(long, value_enum)]
    format: Option<Format>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// YAML of Envoy's rate limit service: a domain and its descriptors.
    Envoy,
    /// YAML of limitador: a list of limits.
    Limitador,
    /// limit_req and limit_conn of nginx; of several files, what nginx -T prints.
    Nginx,
}

/// The rules from a source.
#[derive(Debug, Default)]
struct Imported {
    rules: Vec<Rule>,
    account: Account,
    /// Comments on the whole file.
    about: Vec<String>,
}

impl Imported {
    /// Leaves out the rules whose requests are all blocked by earlier ones.
    fn uncover(&mut self) {
        let (kept, covered) = draft::uncovered(std::mem::take(&mut self.rules));
        self.rules = kept;
        for (rule, by) in covered {
            self.account.leave(rule.line..=rule.line, &format!("{} blocks all that {} would count", by, rule.name));
        }
    }
}

impl Import {
    pub(super) fn run(self) -> Result<ExitCode> {
        expect_no_address(&self.file)?;
        let name = self.file.display().to_string();
        let text = self.read().with_context(|| name.clone())?;
        let format = self.format.or_else(|| looks(&text));
        let format = format.ok_or_else(|| {
            anyhow!("{name}: not recognised as a configuration of Envoy's ratelimit, limitador or nginx: see --format")
        })?;
        let imported = translated(format, &text).map_err(|fault| anyhow!("{name}:{}: {}", fault.line, fault.what))?;
        if imported.rules.is_empty() {
            bail!("{name}: no limit to import{}", because(&imported.account));
        }
        let file = written(&name, format, &imported);
        let rules = checked(&name, &file)?;
        anstream::stdout().write_all(file.as_bytes())?;
        let asked: std::collections::BTreeSet<_> =
            rules.attributes().filter(|name| !["ip", "path", "method"].contains(name)).collect();
        if !asked.is_empty() {
            let asked = Vec::from_iter(asked).join(", ");
            let how = "RateLimitLayer::header or ::attribute";
            messages::note(format_args!("{name}: these rules need a service that gives {asked} ({how})"));
        }
        let differences = imported.account.differences();
        for (line, how) in &differences {
            messages::fault(format_args!("{name}:{line}: warning: {how}"));
        }
        Ok(if differences.is_empty() && rules.warnings().is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    fn read(&self) -> Result<String> {
        let mut bytes = Vec::new();
        if self.file.as_os_str() == "-" {
            std::io::stdin().lock().take(LARGEST + 1).read_to_end(&mut bytes)?;
        } else {
            std::fs::File::open(&self.file)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
        }
        if bytes.len() as u64 > LARGEST {
            bail!("larger than {LARGEST} bytes");
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
            anyhow!("line {line}: not UTF-8")
        })?;
        Ok(text.trim_start_matches('\u{feff}').to_owned())
    }
}

/// The first difference, where nothing is left to limit.
fn because(account: &Account) -> String {
    account.differences().first().map(|(line, how)| format!(" (line {line}: {how})")).unwrap_or_default()
}

/// Which limiter's configuration this looks like, by what only that one has.
fn looks(text: &str) -> Option<Format> {
    let has =
        |starts: &[&str]| text.lines().any(|line| starts.iter().any(|start| line.trim_start().starts_with(start)));
    if has(&["limit_req", "limit_conn"]) {
        Some(Format::Nginx)
    } else if text.lines().any(|line| ["domain:", "descriptors:"].iter().any(|start| line.starts_with(start))) {
        Some(Format::Envoy)
    } else if has(&["max_value:", "- max_value:"]) {
        Some(Format::Limitador)
    } else {
        None
    }
}

fn translated(format: Format, text: &str) -> Result<Imported, Fault> {
    let mut imported = match format {
        Format::Envoy => envoy::translated(text)?,
        Format::Limitador => limitador::translated(text)?,
        Format::Nginx => nginx::translated(text)?,
    };
    imported.account.close(text);
    let asks = |name: &str| imported.rules.iter().any(|rule| rule.asks_for(name));
    let remarks = [
        ("path", "Paths are compared as the service reads them: see `paths` in the format of rules."),
        ("method", "Rules for GET apply to HEAD too."),
    ];
    imported.about.extend(remarks.iter().filter(|(name, _)| asks(name)).map(|(_, remark)| (*remark).to_owned()));
    Ok(imported)
}

/// The file of rules, with comments on what differs or is left out.
fn written(source: &str, format: Format, imported: &Imported) -> String {
    let of = match format {
        Format::Envoy => "Envoy's ratelimit",
        Format::Limitador => "limitador",
        Format::Nginx => "nginx",
    };
    let mut file = String::new();
    comment(&mut file, &format!("Rules of {source}, a configuration of {of}."));
    imported.about.iter().for_each(|about| comment(&mut file, about));
    listed(
        &mut file,
        "What differs:",
        imported.account.differences().into_iter().map(|(line, how)| (line..=line, how)),
    );
    let left = imported.account.left();
    listed(&mut file, "What isn't translated:", left.iter().map(|(lines, why)| (lines.clone(), &**why)));
    // Other limiters count whole addresses.
    file.push_str("\n[defaults]\nipv6_prefix = 128\n");
    for rule in &imported.rules {
        file.push('\n');
        rule.comments.iter().for_each(|about| comment(&mut file, about));
        file.push_str("[[rule]]\n");
        rule.write(&mut file);
    }
    file
}

fn listed<'a>(file: &mut String, title: &str, all: impl Iterator<Item = (std::ops::RangeInclusive<usize>, &'a str)>) {
    let mut all = all.peekable();
    if all.peek().is_some() {
        file.push_str("#\n");
        comment(file, title);
    }
    for (range, what) in all {
        comment(file, &format!("- {}: {what}", lines(&range)));
    }
}

/// A comment can't end early: line ends and invisible characters in quoted text are escaped.
fn comment(file: &mut String, text: &str) {
    let seen: String =
        text.chars().map(|letter| if crate::escape::is_visible(letter) { letter } else { '?' }).collect();
    for line in wrapped(&seen, WIDTH - 2) {
        file.push_str(&format!("# {line}\n"));
    }
}

/// The rules of the generated file, which this ensures are valid; reports what probably isn't as meant.
fn checked(source: &str, file: &str) -> Result<RuleSet> {
    let rules: RuleSet = file.parse().map_err(|error| anyhow!("{source}: its limits make no valid rules: {error}"))?;
    messages::doubts(&rules);
    Ok(rules)
}
