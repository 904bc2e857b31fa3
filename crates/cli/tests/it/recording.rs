//! The recording in the README: what its commands print now is what it shows, but for figures that vary.
//!
//! `.github/recording/tape` has the commands, and `record.sh` beside it makes the pictures. These are read here as they
//! are shown: frame by frame, each a screen of text.

use std::collections::HashMap;

use quick_xml::escape::unescape;
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::{read, root};

use crate::support::terminal::Terminal;

const FOLDER: &str = ".github/recording";
const ANEW: &str = "bash .github/recording/record.sh makes the recording anew";
/// Bytes of a picture.
const LARGEST: usize = 150_000;
/// Pixels of a character.
const WIDE: usize = 8;
const HIGH: usize = 17;

type Screen = Vec<String>;

struct Recording {
    columns: u16,
    rows: u16,
    frames: Vec<Screen>,
}

impl Recording {
    fn read(name: &str) -> Self {
        let svg = read(&format!("{FOLDER}/{name}.svg"));
        assert!(svg.len() <= LARGEST, "{name}: {} bytes", svg.len());
        for needed_elsewhere in ["<script", "<image", "@import", "@font-face", "url("] {
            assert!(!svg.contains(needed_elsewhere), "{name}: {needed_elsewhere}");
        }
        let (_, size) = svg.split_once("<termtosvg:screen_geometry").expect("a size");
        let [columns, rows] = ["columns", "rows"].map(|what| attribute(size, what));
        let (defined, view) = svg.split_once("<g id=\"screen_view\">").expect("frames");
        let lines: HashMap<_, _> = defined
            .split("<g id=\"")
            .skip(1)
            .map(|group| (group.split('"').next().expect("a name"), line(group.split("</g>").next().expect("an end"))))
            .collect();
        // Frames stand one under the other, each with a row between, and an even number of rows.
        let apart = (rows + 1).next_multiple_of(2);
        let frame = |(at, frame): (usize, &str)| {
            let mut screen = vec![String::new(); rows];
            for used in frame.split("<use xlink:href=\"#").skip(1) {
                let name = used.split('"').next().expect("a name");
                screen[attribute(used, "y") / HIGH - at * apart].clone_from(&lines[name]);
            }
            trimmed(screen)
        };
        let frames = view.split("<g>").skip(1).enumerate().map(frame).collect();
        let [columns, rows] = [columns, rows].map(|count| count.try_into().expect("a terminal's size"));
        Self { columns, rows, frames }
    }
}

fn attribute(element: &str, name: &str) -> usize {
    let (_, value) = element.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("{element:.80}: {name}"));
    value.split('"').next().and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{element:.80}: {name}"))
}

/// The texts of a line, each in its column.
fn line(group: &str) -> String {
    let mut line = String::new();
    for text in group.split("<text").skip(1) {
        let (_, content) = text.split_once('>').expect("a text");
        let content = unescape(content.split("</text>").next().expect("an end")).expect("XML");
        line += &" ".repeat(attribute(text, "x") / WIDE - line.chars().count());
        line += &content;
    }
    line
}

fn trimmed(screen: impl IntoIterator<Item = impl AsRef<str>>) -> Screen {
    let mut rows: Vec<_> = screen.into_iter().map(|row| row.as_ref().trim_end().to_owned()).collect();
    rows.truncate(rows.iter().rposition(|row| !row.is_empty()).map_or(0, |last| last + 1));
    rows
}

/// The commands of each screen: a paragraph of the tape.
fn screens() -> Vec<Vec<String>> {
    let tape = read(&format!("{FOLDER}/tape"));
    let commands: Vec<_> = tape.lines().filter(|line| !line.starts_with('#')).collect();
    let screens = commands.split(|line| line.is_empty()).filter(|screen| !screen.is_empty());
    screens.map(|screen| screen.iter().map(|command| (*command).to_owned()).collect()).collect()
}

/// What has to be as it was: texts, columns, and the numbers that don't depend on the machine and the moment.
fn steady(screen: &[String]) -> Screen {
    let mut command = "";
    let mut steady = Screen::new();
    for row in screen {
        if let Some(typed) = row.strip_prefix("$ tollgate ") {
            command = typed.split(' ').next().unwrap_or_default();
        }
        let begins = |labels: &[&str]| labels.iter().any(|label| row.starts_with(label));
        let of_time = ["full again ", "next ", "expires ", "newest_us ", "oldest_us "];
        let is_histogram = steady.last().is_some_and(|row| row == "took up to");
        match command {
            _ if row.starts_with('$') => steady.push(row.clone()),
            "probe" if begins(&["allowed ", "denied "]) => steady.push(without_times(row, true)),
            "inspect" if begins(&of_time) => steady.push(without_times(row, false)),
            // One row for as many as there are.
            "load" if begins(&["took up to "]) => steady.push("took up to".to_owned()),
            "load" if is_histogram && begins(&[" "]) => {}
            // Calls that were sent late are remarked on if there are any, which takes a second row.
            "load" if begins(&["sent late "]) => {
                steady.push(without_times(row.split("  (").next().unwrap_or_default(), true));
            }
            "load" if row.ends_with(" by more than 1ms)") => {}
            "load" if begins(&["latency ", "rate ", "p99 ", "denied "]) => {
                steady.push(without_times(without_bars(row), true));
            }
            "load"
                if begins(&["answered ", "decisions "]) || row.ends_with(" calls") || row.contains(" admitted; ") =>
            {
                // A load that took longer than it was to take says so.
                steady.push(replaced(without_bars(row), |_| "#".to_owned()).replace(", though due within #", ""));
            }
            _ => steady.push(row.clone()),
        }
    }
    steady
}

