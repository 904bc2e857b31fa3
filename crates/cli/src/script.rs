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
    /// An algorithm, such as token_bucket; of several, the script of all of them.
    ///
    /// Its name in rules will do, too. Limits of several algorithms are decided together by the script of all of them.
    #[arg(value_name = "NAME", required_unless_present_any = ["out", "contract"])]
    names: Vec<String>,
    /// Print the script's SHA-1, for EVALSHA, instead of its text.
    #[arg(long)]
    digest: bool,
    /// Print the number of the contract on arguments and replies.
    ///
    /// The scripts name it in their first lines.
    #[arg(long, conflicts_with_all = ["names", "digest", "out"])]
    contract: bool,
    /// Write each algorithm's script, or the named one, to a directory, as NAME.lua.
    ///
    /// The directory is created if it is missing. The file's name joins several names by a plus. With the scripts of
    /// all algorithms, SHA1SUMS lists their SHA-1s, as sha1sum does.
    #[arg(long, value_name = "DIR", conflicts_with = "digest")]
    out: Option<PathBuf>,
}

impl ScriptCommand {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let mut out = anstream::stdout();
        if self.contract {
            return found(ExitCode::SUCCESS, writeln!(out, "{}", Script::CONTRACT));
        }
        let algorithms = self.names.iter().map(|name| named(name)).collect::<Result<Vec<_>>>()?;
        let named = Script::for_algorithms(algorithms);
        let Some(directory) = &self.out else {
            // Printed without an extra line break, since exactly this text is hashed.
            let printed =
                if self.digest { writeln!(out, "{}", named.digest()) } else { write!(out, "{}", named.text()) };
            return found(ExitCode::SUCCESS, printed);
        };
        let scripts = if self.names.is_empty() { Script::all().collect() } else { vec![named] };
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
        // With one script alone, it would replace the list of all.
        if self.names.is_empty() {
            written("SHA1SUMS", &sums)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The algorithm by the name of its file or in rules, with dashes or underscores.
fn named(name: &str) -> Result<Algorithm> {
    let sought = if name == "gcra" { "token_bucket".to_owned() } else { name.replace('-', "_") };
    let is_named = |algorithm: &Algorithm| {
        algorithm.script().name() == sought || algorithm.to_string().replace('-', "_") == sought
    };
    let Some(algorithm) = Algorithm::all().find(is_named) else {
        let names: Vec<_> = Script::all().map(Script::name).collect();
        bail!("script: expected one of {}, got {name:?}", names.join(", "));
    };
    Ok(algorithm)
}
