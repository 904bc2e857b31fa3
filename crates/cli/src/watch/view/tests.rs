use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;

use super::super::key_name::Label;
use super::super::plain::picture;
use super::super::snapshot::{Command, Decisions, Endpoint, Figures, Key, Latency, Node, Rule, Scripts, Service};
use super::*;

fn snapshot() -> Snapshot {
    let of = || Label { under: None, rule: "api".into(), limit: Some("token-bucket-1s".into()) };
    let figures = Figures {
        version: "Redis 7.0.15".into(),
        role: "master".into(),
        uptime_seconds: 7200,
        used_memory: 1 << 20,
        maxmemory: 100 << 20,
        maxmemory_policy: "noeviction".into(),
        keys: 1234,
        evicted: 5,
        evicted_per_second: Some(2.0),
        commands_per_second: Some(5034.0),
        cpu_share: Some(0.062),
        script_calls_per_second: Some(998.0),
        evalsha_p50_us: Some(19.1),
        evalsha_p99_us: Some(124.4),
        watch_share: Some(0.004),
        ..Figures::default()
    };
    let keys = (0..50).map(|number| Key {
        key: format!("user:{number}"),
        shard: None,
        of: of(),
        writes_per_second: Some(f64::from(100 - number)),
        touched_share: Some(1.0),
        freq: None,
    });
    let evalsha = Command { command: "evalsha", calls_per_second: 998.0, us_per_call: 25.9 };
    Snapshot {
        seconds: 1.0,
        nodes: vec![Node { address: "127.0.0.1:6379".into(), error: None, figures: Some(figures) }],
        scripts: Scripts {
            calls_per_second: Some(998.0),
            us_per_call: Some(25.9),
            core_share: Some(0.0258),
            by_command: vec![evalsha],
        },
        sample: Sample { time_share: Some(0.16), of: 1234, scanned: 600, touches: "idle", ..Sample::default() },
        rules: vec![Rule { of: of(), writes_per_second: Some(858.0), keys: Some(1200) }],
        keys: keys.collect(),
        ..Snapshot::default()
    }
}

fn service() -> Service {
    let decisions = |outcome: &str, source: &str, rate| Decisions {
        rule: "api".into(),
        algorithm: "token-bucket".into(),
        outcome: outcome.into(),
        source: source.into(),
        per_second: Some(rate),
        total: 1e6,
    };
    Service {
        endpoints: vec![Endpoint { url: "http://127.0.0.1:9000/metrics".into(), error: None }],
        decisions_per_second: Some(5000.0),
        decisions: vec![decisions("allowed", "redis", 4000.0), decisions("denied", "denial-cache", 1000.0)],
        latency: vec![Latency {
            source: "redis".into(),
            per_second: Some(4000.0),
            p50_us: Some(110.0),
            p99_us: Some(2000.0),
        }],
        batch_mean: Some(3.2),
        batch_p99: Some(7.0),
        breakers_open: Some(1.0),
        ..Service::default()
    }
}

/// What is drawn on a terminal of this size, after these keys.
fn drawn(snapshot: &Snapshot, (width, height): (u16, u16), keys: &str, colours: bool) -> (String, Buffer) {
    let (mut controls, history) = (Controls::default(), History::default());
    for key in keys.chars() {
        controls.press(KeyEvent::new(if key == '\t' { KeyCode::Tab } else { KeyCode::Char(key) }, KeyModifiers::NONE));
    }
    let view = View { snapshot, history: &history, theme: Theme { colours } };
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| view.draw(&mut controls, frame.area(), frame.buffer_mut())).expect("drawn");
    let buffer = terminal.backend().buffer().clone();
    let lines =
        buffer.content().chunks(width.into()).map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    let lines: Vec<_> = lines.map(|line| line.trim_end().to_owned()).collect();
    (lines.join("\n"), buffer)
}

#[test]
fn a_picture_of_a_usual_terminal_has_it_all() {
    let (text, _) = drawn(&snapshot(), (80, 24), "", true);
    let expected = "\
redis     127.0.0.1:6379  Redis 7.0.15  up 2h  5,034 commands/s  cpu 6.2%
          watching 0.4%
scripts   998 calls/s  25.9us each  2.6% of a core  p50 19.1us p99 124us
memory    1.00 MiB of 100.00 MiB (1.0%)  noeviction  1,234 keys  - expired/s
          2.0 evicted/s (5 so far)
keys rules decisions nodes  by writes
writes/s  touched  key                             rule/limit
     100     100%  user:0                          api/token-bucket-1s
      99     100%  user:1                          api/token-bucket-1s
";
    assert!(text.starts_with(expected), "{text}");
    let last: Vec<_> = text.lines().rev().take(2).collect();
    assert_eq!(last[1], "writes seen 16% of the time, 600 of 1,234 keys scanned");
    assert_eq!(last[0], "q quit  p pause  s sort  / filter  Tab table  jk scroll  ? help");
}

#[test]
fn the_help_says_all_it_has_to_say() {
    for width in [70, 80, 120] {
        let (text, _) = drawn(&snapshot(), (width, 24), "?", false);
        for (keys, what) in HELP {
            assert!(text.contains(&format!(" {keys:<14} {what}")), "{width}: {what}\n{text}");
        }
    }
}

