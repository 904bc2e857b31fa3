//! What a replay makes of a file of another format, and of many lines that can't be read.

use std::io::{BufRead, BufReader};

use serde_json::json;

use super::*;
use crate::support::tool::{code, command, lines, stderr, stdout, tollgate, with_input};

const JSONL: &str = "{\"t_us\":1,\"key\":\"a\"}\n";
const CSV: &str = "t_us,key\n1,a\n";
const ACCESS_JSON: &str =
    "{\"ts\":1431857103.25,\"request\":{\"client_ip\":\"1.2.3.4\",\"method\":\"GET\",\"uri\":\"/\"}}\n";
const COMBINED: &str = "1.2.3.4 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1\n";

/// Of a file, and of standard input.
fn replays(options: &[&str], input: impl AsRef<[u8]>) -> [(String, Output); 2] {
    let input = input.as_ref();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, input).expect("written");
    let path = file.path().to_str().expect("UTF-8");
    let arguments = |from| [&["replay", "--rule", "gcra 5/1s", "--summary", from][..], options].concat();
    [(path.to_owned(), tollgate(&arguments(path))), ("standard input".to_owned(), with_input(&arguments("-"), input))]
}

#[test]
fn the_format_is_taken_from_the_beginning_and_said_and_nothing_is_lost() {
    for (input, what, format) in [
        (JSONL.to_owned(), "JSON lines", "jsonl"),
        (format!("\u{feff}\n{JSONL}"), "JSON lines", "jsonl"),
        (CSV.to_owned(), "CSV", "csv"),
        (COMBINED.to_owned(), "an access log", "combined"),
        (COMBINED.trim_end().to_owned(), "an access log", "combined"),
        (ACCESS_JSON.to_owned(), "an access log", "access-json"),
    ] {
        for (name, output) in replays(&[], &input) {
            assert_eq!(code(&output), 0, "{}", stderr(&output));
            let said = format!("tollgate: {name} looks like {what}: read as --input {format}\n");
            assert!(stderr(&output).contains(&said), "{}", stderr(&output));
            let summary = &lines(&output)[0];
            assert_eq!((&summary["records"], &summary["unreadable"]), (&json!(1), &json!(0)), "{input}");
        }
        for (_, output) in replays(&["--input", format], &input) {
            assert_eq!(code(&output), 0, "{}", stderr(&output));
            assert!(!stderr(&output).contains("looks like"), "{}", stderr(&output));
        }
    }
}

/// A pipe, such as a shell's `<(...)`, can be read only once; a file is read twice.
#[test]
fn a_named_pipe_is_replayed_as_a_file_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, pipe) = (folder.path().join("file"), folder.path().join("pipe"));
    let lines: String = (0..10_000)
        .map(|at: u64| format!("{{\"t_us\":{},\"key\":\"{}\"}}\n", at * 1000 % 7_000_000, at % 7))
        .chain(["no record\n".to_owned()])
        .collect();
    std::fs::write(&file, &lines).expect("written");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let written = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::write(pipe, lines).expect("written")
    });
    let [of_pipe, of_file] = [&pipe, &file].map(|path| {
        let output = tollgate(&["replay", "--rule", "gcra 5/1s", path.to_str().expect("UTF-8")]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(stderr(&output).contains("line 10001: "), "{}", stderr(&output));
        stdout(&output)
    });
    written.join().expect("written");
    assert!(of_pipe == of_file && of_file.lines().count() == 10_000);
}

/// As logs are after they were rotated: compressed, and with others appended.
#[test]
fn compressed_records_are_read_and_those_that_are_cut_off_are_an_error() {
    let log = COMBINED.repeat(5_000);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(log.as_bytes()).expect("written");
    let (gzip, zstd) = (gzip.finish().expect("written"), zstd::encode_all(log.as_bytes(), 3).expect("written"));
    for (name, compressed) in [("gzip", gzip), ("zstd", zstd)] {
        for (_, output) in replays(&[], [&compressed[..], &compressed].concat()) {
            assert_eq!(code(&output), 0, "{}", stderr(&output));
            assert!(stderr(&output).contains("read as --input combined"), "{}", stderr(&output));
            assert_eq!(lines(&output)[0]["records"], json!(10_000), "{name}");
        }
        for (from, output) in replays(&["--input", "combined"], &compressed[..compressed.len() - 1]) {
            let told = stderr(&output);
            assert_eq!((code(&output), stdout(&output).as_str()), (2, ""), "{told}");
            assert_eq!(told.lines().last(), Some(format!("error: {from}: the {name} data is cut off").as_str()));
        }
    }
}

