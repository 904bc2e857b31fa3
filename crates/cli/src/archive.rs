//! `tollgate archive`: old months of the audit log as Parquet on disk or on S3.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tollgate_record::Postgres;
use tollgate_record::archive::{
    Archivable, Archive, ArchiveError, ArchiveOptions, ArchiveProgress, Archived, ArchivedMonth, ArchivedRow,
    Attachment, Listing, Month, Step,
};

use crate::database_output::{Fields, print_all, time};
use crate::db::Database;
use crate::found;
use crate::interrupted::interrupted;
use crate::messages;
use crate::options::{self, Output};
use crate::output::{Shape, counted, micros, timestamp};
use crate::time_options::between;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ArchiveCommand {
    #[command(flatten)]
    run: Run,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Args)]
struct Run {
    // Not available with a subcommand.
    #[command(flatten)]
    store: Option<Store>,
    /// How long ago a month must have ended, at least 31d.
    #[arg(long, value_name = "D", default_value = "90d", value_parser = options::time_to_come)]
    older_than: Duration,
    /// Show which months would be moved, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Archive this month again from its table, which is still in the database.
    ///
    /// Rows that only the archive has are lost. Shows how many rows both have, and asks first. May be given several
    /// times.
    #[arg(long, value_name = "MONTH", conflicts_with = "dry_run")]
    replace: Vec<Month>,
    /// Replace archives without asking; needed where there is no terminal.
    #[arg(long, requires = "replace")]
    yes: bool,
    /// The maximum number of rows in a file.
    ///
    /// A file is held in memory while it is written.
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = options::from_one::<u64, 10_000_000>)]
    part_rows: u64,
    #[command(flatten)]
    database: Option<Database>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the archived months.
    ///
    /// One that can't be read is named on standard error, and the others are listed.
    ///
    /// Exit code: 0, or 1 if any manifest or folder can't be read.
    List(List),
    /// Delete archives permanently: all that have expired, or the named months.
    ///
    /// Exit code: 0, or 1 if a named month isn't archived.
    Delete(Delete),
    /// Read archives back, and compare them with their manifests.
    ///
    /// Exit code: 0, or 1 if any is damaged.
    Verify(Verify),
    /// Show one user's rows.
    ///
    /// Exit code: 0, or 1 if there are none or some can't be read.
    Query(Query),
}

/// The storage of archives.
#[derive(Debug, Args)]
struct Store {
    /// A directory, such as file:///var/lib/tollgate, or s3://bucket/prefix.
    ///
    /// The directory must exist. S3 is configured through the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    /// AWS_REGION; for compatible stores AWS_ENDPOINT and AWS_ALLOW_HTTP.
    #[arg(id = "store", long, value_name = "URL", env = "TOLLGATE_ARCHIVE", hide_env_values = true)]
    url: String,
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    store: Store,
    /// Only those that have expired.
    #[arg(long)]
    expired: bool,
    #[command(flatten)]
    keep: Keep,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Args)]
struct Keep {
    /// How many years an archive is kept after the end of its month.
    #[arg(long, value_name = "N", default_value = "7", value_parser = options::from_one::<u16, 1000>)]
    keep_years: u16,
}

#[derive(Debug, Args)]
struct Delete {
    /// Months, such as 2026-08, expired or not.
    #[arg(value_name = "MONTH", required_unless_present = "expired")]
    months: Vec<Month>,
    /// All that have expired.
    #[arg(long, conflicts_with = "months")]
    expired: bool,
    #[command(flatten)]
    keep: Keep,
    /// Delete. Without it, only say what would be deleted.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    store: Store,
}

#[derive(Debug, Args)]
struct Verify {
    /// Months, such as 2026-08. Default: all.
    #[arg(value_name = "MONTH")]
    months: Vec<Month>,
    #[command(flatten)]
    store: Store,
}

#[derive(Debug, Args)]
struct Query {
    /// Whose rows to show.
    #[arg(long, value_name = "USER")]
    user: String,
    /// Start at this time, such as 2026-08-01 or 2026-08-01T12:00.
    ///
    /// In UTC unless it has an offset.
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Up to the end of this day, minute or second.
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
    #[command(flatten)]
    store: Store,
    #[command(flatten)]
    output: Output,
}