#[test]
fn every_size_is_drawn_and_a_small_one_keeps_the_tables_and_the_keys() {
    let snapshot = Snapshot { service: Some(service()), ..snapshot() };
    for width in [1, 7, 39, 40, 60, 119, 120, 400] {
        for height in [1, 2, 3, 5, 8, 24, 100] {
            for keys in ["", "\t", "\t\t", "\t\t\t", "?", "/user", "G", "p", "/x\u{1f980}\u{301}"] {
                drawn(&snapshot, (width, height), keys, true);
            }
        }
    }
    let (text, _) = drawn(&snapshot, (40, 20), "", true);
    assert!(text.contains("user:0") && !text.contains("api/token-bucket"), "{text}");
    assert!(text.ends_with("q quit  p pause  s sort  / filter  ?"), "{text}");
    let (text, _) = drawn(&snapshot, (200, 50), "", true);
    let titles = text.lines().find(|line| line.starts_with("keys rules")).expect("titles");
    assert!(titles.ends_with("rules") && text.contains("         1,200") || text.contains("~1,200"), "{text}");
}

#[test]
fn without_colours_there_are_none_and_what_is_wrong_still_stands_out() {
    let coloured = |colours| {
        let (_, buffer) = drawn(&snapshot(), (80, 24), "", colours);
        buffer.content().iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
    };
    assert_eq!(coloured(false), 0);
    assert!(coloured(true) > 0);
    let (_, buffer) = drawn(&snapshot(), (80, 24), "", false);
    let evicted = buffer.content().iter().find(|cell| cell.symbol() == "2" && cell.modifier.contains(Modifier::BOLD));
    assert!(evicted.is_some());
}

#[test]
fn keys_change_the_table_its_order_its_rows_and_the_time() {
    let rows = |keys: &str| {
        let (text, _) = drawn(&snapshot(), (80, 24), keys, false);
        text.lines().filter(|line| line.contains("user:")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(rows("ss")[1].contains("user:1 ") && rows("ss")[2].contains("user:10"), "by key");
    assert_eq!(rows("/user:4")[..2], rows("")[4..5].iter().chain(&rows("/user:40")[..1]).cloned().collect::<Vec<_>>());
    assert!(rows("jj")[0].contains("user:2"));
    assert!(rows("G")[0].contains("user:49"));
    let (text, _) = drawn(&snapshot(), (80, 24), "\tp", false);
    assert!(
        text.contains("     858      ~1,200  api/token-bucket-1s") && text.ends_with("paused: p resumes, q quits"),
        "{text}"
    );
    let (text, _) = drawn(&snapshot(), (80, 24), "/zzz", false);
    let typed = "/zzz_  Enter applies the filter, Esc clears it";
    assert!(text.contains("no row contains \"zzz\"") && text.ends_with(typed), "{text}");
    let (text, _) = drawn(&snapshot(), (80, 24), "\t\t", false);
    assert!(text.contains("no --metrics URL of a service was given"), "{text}");
}

#[test]
fn the_service_has_its_lines_and_its_table() {
    let snapshot = Snapshot { service: Some(service()), ..snapshot() };
    let (text, _) = drawn(&snapshot, (80, 24), "\t\t", false);
    for line in [
        "decisions 5,000/s  allowed 4,000  denied 1,000\n          by denial-cache 1,000, redis 4,000\n",
        "latency   redis p50 110us p99 2ms\n",
        "client    batches of 3.2 keys, p99 7.0  1 breaker open\n",
        "    4,000  allowed  redis         api      token-bucket                1,000,000\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}

#[test]
fn what_is_away_is_said_where_it_would_be() {
    let mut away = snapshot();
    let node = &mut away.nodes[0];
    (node.figures, node.error) = (None, Some("Connection refused".into()));
    away.sample.no_scan = Some("NOPERM no scan".into());
    let endpoints = vec![Endpoint { url: "http://h:1/metrics".into(), error: Some("expected x, got y".into()) }];
    away.service = Some(Service { endpoints, ..Service::default() });
    let (text, _) = drawn(&away, (80, 24), "", false);
    assert!(
        text.starts_with(
            "redis     127.0.0.1:6379  error: Connection refused\nmetrics   http://h:1/metrics: expected x, got y\n"
        ),
        "{text}"
    );
    assert!(text.contains("keys not scanned: NOPERM no scan"), "{text}");
}

#[test]
fn a_plain_picture_has_every_table_and_no_control_characters() {
    let snapshot = Snapshot { service: Some(service()), ..snapshot() };
    for width in [1, 40, 80, 120] {
        let text = picture(&snapshot, &History::default(), width);
        assert!(!text.chars().any(|character| character.is_control() && character != '\n'), "{text}");
        assert!(
            ["\nkeys by writes (and 30 more)\n", "\nrules by writes\n", "\ndecisions by rate\n"]
                .iter()
                .all(|title| text.contains(title)),
            "{text}"
        );
        assert!(width < 40 || text.contains("user:19") && !text.contains("user:20"), "{text}");
    }
}

#[test]
fn no_control_character_of_a_name_reaches_the_terminal() {
    const HOSTILE: &str = "a\u{1b}[2Jb\rc\u{9b}d\ne\u{0}";
    let mut snapshot = Snapshot { service: Some(service()), ..snapshot() };
    snapshot.rules[0].of.rule = HOSTILE.into();
    snapshot.nodes[0].error = Some(HOSTILE.into());
    let of_service = snapshot.service.as_mut().unwrap();
    of_service.decisions[0].rule = HOSTILE.into();
    of_service.endpoints.push(Endpoint { url: "http://h:1/m".into(), error: Some(HOSTILE.into()) });
    let is_control = |c: char| c.is_control() && c != '\n';
    for width in [40, 80, 140] {
        for keys in ["", "\t", "\t\t", "\t\t\t"] {
            let (text, _) = drawn(&snapshot, (width, 30), keys, true);
            assert!(!text.contains(is_control), "{width}: {text:?}");
        }
        let plain = picture(&snapshot, &History::default(), width);
        assert!(!plain.contains(is_control), "{width}: {plain:?}");
    }
}
