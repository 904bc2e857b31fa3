//! What is drawn in a real terminal, and that the terminal is given back however the command ends.

use std::process::{Child, Command, Stdio};

use tollgate_testing::redis_server::Server;

use crate::support::terminal::Terminal;
use crate::support::tool::command;

const TOOL: &str = env!("CARGO_BIN_EXE_tollgate");

/// A line for the shell that runs the tool and then says how it ended, and whether the terminal is as before: a
/// terminal that was given back waits for whole lines, and echoes them. The shell outlives a Ctrl-C.
fn line(environment: &str, arguments: &str) -> String {
    let run = format!("env -u NO_COLOR -u TOLLGATE_URL {environment} sh -c 'echo $$ >\"$PID\"; exec \"$0\" \"$@\"'");
    let after = "echo \"code=$?\"; stty -a | grep -Eo -e '-?(icanon|echo)\\b' | tr '\\n' ' '; exec sleep 1000";
    format!("trap : INT; echo before; {run} {TOOL} {arguments}; {after}")
}

fn was_given_back(screen: &str) -> bool {
    let as_before = screen.contains("before") && screen.contains("icanon echo");
    as_before && !screen.contains("-icanon") && !screen.contains("-echo")
}

/// A server with a load on it.
struct Loaded {
    server: Server,
    load: Child,
}

impl Loaded {
    fn start() -> Self {
        let server = Server::start();
        let load = ["load", "gcra 1000000/1s", "--no-audit", "--key-count", "30", "--rate", "300", "--duration", "1h"];
        let load = command(&[&load[..], &["--url", &server.url()]].concat())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the tool runs");
        Self { server, load }
    }

    fn watch(&self, environment: &str, (columns, rows): (u16, u16), more: &str) -> Terminal {
        let arguments = format!("watch --interval 200ms --deadline 20s --url {} {more}", self.server.url());
        Terminal::run(columns, rows, &line(environment, &arguments))
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.load.kill().expect("it was running");
        self.load.wait().expect("it ends");
    }
}

/// It is drawn from the top, so the last line comes with all others.
fn shows_keys(screen: &str) -> bool {
    let is_whole = screen.lines().last().is_some_and(|line| line.starts_with("q quit"));
    is_whole && screen.contains("key-") && screen.lines().any(|line| line.starts_with("keys rules decisions nodes"))
}

#[test]
fn watch_is_drawn_on_small_and_large_terminals_and_follows_their_size() {
    let loaded = Loaded::start();
    let terminal = loaded.watch("", (80, 24), "");
    let screen = terminal.until("keys are shown", shows_keys);
    assert!(screen.starts_with("redis     "), "{screen}");
    assert!(screen.contains("rule/limit") && screen.contains("cli/token-bucket-1s under lo"), "{screen}");
    assert_eq!(screen.lines().last(), Some("q quit  p pause  s sort  / filter  Tab table  jk scroll  ? help"));
    terminal.resize(40, 20);
    // A server that a busy machine keeps silent for a moment is shown as away, without keys.
    let is_small = |screen: &str| shows_keys(screen) && screen.trim_end().ends_with("/ filter  ?");
    let screen = terminal.until("it is smaller", is_small);
    assert!(!screen.contains("rule/limit"), "{screen}");
    terminal.resize(200, 50);
    terminal.until("it is larger", |screen| shows_keys(screen) && screen.matches("rule/limit").count() == 2);
}

#[test]
fn keys_choose_what_watch_shows() {
    let loaded = Loaded::start();
    let terminal = loaded.watch("", (80, 24), "");
    terminal.until("keys are shown", shows_keys);
    terminal.press(&["s", "s"]);
    terminal.until("sorted by key", |screen| screen.contains("nodes  by key"));
    terminal.press(&["/", "k", "e", "y", "-", "2", "9", "Enter"]);
    let only = |line: &&str| line.contains("key-") && !line.contains("key-29") && !line.contains("only");
    terminal.until("filtered", |screen| screen.contains("only \"key-29\"") && !screen.lines().any(|line| only(&line)));
    terminal.press(&["Escape"]);
    terminal.until("all again", |screen| !screen.contains("only"));
    terminal.press(&["Tab"]);
    terminal.until("the rules", |screen| screen.contains("nodes  by writes") && screen.contains("cli/token-bucket-1s"));
    terminal.press(&["?"]);
    terminal.until("help", |screen| screen.contains("pause or resume"));
    terminal.press(&["x", "p"]);
    let paused = terminal.until("paused", |screen| screen.ends_with("paused: p resumes, q quits\n"));
    assert!(!paused.contains("pause or resume"), "{paused}");
}

