//! `tollgate db`: the tables of the system of record on PostgreSQL.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Result, anyhow};
use clap::{Args, Subcommand};
use tollgate_record::{Migration, Postgres, PostgresError, Writer, WriterCounts};

use crate::escape::shown;
use crate::found;
use crate::options;
use crate::options::tls::Files;
#[cfg(not(feature = "tls"))]
use crate::options::tls::lacking;
use crate::output::{QUIET, counted, human};

#[derive(Debug, Subcommand)]
pub(crate) enum Db {
    /// Create the tables, or migrate those of an older version.
    ///
    /// Runs in one transaction; a concurrent run waits for the first. Does nothing if the tables are up to date. Run it
    /// as the role that made the schema: a schema that another role owns or has added to is refused.
    ///
    /// Exit code: 0; 2 on an error.
    Migrate(Database),
    /// Show which migrations the database has, and which services write to it.
    ///
    /// At most 100 services are shown: first those that have lost something, then running ones, then the latest to
    /// start; a last line says how many are left out. If the address has several hosts, the one that answers is named.
    ///
    /// Exit code: 0 if it has all, 1 if some are pending, 2 on an error.
    Status(Database),
}

#[derive(Debug, Args)]
pub(crate) struct Database {
    /// PostgreSQL 14 or newer, such as postgres://user:password@127.0.0.1/app.
    ///
    /// A password is best kept in the environment: other users of this machine can see arguments, for a moment at
    /// least.
    #[arg(long = "database", value_name = "URL", env = "TOLLGATE_DATABASE", hide_env_values = true)]
    #[arg(help_heading = "Database")]
    url: String,
    /// The certificate authorities to trust for PostgreSQL, in PEM.
    ///
    /// Default: the platform's. Any --database-tls-... file turns on TLS, as ?sslmode=require does.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_DATABASE_TLS_CA", help_heading = "Database")]
    database_tls_ca: Option<OsString>,
    /// The client certificate for PostgreSQL, in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_DATABASE_TLS_CERT", help_heading = "Database")]
    database_tls_cert: Option<OsString>,
    /// The private key of the client certificate for PostgreSQL, in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_DATABASE_TLS_KEY", help_heading = "Database")]
    database_tls_key: Option<OsString>,
    /// How long PostgreSQL may be silent in a statement, such as 5s or 2h.
    ///
    /// The error then says whether something may have been changed. Default: 20s; 15s for audit and stats, 10m for db
    /// migrate, 1h where archive reads a whole table.
    #[arg(long, value_name = "D", value_parser = options::time_to_come, help_heading = "Database")]
    database_deadline: Option<Duration>,
}

/// The database, and the author of a change.
#[derive(Debug, Args)]
pub(crate) struct Author {
    /// Who makes the change; stored with it. Default: the database's role.
    #[arg(long, value_name = "WHO", env = "USER", default_value = "", hide_default_value = true)]
    pub(crate) by: String,
    #[command(flatten)]
    pub(crate) database: Database,
}

impl Database {
    pub(crate) fn open(&self) -> Result<Postgres> {
        let postgres = self.without_deadline()?;
        Ok(match self.database_deadline {
            Some(deadline) => postgres.deadline(deadline),
            None => postgres,
        })
    }

    fn without_deadline(&self) -> Result<Postgres> {
        let files = [&self.database_tls_ca, &self.database_tls_cert, &self.database_tls_key];
        let files = Files::new("--database-tls", files);
        #[cfg(feature = "tls")]
        if let Some(tls) = files.read()? {
            return Ok(Postgres::open_with_tls(&self.url, &tls)?);
        }
        #[cfg(not(feature = "tls"))]
        if let Some(option) = files.named() {
            return Err(lacking(&option, "postgres,tls"));
        }
        Ok(Postgres::open(&self.url)?)
    }
}

/// Adds the command that shows whether a change was made, if the error leaves that open.
pub(crate) fn look_by(command: impl FnOnce() -> String) -> impl FnOnce(PostgresError) -> anyhow::Error {
    move |error| match error.is_unknown() {
        true => anyhow!("{error}: see tollgate {}", command()),
        false => error.into(),
    }
}