impl ArchiveCommand {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        match self.command {
            Some(Command::List(list)) => list.run().await,
            Some(Command::Delete(delete)) => delete.run().await,
            Some(Command::Verify(verify)) => verify.run().await,
            Some(Command::Query(query)) => query.run().await,
            None => self.run.run().await,
        }
    }
}

impl Store {
    fn open(&self) -> Result<Archive> {
        Ok(Archive::open(&self.url)?)
    }
}

impl Run {
    async fn run(self) -> Result<ExitCode> {
        let (Some(store), Some(database)) = (&self.store, &self.database) else {
            bail!("archive: --store or --database is missing: give both");
        };
        let (archive, postgres) = (store.open()?, database.open()?);
        if self.dry_run {
            let months = postgres.archivable(self.older_than).await?;
            let (mut lines, mut code) = (Vec::new(), ExitCode::SUCCESS);
            for month in months {
                match archive.describe(month.month).await {
                    Ok(archived) => lines.push(would_move(&month, archived.as_ref())),
                    Err(error) => code = told(error)?,
                }
            }
            return found(code, print_found(&lines, NOTHING_TO_DO, code));
        }
        if !self.yes {
            confirm(&self.losses(&archive, &postgres).await?)?;
        }
        let mut options = ArchiveOptions::default();
        (options.older_than, options.replace, options.part_rows) =
            (self.older_than, self.replace.into_iter().collect(), self.part_rows);
        let bar = Bar::new();
        let moved = tokio::select! {
            biased;
            _ = interrupted() => Err(anyhow!("interrupted: the next run continues from here")),
            moved = postgres.archive(&archive, &options, |progress| bar.show(progress)) => moved.map_err(Into::into),
        };
        bar.0.finish_and_clear();
        let moved = moved?;
        let lines: Vec<_> = moved.iter().filter_map(|month| month.result.as_ref().ok()).map(has_moved).collect();
        // Only on a terminal: a nightly job shouldn't send a mail when there was nothing to do.
        let is_said = !lines.is_empty() || (moved.is_empty() && std::io::stdout().is_terminal());
        let printed = if is_said { print_lines(&lines, NOTHING_TO_DO) } else { Ok(()) };
        let cut = moved.iter().flat_map(|Archived { month, cut, .. }| cut.iter().map(move |row| (month, row)));
        cut.for_each(|(month, row)| messages::note(format!("{month}: texts above 64 KiB are cut in the row of {row}")));
        let errors: Vec<_> = moved.iter().filter_map(|Archived { result, .. }| result.as_ref().err()).collect();
        errors.iter().for_each(messages::error);
        let code = if errors.is_empty() {
            ExitCode::SUCCESS
        } else if errors.iter().any(|error| error.is_unreachable()) {
            ExitCode::from(2)
        } else {
            ExitCode::from(1)
        };
        found(code, printed)
    }

    /// What would be replaced: a line for each month that has an archive.
    async fn losses(&self, archive: &Archive, postgres: &Postgres) -> Result<Vec<String>> {
        if self.replace.is_empty() {
            return Ok(Vec::new());
        }
        let mut losses = Vec::new();
        for month in postgres.archivable(self.older_than).await?.iter().filter(|it| self.replace.contains(&it.month)) {
            let archived = match archive.describe(month.month).await {
                Ok(None) => continue,
                Ok(Some(archived)) => format!("the archive's {}", counted(archived.rows, "row")),
                Err(error) if error.is_unreachable() => return Err(error.into()),
                Err(_) => "an archive that can't be read".to_owned(),
            };
            let rows = counted(month.rows, "row");
            losses.push(format!("{}: {archived} would be replaced by the {rows} of its table", month.month));
        }
        Ok(losses)
    }
}

/// Asks on a terminal; elsewhere it takes --yes.
fn confirm(losses: &[String]) -> Result<()> {
    if losses.is_empty() {
        return Ok(());
    }
    if !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
        bail!("archive: --replace: needs --yes where there is no terminal: {}", losses.join("; "));
    }
    losses.iter().for_each(messages::note);
    messages::note("rows that only the archive has are lost; replace it? [y/N]");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()) {
        return Ok(());
    }
    bail!("archive: --replace: nothing was changed");
}

