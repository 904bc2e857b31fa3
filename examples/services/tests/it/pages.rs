//! Each command of each page runs as printed, and prints what the page says, on servers of the test's own.

mod every_block;
mod examples;
mod hello;
mod of_redis;
mod of_the_record;

use std::path::PathBuf;

use tollgate_testing::console::{Command, Shell, commands, without_figures};
use tollgate_testing::repository::{read, root};

/// Commands that aren't run here, by how they begin, and why.
const ELSEWHERE: [(&str, &str); 5] = [
    ("bash tests/run.sh", "it runs this test"),
    ("cargo install ", "`packages` of .ci/run builds the same crate from its package"),
    ("docker ", "a daemon, and the images that it begins with, which no test has"),
    ("journalctl ", "a log of systemd, which no test has"),
    ("chronyc ", "a daemon that sets the machine's clock, which no test has"),
];

/// A page, and what its commands find in place of what they name.
struct Page {
    name: &'static str,
    shell: Shell,
    /// Text of its commands, and what stands for it here.
    replaced: Vec<(String, String)>,
    /// Commands, by how they begin, with the exit codes that they may have if not only 0.
    codes: Vec<(&'static str, &'static [i32])>,
    /// Those that go on until Ctrl-C.
    endless: Vec<&'static str>,
    /// What is done before a command that begins so: what the page says has happened.
    before: Vec<(&'static str, String)>,
    /// Commands that don't print the same twice, by how they begin: what they print is looked at by their test.
    different: Vec<&'static str>,
}

/// What a command has printed that the page shows otherwise.
struct Printed {
    command: String,
    shown: String,
    printed: String,
}

impl Page {
    /// In a folder that has the repository's own, and the rules and logs that the pages name.
    fn new(name: &'static str, shell: Shell) -> Self {
        let link = |from: PathBuf, to: &str| {
            std::os::unix::fs::symlink(from, shell.folder().join(to)).expect("a link");
        };
        for folder in ["crates", "examples", "lua", "tests"] {
            link(root().join(folder), folder);
        }
        if !shell.folder().join("bin/tollgate").exists() {
            link(tool(), "bin/tollgate");
        }
        shell.program("cargo", "[ \"$1 $2\" = 'run --' ] && exec tollgate \"${@:3}\"; exit 2");
        let rules = read("examples/rules.toml");
        let write = |file: &str, text: &str| std::fs::write(shell.folder().join(file), text).expect("a file");
        write("rules.toml", &rules);
        // A part is enough: what the tool finds in the whole is held by its own tests.
        let log = read("tests/data/access-combined.log");
        write("access.log", &log.split_inclusive('\n').take(1000).collect::<String>());
        for (name, of) in [("pino", "pino"), ("words", "words-own"), ("apache", "apache-duration")] {
            link(root().join(format!("tests/data/logs/{of}.log")), &format!("{name}.log"));
        }
        // Other rules of the same requests.
        let lower = rules.replacen("sliding-window 300/1m", "sliding-window 200/1m", 1);
        assert_ne!(lower, rules);
        write("new-rules.toml", &lower);
        write("rules.before.toml", &lower);
        let (replaced, codes, endless) = (Vec::new(), Vec::new(), Vec::new());
        Self { name, shell, replaced, codes, endless, before: Vec::new(), different: Vec::new() }
    }

    fn replace(mut self, from: &str, to: impl Into<String>) -> Self {
        self.replaced.push((from.to_owned(), to.into()));
        self
    }

    fn codes(mut self, command: &'static str, codes: &'static [i32]) -> Self {
        self.codes.push((command, codes));
        self
    }

    fn endless(mut self, command: &'static str) -> Self {
        self.endless.push(command);
        self
    }

    fn before(mut self, command: &'static str, done: impl Into<String>) -> Self {
        self.before.push((command, done.into()));
        self
    }

    fn different(mut self, command: &'static str) -> Self {
        self.different.push(command);
        self
    }

    /// Runs all of its commands, one after the other. Returns what is to be looked at by the test.
    fn run(&mut self) -> Vec<Printed> {
        let mut looked_at = Vec::new();
        let mut ran = 0;
        for Command { line, text, shown } in commands(&read(self.name)) {
            let at = format!("{}:{line}: {text}", self.name);
            if ELSEWHERE.iter().any(|(begins, _)| text.starts_with(begins)) {
                continue;
            }
            for (_, done) in self.before.iter().filter(|(command, _)| text.starts_with(command)) {
                let done = self.here(done);
                let (code, printed) = self.shell.run(&done);
                assert_eq!(code, 0, "{at}: before it, {done}: {printed}");
            }
            let codes =
                self.codes.iter().find(|(command, _)| text.starts_with(command)).map_or(&[0][..], |(_, codes)| codes);
            let here = self.here(&text);
            let (code, printed) = if self.endless.iter().any(|command| text.starts_with(command)) {
                let (code, printed) = self.shell.run_until_interrupted(&here);
                assert_eq!(code, 130, "{at}: expected it to go on until Ctrl-C: {printed}");
                (0, printed)
            } else if shown.is_empty() || text == "echo $?" {
                self.shell.run(&here)
            } else {
                self.shell.run_in_terminal(&here)
            };
            assert!(codes.contains(&code), "{at}: as {here}: exits with {code}: {printed}");
            ran += 1;
            if self.different.iter().any(|command| text.starts_with(command)) {
                looked_at.push(Printed { command: text, shown, printed });
            } else if !shown.is_empty() {
                self.learn(&shown, &printed);
                let (here, there) =
                    (without_figures(&self.here(&shown)), without_figures(&without_distribution(&printed)));
                // The rest may be left out.
                let as_shown = text != "echo $?" || shown == printed;
                assert!(as_shown, "{at}: {printed}");
                let as_shown = here.strip_suffix(" ...").map_or(here == there, |begins| there.starts_with(begins));
                assert!(as_shown, "{at}: prints\n{printed}not\n{shown}");
            }
        }
        assert!(ran > 0, "{}: expected commands", self.name);
        looked_at
    }

    /// A text of the page with what stands for it here.
    fn here(&self, text: &str) -> String {
        self.replaced.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    }

    /// What is made by chance or by the clock, such as the id of a key, is another one here, in later commands too.
    fn learn(&mut self, shown: &str, printed: &str) {
        let by_chance = |text: &str| -> Vec<String> {
            let id = text.split("Its id is ").nth(1).and_then(|rest| rest.split_whitespace().next()).map(str::to_owned);
            let key = text.split_whitespace().find(|word| word.starts_with("tg_")).map(str::to_owned);
            let moment = text.strip_prefix("bob|").map(|moment| moment.trim().to_owned());
            [key, id, moment].into_iter().flatten().collect()
        };
        self.replaced.extend(by_chance(shown).into_iter().zip(by_chance(printed)));
    }
}

/// Of a PostgreSQL, what follows its version: `(Debian 15.18-0+deb12u1)`.
fn without_distribution(printed: &str) -> String {
    let mut text = printed.to_owned();
    for distribution in [" (Debian ", " (Ubuntu "] {
        while let Some(at) = text.find(distribution) {
            let end = text[at..].find(')').map_or(text.len(), |length| at + length + 1);
            text.replace_range(at..end, "");
        }
    }
    text
}

/// The tool that was built beside this test.
fn tool() -> PathBuf {
    let own = std::env::current_exe().expect("this program");
    let tool = own.parent().and_then(|deps| deps.parent()).expect("a folder").join("tollgate");
    assert!(tool.exists(), "{}: expected the tool: cargo build -p tollgate-cli --all-features", tool.display());
    tool
}
