//! `tollgate script`: prints the scripts as other languages and `redis-cli --eval` call them.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use tollgate::{Algorithm, Script};

use crate::found;

#[derive(Debug, Args)]
pub(crate) struct ScriptCommand {
    /// The script's name, such as token_bucket, or its algorithm's in a rule.
    #[arg(value_name = "NAME", required_unless_present_any = ["out", "contract"])]
    name: Option<String>,
    /// Print the script's SHA-1, for EVALSHA, instead of its text.
    #[arg(long)]
    digest: bool,
    /// Print the number of the contract on arguments and replies.
    ///
    /// The scripts name it in their first lines.
    #[arg(long, conflicts_with_all = ["name", "digest", "out"])]
    contract: bool,
    /// Write all scripts, or the named one, to a directory: token_bucket.lua and so on.
    ///
    /// It is created if it is missing. With all of them, SHA1SUMS lists their SHA-1s, as sha1sum does.
    #[arg(long, value_name = "DIR", conflicts_with = "digest")]
    out: Option<PathBuf>,
}

impl ScriptCommand {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let mut out = anstream::stdout();
        if self.contract {
            return found(ExitCode::SUCCESS, writeln!(out, "{}", Script::CONTRACT));
        }
        let scripts: Vec<_> =
            Script::all().filter(|script| self.name.as_ref().is_none_or(|name| is_named(script, name))).collect();
        let [first, ..] = scripts.as_slice() else {
            let names: Vec<_> = Script::all().map(Script::name).collect();
            let got = self.name.unwrap_or_default();
            bail!("script: expected one of {}, got {got:?}", names.join(", "));
        };
        let Some(directory) = &self.out else {
            // Printed without an extra line break, since exactly this text is hashed.
            let printed =
                if self.digest { writeln!(out, "{}", first.digest()) } else { write!(out, "{}", first.text()) };
            return found(ExitCode::SUCCESS, printed);
        };
        std::fs::create_dir_all(directory).with_context(|| format!("--out: {}", directory.display()))?;
        let written = |name: &str, text: &str| {
            let file = directory.join(name);
            std::fs::write(&file, text).with_context(|| format!("--out: {}", file.display()))
        };
        let mut sums = String::new();
        for script in scripts {
            let name = format!("{}.lua", script.name());
            written(&name, script.text())?;
            sums += &format!("{}  {name}\n", script.digest());
        }
        // Of one script alone it would replace the list of all.
        if self.name.is_none() {
            written("SHA1SUMS", &sums)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Whether it is called so, or its algorithm in a rule is, with dashes or underscores.
fn is_named(script: &Script, name: &str) -> bool {
    let name = if name == "gcra" { "token_bucket".to_owned() } else { name.replace('-', "_") };
    let mut algorithms = Algorithm::all().filter(|algorithm| algorithm.script().name() == script.name());
    script.name() == name || algorithms.any(|algorithm| algorithm.to_string().replace('-', "_") == name)
}