#[test]
fn an_unknown_format_is_reported_with_the_known_ones_and_empty_input_is_no_records() {
    for (name, output) in replays(&[], "# a list\n1 2 3\n") {
        let expected = "its format isn't known: give --fields time=FIELD,ip=FIELD,request=FIELD";
        let why = "and no time and address can be seen in it: every request needs its time";
        assert_eq!(stderr(&output), format!("error: {name}: {expected}; it begins with \"# a list\", {why}\n"));
        assert_eq!((code(&output), stdout(&output).as_str()), (2, ""));
    }
    for (_, output) in replays(&[], "\n \n") {
        assert_eq!((code(&output), &lines(&output)[0]["records"]), (0, &json!(0)));
    }
}

#[test]
fn a_file_of_which_nothing_can_be_read_ends_the_replay_with_the_input_to_give() {
    let log = COMBINED.repeat(10_000);
    for (name, output) in replays(&["--input", "jsonl"], &log) {
        let told = stderr(&output);
        let start =
            format!("error: {name}: none of its first 10 lines can be read as jsonl: line 1: line: expected a JSON");
        assert!(told.starts_with(&start), "{told}");
        assert!(told.ends_with("; it looks like combined: give --input combined\n"), "{told}");
        assert_eq!((code(&output), told.lines().count(), stdout(&output).as_str()), (2, 1, ""));
    }
    for (given, input, told) in [
        ("jsonl", COMBINED, "its first line can't be read as jsonl: line 1: "),
        ("jsonl", CSV, "none of its first 2 lines can be read as jsonl: line 1: "),
        ("combined", JSONL, "; it looks like jsonl: give --input jsonl"),
        ("combined", CSV, "; it looks like csv: give --input csv"),
        ("csv", COMBINED, "; it looks like combined: give --input combined"),
        ("csv", JSONL, "; it looks like jsonl: give --input jsonl"),
        ("jsonl", ACCESS_JSON, "; it looks like access-json: give --input access-json"),
        ("access-json", JSONL, "; it looks like jsonl: give --input jsonl"),
        ("jsonl", "{\"key\":\"a\"}\n", "its first line can't be read as jsonl: line 1: t_us: it is missing\n"),
        ("csv", "t_us,key\n1\n", "its first line can't be read as csv: line 2: row: expected 2 fields, got 1\n"),
    ] {
        for strict in [&[][..], &["--strict"]] {
            for (_, output) in replays(&[&["--input", given][..], strict].concat(), input) {
                let said = stderr(&output);
                let whole = strict.is_empty() || !told.starts_with("none of");
                assert!(said.contains(told) || !whole, "{said}");
                assert_eq!((code(&output), said.lines().count()), (2, 1), "{said}");
            }
        }
    }
}

#[test]
fn nine_lines_before_one_that_can_be_read_are_skipped() {
    for (count, expected) in [(9, 0), (10, 2)] {
        let input = "{}\n".repeat(count) + JSONL;
        for (_, output) in replays(&[], &input) {
            assert_eq!(code(&output), expected, "{}", stderr(&output));
            let told = stderr(&output).matches("t_us: it is missing; skipped").count();
            assert_eq!(told, if expected == 0 { count } else { 0 }, "{}", stderr(&output));
        }
    }
}

#[test]
fn the_first_unreadable_lines_are_reported_and_the_others_counted() {
    for (bad, told, more) in [(20, 20, ""), (21, 20, ": 1 line more"), (1000, 20, ": 980 lines more")] {
        let input = JSONL.to_owned() + &"{}\n".repeat(bad) + JSONL;
        for (name, output) in replays(&[], &input) {
            let said = stderr(&output);
            assert_eq!(said.matches("t_us: it is missing; skipped").count(), told, "{said}");
            let rest = format!("tollgate: {name}{more} can't be read; skipped\n");
            assert_eq!(said.ends_with(&rest), !more.is_empty(), "{said}");
            let summary = &lines(&output)[0];
            assert_eq!((code(&output), &summary["unreadable"], &summary["records"]), (0, &json!(bad), &json!(2)));
        }
    }
}