#[test]
fn the_terminal_is_given_back_however_watch_ends() {
    let loaded = Loaded::start();
    for end in ["q", "C-c", "TERM", "INT"] {
        let terminal = loaded.watch("", (80, 24), "");
        let screen = terminal.until("keys are shown", shows_keys);
        assert!(!screen.contains("before"), "it has a screen of its own: {screen}");
        match end {
            "TERM" | "INT" => {
                let killed = Command::new("kill").args([&format!("-{end}"), terminal.process().trim()]).status();
                assert!(killed.expect("kill runs").success());
            }
            key => terminal.press(&[key]),
        }
        let screen = terminal.until("it has ended", |screen| screen.contains("code="));
        let screen = if was_given_back(&screen) { screen } else { terminal.until("given back", was_given_back) };
        assert!(screen.contains("code=0"), "{end}: {screen}");
    }
}

#[test]
fn a_redis_that_is_not_there_leaves_the_terminal_alone() {
    let nobody = format!("redis://127.0.0.1:{}", tollgate_testing::redis_server::free_port());
    let terminal = Terminal::run(80, 24, &line("", &format!("watch --url {nobody}")));
    let screen = terminal.until("it has ended", was_given_back);
    assert!(screen.contains("code=2") && screen.contains("error: no connection to redis at 127.0.0.1"), "{screen}");
}

#[test]
fn a_redis_that_goes_away_is_said_on_the_screen_until_it_is_back() {
    let mut loaded = Loaded::start();
    let terminal = loaded.watch("", (80, 24), "");
    terminal.until("keys are shown", shows_keys);
    loaded.server.stop();
    terminal.until("the error is shown", |screen| screen.lines().any(|line| line.contains("error: ")));
    loaded.server.start_again(&[]);
    terminal.until("back", |screen| shows_keys(screen) && !screen.contains("error: "));
}

/// Escapes of the colours of text and of what is behind it.
fn coloured(styled: &str) -> bool {
    let codes = styled.split("\u{1b}[").skip(1).filter_map(|rest| rest.split('m').next());
    codes
        .flat_map(|codes| codes.split(';'))
        .any(|code| code.len() == 2 && (code.starts_with('3') || code.starts_with('4')) && code != "39" && code != "49")
}

#[test]
fn colours_are_left_out_where_none_are_wanted() {
    let loaded = Loaded::start();
    for (environment, colours) in [("", true), ("NO_COLOR=1", false)] {
        let terminal = loaded.watch(environment, (80, 24), "");
        terminal.until("keys are shown", shows_keys);
        let styled = terminal.styled_screen();
        assert_eq!(coloured(&styled), colours, "{environment}: {styled:?}");
    }
}

#[test]
fn a_terminal_that_cannot_be_redrawn_gets_one_picture_after_the_other() {
    let loaded = Loaded::start();
    let terminal = loaded.watch("TERM=dumb", (80, 150), "");
    let screen = terminal.until("two pictures", |screen| screen.matches("\nscripts   ").count() >= 2);
    assert!(screen.contains("before\nredis     "), "the screen isn't taken over: {screen}");
    assert!(!terminal.styled_screen().contains('\u{1b}'));
    terminal.press(&["C-c"]);
    terminal.until("it has ended", |screen| screen.contains("code=0"));
}

#[test]
fn a_load_is_drawn_while_it_runs_and_ends_with_a_histogram() {
    // On a busy machine the histogram has twice as many rows: what was printed first stays on the screen.
    for (columns, rows) in [(80, 90), (40, 90)] {
        let arguments = "load 'gcra 5/1s' --rate 200 --keys hot --warmup 0s --duration 5s --format table";
        let terminal = Terminal::run(columns, rows, &line("", arguments));
        let screen = terminal.until("it is drawn", |screen| screen.contains("\ndenied  "));
        for drawn in [" calls\nrate  ", "/s  ", "\np99  ", "%  "] {
            assert!(screen.contains(drawn), "{drawn}: {screen}");
        }
        let screen = terminal.until("it has ended", was_given_back);
        assert!(!screen.contains("\ndenied  ") && screen.contains("\ntook up to  "), "{screen}");
        assert!(screen.contains("code=0"), "{screen}");
    }
    let dumb = Terminal::run(80, 90, &line("TERM=dumb", "load 'gcra 5/1s' --rate 200 --warmup 0s --count 300"));
    let screen = dumb.until("it has ended", was_given_back);
    assert!(screen.contains("took up to") && !screen.contains("audited"), "{screen}");
}
