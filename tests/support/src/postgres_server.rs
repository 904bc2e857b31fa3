//! A PostgreSQL of a test's own: in a temporary directory, on a port of its own, stopped when the test ends.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio_postgres::NoTls;

use crate::certificates::{Authority, Pair};
use crate::redis_server::free_port;

pub struct PostgresServer {
    process: Child,
    port: u16,
    /// Removed once it has ended.
    directory: TempDir,
}

/// Where `initdb` and `postgres` are: in TOLLGATE_TEST_POSTGRES, on the PATH, or where Debian puts them.
pub fn program(name: &str) -> PathBuf {
    if let Some(directory) = std::env::var_os("TOLLGATE_TEST_POSTGRES") {
        return PathBuf::from(directory).join(name);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<_> = std::env::split_paths(&path).collect();
    if let Ok(versions) = std::fs::read_dir("/usr/lib/postgresql") {
        places.extend(versions.filter_map(Result::ok).map(|version| version.path().join("bin")));
    }
    let found = places.into_iter().map(|place| place.join(name)).find(|program| program.exists());
    found.unwrap_or_else(|| panic!("{name}: expected PostgreSQL 14 or newer, which tests/run.sh installs"))
}

/// The server refuses to be root: then it is whom Debian's package has made for it.
#[cfg(unix)]
pub fn not_as_root(command: &mut Command, directory: &Path) {
    use std::os::unix::process::CommandExt;

    if let Some((user, group)) = instead_of_root() {
        std::os::unix::fs::chown(directory, Some(user), Some(group)).expect("its own directory");
        command.uid(user).gid(group);
    }
}

/// The user and the group of the server, if the tests are run by root.
#[cfg(unix)]
fn instead_of_root() -> Option<(u32, u32)> {
    static KNOWN: OnceLock<Option<(u32, u32)>> = OnceLock::new();
    *KNOWN.get_or_init(|| (id(&["-u"]) == 0).then(|| (id(&["-u", "postgres"]), id(&["-g", "postgres"]))))
}

fn id(arguments: &[&str]) -> u32 {
    let output = Command::new("id").args(arguments).output().expect("id");
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    text.parse().unwrap_or_else(|_| panic!("expected a user postgres, which PostgreSQL's package makes"))
}

/// What `initdb` makes, which is the same for each server and takes it half a second of a processor: made once for all
/// programs of this build, and without the database `template0`.
fn as_initdb_makes_it() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let version = Command::new(program("initdb")).arg("--version").output().expect("initdb");
        let version =
            String::from_utf8_lossy(&version.stdout).trim().replace(|letter: char| !letter.is_ascii_digit(), "-");
        // Another user may not read it.
        let name = format!("postgres{version}without-template0-of-{}", id(&["-u"]));
        let kept = std::env::current_exe().expect("this program").with_file_name(name);
        if !kept.exists() {
            make_by_initdb(&kept);
        }
        kept
    })
}

fn make_by_initdb(kept: &Path) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut initdb = Command::new(program("initdb"));
    initdb.args(["--no-sync", "--no-locale", "--encoding=UTF8", "--username=tollgate", "--wal-segsize=1"]);
    initdb.args(["--auth=trust", "-D"]).arg(directory.path().join("data"));
    // Whatever zone the machine is in, its days are those of the tool.
    initdb.env("TZ", "UTC");
    not_as_root(&mut initdb, directory.path());
    let made = initdb.output().expect("initdb");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    // A third of the files, which no test needs.
    let without = "UPDATE pg_database SET datistemplate = false WHERE datname = 'template0'\nDROP DATABASE template0\n";
    let mut single = Command::new(program("postgres"));
    single.args(["--single", "-D"]).arg(directory.path().join("data")).arg("template1");
    not_as_root(&mut single, directory.path());
    let mut single =
        single.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("postgres");
    single.stdin.take().expect("piped").write_all(without.as_bytes()).expect("written");
    let dropped = single.wait_with_output().expect("its end");
    let errors = String::from_utf8_lossy(&dropped.stderr);
    assert!(dropped.status.success() && !errors.contains("ERROR"), "{errors}");
    // Whole, or not at all: other programs may be making the same.
    let beside = tempfile::tempdir_in(kept.parent().expect("a folder")).expect("a folder of the build");
    copy(&directory.path().join("data"), &beside.path().join("data"));
    let moved = std::fs::rename(beside.path().join("data"), kept);
    assert!(moved.is_ok() || kept.exists(), "{}: {moved:?}", kept.display());
}

/// Where servers have their files: in TMPDIR or, without one, in memory if there is plenty of it, as making their thousand
/// files there takes half as long. What a test leaves there that was killed goes with the machine's next start.
fn place() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let asked = Command::new("df").args(["--output=avail", "-k"]).arg(memory).stderr(Stdio::null()).output();
        let text = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        let kibibytes: Option<u64> = text.lines().last().and_then(|line| line.trim().parse().ok());
        let is_chosen = std::env::var_os("TMPDIR").is_some();
        if kibibytes >= Some(4 << 20) && !is_chosen { memory.to_owned() } else { std::env::temp_dir() }
    })
}

/// With owners and modes.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-Rp").args([from, to]).output().expect("cp");
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
}

impl PostgresServer {
    pub fn start() -> Self {
        Self::start_with(|_| ())
    }