#[test]
fn records_out_of_order_are_explained() {
    let input = "{\"t_us\":60000000,\"key\":\"k\"}\n{\"t_us\":0,\"key\":\"k\"}\n";
    for (options, why) in [(&[][..], "played sorted by time"), (&["--unsorted"], "with a clock that steps back")] {
        for (_, output) in replays(&[&["--format", "table"], options].concat(), input) {
            let row = format!("out of order  1, earlier than a line before them: {why}");
            assert!(stdout(&output).contains(why), "{row}: {}", stdout(&output));
        }
    }
}

/// Two halves of a part of the log, the later one first, as `zcat log.1.gz log.2.gz` has them, and that part.
fn halves(folder: &std::path::Path) -> [String; 3] {
    let log = beginning_of_the_log(400);
    let (early, late) = log.split_at(log.match_indices('\n').nth(199).expect("a line").0 + 1);
    [("early", early), ("late", late), ("whole", &log)].map(|(name, text)| {
        let path = folder.join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    })
}

/// Without what depends on the order in which records are read.
fn told(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(name, _)| !["out_of_order", "hit"].contains(&name.as_str()));
            kept.map(|(name, value)| (name, told(value))).collect()
        }
        Value::Array(items) => items.into_iter().map(told).collect(),
        other => other,
    }
}

#[test]
fn files_and_standard_input_in_any_order_are_decided_as_the_log_that_they_are_parts_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let [early, late, whole] = halves(folder.path());
    let log = std::fs::read(&whole).expect("the log");
    let both = [std::fs::read(&late).expect("a half"), std::fs::read(&early).expect("a half")].concat();
    let all = ["gcra 10/1m", "fixed-window 20/1h", "sliding-log 5/10s", "fixed-window 30/day"];
    let commands: [&[&str]; 4] = [
        &["replay", "--rule", "gcra 10/1m burst 3", "--key", "path"],
        &["replay", "--rule", "fixed-window 5/1m", "--key", "path", "--summary"],
        &[&["compare"][..], &all].concat(),
        &["suggest", "--deny-at-most", "5%"],
    ];
    for command in commands {
        let of_file = tollgate(&[command, &[&whole]].concat());
        assert_eq!(code(&of_file), 0, "{}", stderr(&of_file));
        // What says how the records stood differs, and the order of keys that are alike.
        let plain = |output: &Output| {
            let mut lines: Vec<_> = lines(output).into_iter().map(|line| told(line).to_string()).collect();
            lines.sort_unstable();
            lines
        };
        for files in [&[&early[..], &late][..], &[&late, &early]] {
            let output = tollgate(&[command, files].concat());
            assert!(plain(&output) == plain(&of_file), "{command:?} {files:?}: {}", stderr(&output));
        }
        for input in [&log, &both] {
            let output = with_input(&[command, &["-"]].concat(), input);
            assert!(plain(&output) == plain(&of_file), "{command:?} -: {}", stderr(&output));
        }
        let mixed = with_input(&[command, &["-", &early]].concat(), &std::fs::read(&late).expect("a half"));
        assert!(plain(&mixed) == plain(&of_file), "{command:?} - {early}: {}", stderr(&mixed));
    }
}