const NOTHING_TO_DO: &str = "nothing to do: no month is old enough";

/// `2026-08: 1000000 rows, 402653184 bytes in PostgreSQL`
fn would_move(month: &Archivable, archived: Option<&ArchivedMonth>) -> String {
    let state = match (month.attachment, archived) {
        (_, Some(archived)) if archived.rows != month.rows => {
            format!("; the archive has {}, so both would be left as they are: see --replace", archived.rows)
        }
        (Attachment::Attached, None) => String::new(),
        _ => "; already begun".to_owned(),
    };
    format!("{}: {}, {} in PostgreSQL{state}", month.month, counted(month.rows, "row"), counted(month.bytes, "byte"))
}

/// `2026-08: 1000000 rows archived in 1 file of 31457280 bytes`
fn has_moved(month: &ArchivedMonth) -> String {
    let files = counted(month.parts as u64, "file");
    format!("{}: {} archived in {files} of {}", month.month, counted(month.rows, "row"), counted(month.bytes, "byte"))
}

/// Reports an error about one month, unless it ends the command: the others can still be handled.
fn told(error: ArchiveError) -> Result<ExitCode> {
    if error.is_unreachable() {
        return Err(error.into());
    }
    messages::error(&error);
    Ok(ExitCode::from(1))
}

/// Reports the years that can't be listed.
fn all_told(years: BTreeMap<i16, ArchiveError>) -> Result<ExitCode> {
    years.into_values().try_fold(ExitCode::SUCCESS, |_, error| told(error))
}

/// Prints `none` if there are no lines, unless an error was reported already.
fn print_found(lines: &[String], none: &str, code: ExitCode) -> std::io::Result<()> {
    if lines.is_empty() && code != ExitCode::SUCCESS { Ok(()) } else { print_lines(lines, none) }
}

fn print_lines(lines: &[String], none: &str) -> std::io::Result<()> {
    use std::io::Write;

    let mut out = anstream::stdout();
    if lines.is_empty() {
        return writeln!(out, "{none}");
    }
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))
}

/// A progress bar on standard error, if that is a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {human_pos} of {human_len} rows, {eta} left");
        Self(ProgressBar::new(0).with_style(style.expect("a well-formed template")))
    }

    fn show(&self, progress: &ArchiveProgress) {
        let what = match progress.step {
            Step::Export => "export",
            Step::ReadBack => "read back",
            Step::Compare => "compare",
            Step::Detach => "detach",
            _ => "compare and drop",
        };
        let message = format!("{} {what}", progress.month);
        if self.0.message() != message {
            self.0.set_message(message);
            self.0.reset();
        }
        self.0.set_length(progress.of);
        self.0.set_position(progress.rows);
    }
}

impl List {
    async fn run(self) -> Result<ExitCode> {
        let (archive, years) = (self.store.open()?, self.keep.keep_years);
        let listing = archive.list().await?;
        let months = if self.expired { listing.expired(SystemTime::now(), years) } else { listing.complete };
        let (mut records, mut code) = (Vec::new(), all_told(listing.unreadable)?);
        for month in months {
            match archive.describe(month).await {
                Ok(archived) => records.extend(archived.map(|archived| fields(&archived, years))),
                Err(error) => code = told(error)?,
            }
        }
        found(code, print_all(self.output.shape(), records))
    }
}

fn fields(month: &ArchivedMonth, years: u16) -> Fields {
    vec![
        ("month", json!(month.month.to_string())),
        ("rows", json!(month.rows)),
        ("bytes", json!(month.bytes)),
        ("files", json!(month.parts)),
        ("first_at", time(month.first_at)),
        ("last_at", time(month.last_at)),
        ("made_at", time(Some(month.made_at))),
        ("expires_at", time(month.expires(years))),
        ("checksum", json!(month.checksum)),
    ]
}

