//! A real terminal, as far as programs can tell: a pane of a tmux server of the test's own.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use tollgate_testing::polling::block_until;

/// How long the program may take to draw.
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) struct Terminal {
    directory: TempDir,
}

impl Terminal {
    /// Runs this line in a shell, on a terminal of this size. The shell may leave a process id in the file $PID.
    pub(crate) fn run(columns: u16, rows: u16, line: &str) -> Self {
        let terminal = Self { directory: tempfile::tempdir().expect("a temporary directory") };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        // Without the settings of whoever runs the tests, nor a status line.
        let file = terminal.directory.path().join("tmux.conf");
        std::fs::write(&file, "set -g status off\nset -g default-shell /bin/sh\nset -g remain-on-exit on\n")
            .expect("a file");
        let pid = format!("PID={}", terminal.directory.path().join("pid").display());
        terminal.tmux(&["new-session", "-d", "-s", "test", "-x", &columns, "-y", &rows, "-e", &pid, line]);
        terminal
    }

    /// The process id that was left.
    pub(crate) fn process(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("pid")).expect("a process id")
    }

    /// What is on the screen, line by line.
    pub(crate) fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-t", "test"])
    }

    /// The same with the escapes of styles.
    pub(crate) fn styled_screen(&self) -> String {
        self.tmux(&["capture-pane", "-e", "-p", "-t", "test"])
    }

    /// Types these keys, by tmux's names.
    pub(crate) fn press(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys", "-t", "test"], keys].concat());
    }

    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        let (columns, rows) = (columns.to_string(), rows.to_string());
        self.tmux(&["resize-window", "-t", "test", "-x", &columns, "-y", &rows]);
    }

    /// The first screen that this holds for. If none comes, prints the last one.
    pub(crate) fn until(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let _shown = Shown(self);
        let mut screen = String::new();
        block_until(what, || {
            screen = self.screen();
            holds(&screen) || {
                std::thread::sleep(PAUSE);
                false
            }
        });
        screen
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let at = |name: &str| self.directory.path().join(name);
        let (socket, file) = (at("socket"), at("tmux.conf"));
        let paths = [Path::new("-S"), &socket, Path::new("-f"), &file];
        let mut tmux = Command::new("tmux");
        tmux.args(paths).args(arguments).env("TERM", "xterm-256color").env_remove("TMUX");
        let output = tmux.output().expect("tmux on the PATH: tests/run.sh installs it");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {told}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

/// Prints the screen if a test ends here.
struct Shown<'a>(&'a Terminal);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0.screen());
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It ends all that runs in it.
        self.tmux(&["kill-server"]);
    }
}