#[test]
fn lines_are_named_by_their_own_file_and_standard_input_is_read_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (one, other) = (path("one"), path("other"));
    std::fs::write(&one, format!("{JSONL}{{}}\n{JSONL}\n\n")).expect("written");
    std::fs::write(&other, format!("{COMBINED}no line\n")).expect("written");
    let output = tollgate(&["replay", "--rule", "gcra 5/1s", "--summary", &one, &other]);
    let said = stderr(&output);
    assert!(said.contains(&format!("{one}: line 2: t_us: it is missing; skipped")), "{said}");
    assert!(said.contains(&format!("{other}: line 2: ")), "{said}");
    assert_eq!((&lines(&output)[0]["records"], &lines(&output)[0]["unreadable"]), (&json!(3), &json!(2)));
    let impossible = "{\"t_us\":1,\"key\":\"a\",\"op\":\"reserve\"}\n";
    std::fs::write(&other, format!("{JSONL}{impossible}")).expect("written");
    let compare = ["compare", "sliding-window 5/1s", "sliding-log 5/1s", &one, &other];
    let said = stderr(&tollgate(&compare));
    let told: Vec<_> = said.lines().filter(|line| line.contains("(under ")).collect();
    assert_eq!(told.len(), 2, "{said}");
    assert!(
        told[0].contains(&format!("{other}: line 2: ")) && told[0].contains("(under sliding-window 5/1s)"),
        "{said}"
    );
    assert!(told[1].contains("(under sliding-log 5/1s)"), "{said}");
    for (arguments, expected) in [
        (&["replay", "--rule", "gcra 5/1s", "-", "-"][..], "error: - is given twice, but standard input"),
        (&["compare", &one, &other], "error: expected RULE... FILE..., such as"),
        (&["suggest", &one, "nowhere"], "error: nowhere: No such file"),
    ] {
        let output = with_input(arguments, JSONL.as_bytes());
        assert!(code(&output) == 2 && stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn an_unsorted_stream_is_decided_as_it_comes_with_its_own_times() {
    let input = "{\"t_us\":60000000,\"key\":\"k\"}\n{\"t_us\":0,\"key\":\"k\"}\n{}\n{\"t_us\":1,\"key\":\"k\"}\n";
    let [(_, file), (_, stream)] = replays(&["--unsorted"], input);
    let [file, stream] = [file, stream].map(|output| lines(&output).remove(0));
    assert_eq!((&stream["records"], &stream["out_of_order"], &stream["unreadable"]), (&json!(3), &json!(2), &json!(1)));
    assert_eq!(stream, file);
    let mut tool = command(&["replay", "--rule", "gcra 5/1s", "--unsorted", "-"]);
    let mut tool = tool.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the tool");
    let (mut lines, mut answers) =
        (tool.stdin.take().expect("a pipe"), BufReader::new(tool.stdout.take().expect("one")));
    for second in [9, 3] {
        lines.write_all(format!("{{\"t_us\":{second}000000,\"key\":\"k\"}}\n").as_bytes()).expect("written");
        let mut answer = String::new();
        answers.read_line(&mut answer).expect("an answer, while more may come");
        assert!(answer.contains(&format!("\"t_us\":{second}000000,")), "{answer}");
    }
    drop(lines);
    assert!(tool.wait().expect("its end").success());
}

/// Records of one time are decided together, by the clock of the engine, where that makes no difference: an id in a
/// record of another key makes all be decided one by one.
#[test]
fn records_are_decided_alike_together_and_one_by_one() {
    let mut random = fastrand::Rng::with_seed(29);
    let mut now = 1_000_000_000_000_u64;
    let mut records = String::new();
    for _ in 0..500 {
        now += [0, 0, 0, 1, 999, 250_000, 61_000_000][random.usize(0..7)];
        let (key, cost) = (random.u8(0..9), random.u8(0..4));
        records += &format!("{{\"t_us\":{now},\"key\":\"{key}\",\"cost\":{cost}}}\n");
    }
    let apart = records.clone() + &format!("{{\"t_us\":{now},\"key\":\"other\",\"id\":\"x\"}}\n");
    for rule in [
        "gcra 10/1s burst 4",
        "token-bucket 3/1m burst 6",
        "fixed-window 5/1s",
        "fixed-window 5/1m start first-hit",
        "fixed-window 5/1m start spread",
        "sliding-window 7/1s",
        "sliding-log 6/1m",
        "gcra 7/1h burst 3 max-debt 9",
        "fixed-window 40/day",
        "gcra 10/1s burst 4, fixed-window 9/1m",
    ] {
        let replay = |records: &str| stdout(&with_input(&["replay", "--rule", rule, "-"], records.as_bytes()));
        let (together, one_by_one) = (replay(&records), replay(&apart));
        assert!(one_by_one.starts_with(&together) && together.lines().count() == 500, "{rule}");
        assert!(together.contains("\"allowed\":false") && together.contains("\"allowed\":true"), "{rule}");
        let compare = |records: &str| lines(&with_input(&["compare", rule, "-"], records.as_bytes())).remove(0);
        let (together, one_by_one) = (compare(&records), compare(&apart));
        for name in ["denied", "keys_denied", "wait_us", "never", "most_in_a_period"] {
            assert_eq!(together[name], one_by_one[name], "{rule}: {name}");
        }
    }
}