impl Delete {
    async fn run(self) -> Result<ExitCode> {
        let archive = self.store.open()?;
        let listing = archive.list().await?;
        let Listing { complete, unfinished, unreadable, .. } = &listing;
        let (mut lines, mut code) = (Vec::new(), ExitCode::SUCCESS);
        let months = if self.expired {
            code = all_told(unreadable.clone())?;
            listing.expired(SystemTime::now(), self.keep.keep_years).into_iter().collect()
        } else {
            self.months
        };
        for month in months {
            let is_known = complete.contains(&month) || unfinished.contains(&month);
            if let Some(error) = unreadable.get(&month.year()) {
                code = told(error.clone())?;
                continue;
            }
            if is_known
                && self.yes
                && let Err(error) = archive.delete(month).await
            {
                code = told(error)?;
                continue;
            }
            lines.push(match (is_known, self.yes) {
                (true, true) => format!("{month}: deleted"),
                (true, false) => format!("{month}: would be deleted by --yes"),
                (false, _) => {
                    code = ExitCode::from(1);
                    format!("{month}: not archived")
                }
            });
        }
        found(code, print_found(&lines, "nothing to delete", code))
    }
}

impl Verify {
    async fn run(self) -> Result<ExitCode> {
        let archive = self.store.open()?;
        let (mut lines, mut code) = (Vec::new(), ExitCode::SUCCESS);
        let months = if self.months.is_empty() {
            let listing = archive.list().await?;
            code = all_told(listing.unreadable)?;
            for month in listing.unfinished {
                let why = "manifest.json is missing: the archive is unfinished, or its manifest is lost";
                messages::error(format!("archive of {month}: {why}"));
                code = ExitCode::from(1);
            }
            listing.complete.into_iter().collect()
        } else {
            self.months
        };
        for month in months {
            match archive.verify(month).await {
                Ok(archived) => {
                    lines.push(format!("{month}: {} intact", counted(archived.rows, "row")));
                    let leftovers = archive.leftovers(month).await;
                    if let Err(error) = &leftovers {
                        code = told(error.clone())?;
                    }
                    for left in leftovers.unwrap_or_default() {
                        let why = "left over from an attempt that was interrupted or replaced";
                        messages::error(format!("archive of {month}: {left}: {why}"));
                        code = ExitCode::from(1);
                    }
                }
                Err(error) => code = told(error)?,
            }
        }
        found(code, print_found(&lines, "nothing is archived", code))
    }
}

impl Query {
    async fn run(self) -> Result<ExitCode> {
        let [from, to] = between(self.from.as_deref(), self.to.as_deref(), jiff::Timestamp::now())?;
        let (archive, shape) = (self.store.open()?, self.output.shape());
        let mut rows = archive.query(&self.user, from.map(Into::into), to.map(Into::into));
        let (mut any, mut code, mut table) = (false, ExitCode::SUCCESS, Vec::new());
        loop {
            match rows.next().await {
                Ok(None) => break,
                Ok(Some(batch)) => {
                    any = true;
                    match shape {
                        Shape::Table => table.extend(batch.iter().map(row)),
                        Shape::Jsonl => drop(found(code, print_all(shape, batch.iter().map(row).collect()))?),
                    }
                }
                Err(error) => code = told(error)?,
            }
        }
        if !any && code == ExitCode::SUCCESS {
            messages::note("this user has no archived rows in this period");
            code = ExitCode::from(1);
        }
        found(code, print_all(shape, table))
    }
}

/// A row under the table's column names.
fn row(row: &ArchivedRow) -> Fields {
    let at = row.at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, micros);
    let fields: [(&'static str, Value); 18] = [
        ("at", json!(timestamp(at))),
        ("user_id", json!(row.user)),
        ("api_key", json!(row.api_key)),
        ("ip", json!(row.ip)),
        ("endpoint", json!(row.endpoint)),
        ("method", json!(row.method)),
        ("rule", json!(row.rule)),
        ("decision", json!(row.decision)),
        ("reason", json!(row.reason)),
        ("limited_by", json!(row.limited_by)),
        ("used", json!(row.used)),
        ("capacity", json!(row.capacity)),
        ("status", json!(row.status)),
        ("retry_after_us", json!(row.retry_after_us)),
        ("region", json!(row.region)),
        ("server", json!(row.server)),
        ("latency_us", json!(row.latency_us)),
        ("rules", json!(row.rules)),
    ];
    fields.into()
}
