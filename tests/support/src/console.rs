//! The commands of a page, which it has in blocks with what they print, and a shell that runs them as printed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tempfile::TempDir;

/// Longer than any command of a page takes, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(300);

pub struct Command {
    /// Where it stands in its page, from 1 on.
    pub line: usize,
    pub text: String,
    /// What the page says that it prints.
    pub shown: String,
}

/// The commands in the blocks of a page that are marked `console`: each begins with `$ `, and goes on as long as a
/// shell would read on.
pub fn commands(page: &str) -> Vec<Command> {
    let mut found = Vec::<Command>::new();
    let (mut inside, mut whole) = (false, true);
    for (number, line) in page.lines().enumerate() {
        let line = line.trim_end();
        if line.starts_with("```") {
            inside = line == "```console" && !inside;
            continue;
        }
        if !inside {
            continue;
        }
        let last = found.last_mut();
        match (line.strip_prefix("$ "), last) {
            (_, Some(command)) if !whole => {
                command.text += &format!("\n{line}");
                whole = is_whole(&command.text);
            }
            (Some(text), _) => {
                whole = is_whole(text);
                found.push(Command { line: number + 1, text: text.to_owned(), shown: String::new() });
            }
            (None, Some(command)) => command.shown += &format!("{line}\n"),
            (None, None) => panic!("{line}: expected a command before what it prints"),
        }
    }
    assert!(whole, "expected an end of {:?}", found.last().map(|command| &command.text));
    found
}

/// Whether a shell would read no further line.
fn is_whole(text: &str) -> bool {
    let checked = Process::new("bash").args(["-nc", text]).env("LC_ALL", "C").output().expect("bash");
    // Of a here-document without an end it only warns.
    !text.ends_with('\\') && checked.status.success() && checked.stderr.is_empty()
}

/// A shell in a folder of its own, which keeps what it was told from one command to the next.
pub struct Shell {
    process: Child,
    input: ChildStdin,
    codes: Receiver<i32>,
    folder: TempDir,
}

impl Shell {
    /// With `bin` of its folder first in its PATH.
    pub fn start() -> Self {
        Self::start_by(Process::new("bash"), tempfile::tempdir().expect("a temporary directory"))
    }

    /// The same, by a command that may set what the shell begins with.
    pub fn start_by(mut bash: Process, folder: TempDir) -> Self {
        let path = std::env::var("PATH").expect("a PATH");
        let own = folder.path().join("own");
        std::fs::create_dir_all(folder.path().join("bin")).expect("a folder");
        std::fs::create_dir_all(&own).expect("a folder");
        // The shell may be another user's.
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o777)).expect("its mode");
        bash.current_dir(folder.path()).env("PATH", format!("{}:{path}", folder.path().join("bin").display()));
        // Its own words would stand among what the commands print.
        bash.env("HOME", folder.path()).env("LC_ALL", "C.UTF-8").env("TZ", "UTC").env_remove("TOLLGATE_URL");
        // However slow this machine is.
        bash.env("TOLLGATE_DEADLINE", "1m");
        bash.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = bash.spawn().expect("bash");
        let (mut input, output) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        // A pipe fails with any of its commands.
        input.write_all(b"set -o pipefail\n").expect("the shell reads");
        let (send, codes) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = send.send(line.parse().expect("an exit code"));
            }
        });
        Self { process, input, codes, folder }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Makes a program that the commands find before the machine's.
    pub fn program(&self, name: &str, text: &str) -> PathBuf {
        let file = self.folder().join("bin").join(name);
        std::fs::write(&file, format!("#!/usr/bin/env bash\n{text}\n")).expect("a program");
        let made = Process::new("chmod").args(["+x".as_ref(), file.as_os_str()]).status().expect("chmod");
        assert!(made.success());
        file
    }

    /// Runs this; returns its exit code, and what it prints, on standard error too.
    pub fn run(&mut self, command: &str) -> (i32, String) {
        self.follow(command, ". own/command")
    }

    /// The same in a terminal of 100 columns, in a shell that ends with the command.
    pub fn run_in_terminal(&mut self, command: &str) -> (i32, String) {
        let (code, printed) = self.follow(command, &in_terminal(". own/command"));
        (code, as_text(&printed))
    }

    /// The same of a command that goes on until Ctrl-C, which it gets after two seconds.
    pub fn run_until_interrupted(&mut self, command: &str) -> (i32, String) {
        // As a terminal does it: to the shell and to what it runs.
        let until = "trap 'exit 130' INT; (sleep 2; kill -INT 0) & . own/command";
        let (code, printed) = self.follow(command, &in_terminal(until));
        (code, as_text(&printed))
    }

    /// Has the shell run the command that a file has, as `how` says.
    fn follow(&mut self, command: &str, how: &str) -> (i32, String) {
        // In a folder that no page names.
        std::fs::write(self.folder().join("own/command"), format!("{command}\n")).expect("a command");
        let printed = self.folder().join("own/printed");
        let line = format!(
            "(exit \"${{code:-0}}\"); {how} </dev/null >'{}' 2>&1; code=$?; echo \"$code\"\n",
            printed.display()
        );
        self.input.write_all(line.as_bytes()).expect("the shell reads");
        let code = self.codes.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{command}: {error}"));
        let printed = std::fs::read(&printed).expect("what it printed");
        (code, String::from_utf8_lossy(&printed).into_owned())
    }
}