    /// One that also speaks TLS: the certificate that it presents, the authority of clients that it trusts, and, as
    /// `pg_hba.conf` has it, how the role `limiter` is let in. Its superuser needs nothing.
    pub async fn start_by_tls(pair: &Pair, clients: &Authority, users: &str) -> Self {
        let server = Self::start_with(|data| {
            let settings = data.join("postgresql.conf");
            let made = std::fs::read_to_string(&settings).expect("initdb has made it");
            std::fs::write(settings, made + "ssl = on\nssl_ca_file = 'root.crt'\n").expect("written");
            std::fs::write(data.join("root.crt"), clients.pem()).expect("written");
            show(data, pair);
            let users = format!("host all tollgate all trust\n{users}\n");
            std::fs::write(data.join("pg_hba.conf"), users).expect("written");
        });
        server.run("CREATE ROLE limiter LOGIN SUPERUSER PASSWORD 'sesame'").await;
        server
    }

    fn start_with(settings: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir_in(place()).expect("a temporary directory");
        copy(as_initdb_makes_it(), &directory.path().join("data"));
        settings(&directory.path().join("data"));
        // Tries another port if the free one has been taken since.
        let port = free_port();
        let mut server = Self { process: launch(directory.path(), port), port, directory };
        for _ in 0..5 {
            if server.comes_up() {
                return server;
            }
            server.port = free_port();
            server.process = launch(server.directory.path(), server.port);
        }
        panic!("postgres ends as soon as it is started");
    }

    /// By a password that the server doesn't ask for.
    pub fn url(&self) -> String {
        self.url_of("tollgate:sesame", "postgres")
    }

    pub fn url_of(&self, user: &str, database: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/{database}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Runs this, as its superuser, and answers the first column of its rows as text.
    pub async fn run(&self, sql: &str) -> Vec<String> {
        self.run_in("postgres", sql).await
    }

    /// The same in another database.
    pub async fn run_in(&self, database: &str, sql: &str) -> Vec<String> {
        let url = self.url_of("tollgate", database);
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.expect("connected");
        let connection = tokio::spawn(connection);
        let messages = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{error:?}: {sql}"));
        drop(client);
        connection.await.expect("no panic").expect("a clean end");
        let rows = messages.iter().filter_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        });
        rows.collect()
    }

    /// Sets the clock by which statements in its database go ahead by this interval: no setting of a session evades it.
    pub async fn clock_ahead(&self, by: &str) {
        self.run(&format!(
            "CREATE OR REPLACE FUNCTION pg_catalog.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
            AS $$ SELECT pg_catalog.transaction_timestamp() + interval '{by}' $$"
        ))
        .await;
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.path("log")).expect("its log")).into_owned()
    }

    /// Lets clients in as these lines of `pg_hba.conf` say, and its superuser without a password.
    pub async fn let_in(&self, lines: &str) {
        std::fs::write(self.path("data/pg_hba.conf"), format!("host all tollgate all trust\n{lines}\n"))
            .expect("written");
        self.run("SELECT pg_reload_conf()").await;
    }

    /// Makes it recover for ever, as a replica does, once it is started again; or no more.
    pub fn recovers(&self, yes: bool) {
        let signal = self.path("data/standby.signal");
        if yes {
            std::fs::write(signal, "").expect("written");
        } else {
            std::fs::remove_file(signal).expect("it was there");
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Whether it answers; if not, it has ended.
    fn comes_up(&mut self) -> bool {
        let began = Instant::now();
        while !self.accepts_clients() {
            if self.process.try_wait().expect("a state").is_some() {
                return false;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "postgres doesn't answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// As it says in this file, with its process id, since one that was killed leaves its own there. That it listens
    /// means nothing yet: until it is ready it closes connections.
    fn accepts_clients(&self) -> bool {
        let said = std::fs::read_to_string(self.path("data/postmaster.pid")).unwrap_or_default();
        let lines: Vec<_> = said.lines().map(str::trim).collect();
        lines.first() == Some(&self.process.id().to_string().as_str())
            && matches!(lines.get(7), Some(&("ready" | "standby")))
    }

    /// Shows another certificate, once it is started again.
    pub fn shows(&self, pair: &Pair) {
        show(&self.directory.path().join("data"), pair);
    }

    /// Starts it again after it was stopped, on what that left.
    pub fn start_again(&mut self) {
        self.process = launch(self.directory.path(), self.port);
        assert!(self.comes_up(), "postgres ends as soon as it is started");
    }

    /// Ends it at once, as a crash would.
    pub fn stop(&mut self) {
        if !matches!(self.process.try_wait(), Ok(None)) {
            return;
        }
        // Its children end with it only on a clean stop.
        let _ = Command::new("kill").args(["-QUIT", &self.process.id().to_string()]).status();
        let _ = self.process.wait();
    }
}

/// Where the server looks for its certificate and key unless it is told another place. It takes no key that others may
/// read.
fn show(data: &Path, pair: &Pair) {
    use std::os::unix::fs::{PermissionsExt, chown};

    let key = data.join("server.key");
    std::fs::write(data.join("server.crt"), &pair.certificate).expect("written");
    std::fs::write(&key, &pair.key).expect("written");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    if let Some((user, group)) = instead_of_root() {
        chown(&key, Some(user), Some(group)).expect("its own key");
    }
}

fn launch(directory: &Path, port: u16) -> Child {
    let mut postgres = Command::new(program("postgres"));
    postgres.arg("-D").arg(directory.join("data"));
    for setting in [
        "listen_addresses=127.0.0.1",
        &format!("port={port}"),
        "unix_socket_directories=",
        "fsync=off",
        "shared_buffers=16MB",
        "max_connections=40",
    ] {
        postgres.args(["-c", setting]);
    }
    not_as_root(&mut postgres, directory);
    let log = std::fs::OpenOptions::new().create(true).append(true).open(directory.join("log")).expect("a log");
    postgres.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("postgres")
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        self.stop();
    }
}
