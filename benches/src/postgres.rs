//! A PostgreSQL for measurements: in a temporary folder, on a port of its own, stopped when it is dropped.

use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

#[derive(Debug)]
pub struct PostgresServer {
    process: Child,
    port: u16,
    directory: PathBuf,
}

/// On the PATH, or where Debian puts it.
fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<_> = std::env::split_paths(&path).collect();
    if let Ok(versions) = std::fs::read_dir("/usr/lib/postgresql") {
        places.extend(versions.filter_map(Result::ok).map(|version| version.path().join("bin")));
    }
    let found = places.into_iter().map(|place| place.join(name)).find(|program| program.exists());
    found.unwrap_or_else(|| panic!("{name}: expected PostgreSQL 14 or newer"))
}

/// A command in this folder; of the user `postgres` if this is root, since PostgreSQL refuses to be root.
fn command(name: &str, directory: &Path) -> Command {
    let id = |arguments: &[&str]| -> u32 {
        let output = Command::new("id").args(arguments).output().expect("id");
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a user `postgres`, as its package makes it")
    };
    let mut command = Command::new(program(name));
    if id(&["-u"]) == 0 {
        let (user, group) = (id(&["-u", "postgres"]), id(&["-g", "postgres"]));
        chown(directory, Some(user), Some(group)).expect("its own folder");
        command.uid(user).gid(group);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl PostgresServer {
    /// # Panics
    /// If there are no programs of PostgreSQL, or it doesn't come up.
    #[must_use]
    pub fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let directory = std::env::temp_dir().join(format!("tollgate-benches-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a folder for PostgreSQL");
        let data = directory.join("data");
        let mut initdb = command("initdb", &directory);
        initdb.args(["--no-sync", "--no-locale", "--encoding=UTF8", "--username=tollgate", "--auth=trust", "-D"]);
        assert!(initdb.arg(&data).status().expect("initdb").success(), "initdb failed");
        let mut postgres = command("postgres", &directory);
        postgres.arg("-D").arg(&data).args(["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]);
        postgres.args(["-c", "fsync=off", "-c", "shared_buffers=256MB", "-c", "max_wal_size=4GB"]);
        let process = postgres.args(["-c", &format!("port={port}")]).spawn().expect("postgres");
        let server = Self { process, port, directory };
        let up = (0..600).any(|_| {
            sleep(Duration::from_millis(50));
            let mut ready = command("pg_isready", &server.directory);
            ready.args(["-q", "-h", "127.0.0.1", "-p", &port.to_string()]).status().is_ok_and(|status| status.success())
        });
        assert!(up, "PostgreSQL didn't come up on port {port}");
        server
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://tollgate@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // Unlike a kill, this ends its children too.
        let _ = Command::new("kill").args(["-QUIT", &self.process.id().to_string()]).status();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