/// What a terminal shows in the end: no colours, and of a line that was drawn again and again the last.
fn as_text(sent: &str) -> String {
    let mut pieces = sent.split("\u{1b}[");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    text.extend(
        pieces.filter_map(|piece| piece.split_once(|letter: char| letter.is_ascii_alphabetic())).map(|(_, rest)| rest),
    );
    let shown = |line: &str| line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default().to_owned();
    text.split('\n').map(shown).collect::<Vec<_>>().join("\n")
}

/// A shell's command for one that runs another in a terminal.
fn in_terminal(command: &str) -> String {
    let quoted = command.replace('\'', "'\\''");
    format!("SHELL=$BASH TERM=xterm script -qec 'set -o pipefail; stty cols 100 rows 40; {quoted}' /dev/null")
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A text without what differs from one run to the next: each number with its unit is `N`, and all space is one blank.
pub fn without_figures(text: &str) -> String {
    const UNITS: [&str; 10] = ["us", "ms", "s", "m", "h", "d", "B", "KiB", "MiB", "kB"];
    let is_of_number = |letter: char| letter.is_ascii_digit() || ['.', ','].contains(&letter);
    let mut words = Vec::<String>::new();
    for word in text.split_whitespace() {
        let word = without_hexadecimal(word);
        let word = word.as_str();
        let (mut plain, mut rest) = (String::new(), word);
        // A unit may stand apart from its number.
        if words.last().is_some_and(|last| last.ends_with('N')) {
            let unit = word.trim_end_matches([',', '.', ';']);
            rest = if UNITS.contains(&unit) { &word[unit.len()..] } else { word };
        }
        while let Some(at) = rest.find(|letter: char| letter.is_ascii_digit()) {
            plain += &rest[..at];
            rest = rest[at..].trim_start_matches(is_of_number);
            let unit = rest.find(|letter: char| !letter.is_ascii_alphabetic()).unwrap_or(rest.len());
            rest = if UNITS.contains(&&rest[..unit]) { &rest[unit..] } else { rest };
            if !plain.ends_with('N') {
                plain.push('N');
            }
        }
        plain += if rest == "..." { rest } else { rest.trim_end_matches([',', '.', ';']) };
        words.push(plain);
    }
    words.retain(|word| !word.is_empty());
    words.join(" ")
}

/// Of PostgreSQL's WAL, a position (`0/3000090`) or a file (24 digits) is a zero, or two.
fn without_hexadecimal(word: &str) -> String {
    let is_digit = |letter: char| matches!(letter, '0'..='9' | 'A'..='F');
    let digits = word.find(|letter| !is_digit(letter)).unwrap_or(word.len());
    let rest = &word[digits..];
    let is_position = rest.strip_prefix('/').is_some_and(|rest| !rest.is_empty() && rest.chars().all(is_digit));
    match (digits, is_position) {
        (24, _) => format!("0{rest}"),
        (1.., true) => "0/0".to_owned(),
        _ => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Shell, commands, without_figures};

    #[test]
    fn commands_are_read_as_far_as_a_shell_would() {
        let page = "text\n\n```console\n$ echo 'a\n$ b' |\n    cat\na\n$ b\n```\n\n```text\n$ no\n```\n\n```console\n$ cat <<E\nx\nE\nx\n```\n";
        let found = commands(page);
        let seen: Vec<_> = found.iter().map(|one| (one.line, one.text.as_str(), one.shown.as_str())).collect();
        assert_eq!(seen, [(4, "echo 'a\n$ b' |\n    cat", "a\n"), (8, "b", ""), (16, "cat <<E\nx\nE", "x\n")]);
    }

    #[test]
    fn a_shell_keeps_what_it_was_told() {
        let mut shell = Shell::start();
        assert_eq!(shell.run("export A=1; (exit 3)"), (3, String::new()));
        assert_eq!(shell.run("echo $? $A"), (0, "3 1\n".to_owned()));
        shell.program("greet", "echo \"hello, $1\" >&2");
        assert_eq!(shell.run("greet you"), (0, "hello, you\n".to_owned()));
        assert_eq!(shell.run_in_terminal("test -t 1 && echo $A; exit 4"), (4, "1\n".to_owned()));
        assert_eq!(
            shell.run_in_terminal("printf 'half\\r\\033[2K\\033[1mdone\\033[0m\\r\\n'"),
            (0, "done\n".to_owned())
        );
        assert_eq!(shell.run_until_interrupted("while sleep 0.1; do :; done"), (130, String::new()));
    }

    #[test]
    fn numbers_differ_and_words_do_not() {
        assert_eq!(
            without_figures("took 1.2ms  of\n 1,000 KiB, 3 (4%)"),
            without_figures("took 970us of 5 MiB, 12 (9%)")
        );
        assert_ne!(without_figures("3 kept"), without_figures("3 lost"));
    }
}