fn without_bars(row: &str) -> &str {
    row.trim_matches(|letter: char| letter == ' ' || ('▀'..='▟').contains(&letter))
}

/// With `#` for each time, rate and percentage; in a column, at its right.
fn without_times(row: &str, in_column: bool) -> String {
    replaced(row, |figure| match figure.contains(|letter: char| letter.is_alphabetic() || letter == '%') {
        true if in_column => format!("{:>1$}", "#", figure.len()),
        true => "#".to_owned(),
        false => figure.to_owned(),
    })
}

/// With another text for each word that begins with a digit.
fn replaced(row: &str, by: impl Fn(&str) -> String) -> String {
    let replace = |word: &str| {
        let figure = word.trim_end_matches([',', ':', ';', '.']);
        if figure.starts_with(|first: char| first.is_ascii_digit()) {
            by(figure) + &word[figure.len()..]
        } else {
            word.to_owned()
        }
    };
    row.split(' ').map(replace).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_recording_in_the_readme_shows_what_its_commands_print() {
    let recording = Recording::read("light");
    let Recording { columns, rows, frames } = &recording;
    assert_eq!(frames, &Recording::read("dark").frames, "{ANEW}");
    assert!(frames.len() > 20, "{}", frames.len());
    // Where nothing moves the first frame is shown: it is the result of the last command.
    assert_eq!(frames.first(), frames.last(), "{ANEW}");
    let readme = read("README.md");
    for picture in ["light.svg", "dark.svg"] {
        assert!(readme.contains(&format!("=\"{FOLDER}/{picture}\"")), "README.md: {picture}");
    }

    let server = Server::start();
    let folder = tempfile::tempdir().expect("a folder");
    let log = root().join("tests/data/access-combined.log");
    std::os::unix::fs::symlink(log, folder.path().join("access.log")).expect("a link");
    let screens = screens();
    let terminals = screens.iter().map(|commands| {
        let line = shell(commands, &folder.path().display().to_string(), &server.url());
        // A slow machine's histogram has more rows.
        Terminal::run(*columns, rows + 20, &line)
    });
    // All of them run at once. The last one's drawing is gone once it ends, so it is looked at first.
    for (commands, terminal) in screens.iter().zip(terminals.collect::<Vec<_>>()).rev() {
        let first = format!("$ {}", commands[0]);
        let shown = frames.iter().rfind(|frame| frame.first() == Some(&first));
        let shown = shown.unwrap_or_else(|| panic!("{first}: not in the recording; {ANEW}"));
        if commands.iter().any(|command| command.starts_with("tollgate load ")) {
            let drawn: Vec<_> = frames.iter().map(|frame| steady(frame)).collect();
            // Now and then a screen is caught half drawn.
            let is_shown = |screen: &str| drawn.contains(&steady(&trimmed(screen.lines())));
            let what = format!("{first}: drawn as the recording shows; {ANEW}");
            terminal.until(&what, |screen| screen.contains("\ndenied  ") && is_shown(screen));
        }
        let now = terminal.until("the commands have ended", |screen| screen.trim_end().ends_with("\n$"));
        assert_eq!(steady(&trimmed(now.lines())), steady(shown), "now, and in the recording; {ANEW}");
    }
}

/// A line for a shell that runs the commands as if they were typed. A deadline isn't what a busy machine is tested for.
fn shell(commands: &[String], folder: &str, url: &str) -> String {
    let (bin, _) = env!("CARGO_BIN_EXE_tollgate").rsplit_once('/').expect("a folder");
    let mut line = format!(
        "cd '{folder}'; unset NO_COLOR TOLLGATE_URL; PATH='{bin}':$PATH; REDIS='{url}'; \
         tollgate() {{ case $1 in load) set -- \"$@\" --deadline 30s;; esac; command tollgate \"$@\"; }}; "
    );
    for command in commands {
        assert!(!command.contains('\''), "{command}: typed between such quotes");
        line += &format!("echo '$ {command}'; {command}; ");
    }
    line + "printf '$ '; exec sleep 1000"
}