impl Db {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        match self {
            Self::Migrate(database) => {
                let made = database.open()?.migrate().await.map_err(look_by(|| "db status".to_owned()))?;
                found(ExitCode::SUCCESS, print_made(&made))
            }
            Self::Status(database) => {
                let postgres = database.open()?;
                let schema = postgres.schema().await?;
                let code = if schema.is_complete() { ExitCode::SUCCESS } else { ExitCode::from(1) };
                let address = address(&postgres).await?;
                let printed = writeln!(anstream::stdout(), "{address}: PostgreSQL {}", schema.server_version);
                let printed = printed.and_then(|()| schema.migrations.iter().try_for_each(print));
                if !schema.is_complete() {
                    return found(code, printed);
                }
                let (writers, counts) = (postgres.writers().await?, postgres.writer_counts().await?);
                // The services' times are by the database's clock.
                let now = postgres.now().await?;
                let printed = printed.and_then(|()| print_writers(&writers, now));
                found(code, printed.and_then(|()| print_left_out(&writers, counts)))
            }
        }
    }
}

/// The address and, if that has several hosts, which server answers.
async fn address(postgres: &Postgres) -> Result<String> {
    let address = postgres.address();
    if !address.contains(',') {
        return Ok(address.to_owned());
    }
    let server = postgres.server().await?.unwrap_or_else(|| "a socket".to_owned());
    Ok(format!("{address}, connected to {server}"))
}

fn print_made(made: &[Migration]) -> io::Result<()> {
    match made {
        [] => writeln!(anstream::stdout(), "nothing to do: the database has all migrations"),
        made => made.iter().try_for_each(print),
    }
}

/// `1 configuration   applied 2026-11-22T18:10:11Z`
fn print(migration: &Migration) -> io::Result<()> {
    let applied = migration.applied_at.and_then(|at| jiff::Timestamp::try_from(at).ok());
    let state = applied.map_or("pending".to_owned(), |at| format!("applied {at:.0}"));
    writeln!(anstream::stdout(), "{:>4} {:<16} {state}", migration.number, migration.name)
}

/// Running services report every ten seconds.
const SILENCE: Duration = Duration::from_secs(30);

/// `  and 5 more, of which 2 run and 1 has lost something: SELECT * FROM tollgate.writers`
fn print_left_out(shown: &[Writer], counts: WriterCounts) -> io::Result<()> {
    let left = |all: u64, is_one: fn(&Writer) -> bool| {
        all.saturating_sub(shown.iter().filter(|writer| is_one(writer)).count() as u64)
    };
    let more = left(counts.all, |_| true);
    if more == 0 {
        return Ok(());
    }
    let run = left(counts.running, |writer| writer.ended_at.is_none());
    let lost = left(counts.with_losses, |writer| writer.lost > 0);
    let (runs, has) = (if run == 1 { "runs" } else { "run" }, if lost == 1 { "has" } else { "have" });
    let which = format!("of which {run} {runs} and {lost} {has} lost something");
    writeln!(anstream::stdout(), "  and {more} more, {which}: SELECT * FROM tollgate.writers")
}

/// Running services, and those that ended in the last days.
fn print_writers(writers: &[Writer], now: SystemTime) -> io::Result<()> {
    let mut out = anstream::stdout();
    if !writers.is_empty() {
        writeln!(out, "{QUIET}services that write{QUIET:#}")?;
    }
    for writer in writers {
        let ago = now.duration_since(writer.written_at).unwrap_or_default();
        let state = match (writer.killed, writer.ended_at) {
            (true, _) => {
                format!("killed: what it had not yet written is lost; last heard from {} ago", human(ago))
            }
            (false, Some(_)) => format!("ended {} ago", human(ago)),
            (false, None) if ago > SILENCE => format!("not heard from for {}: perhaps killed", human(ago)),
            (false, None) => format!("running; last heard from {} ago", human(ago)),
        };
        let (name, requests) = (shown(writer.name.as_bytes()), counted(writer.requests, "request"));
        let writes = writer.writes.name();
        let from = writer.client.as_deref().unwrap_or("a socket");
        let lost = if writer.lost > 0 { format!(", {} lost", writer.lost) } else { String::new() };
        writeln!(out, "  {name} from {from}: {writes} of {requests}{lost}; {state}")?;
    }
    Ok(())
}
