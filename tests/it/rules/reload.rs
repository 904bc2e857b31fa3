//! Rules that follow their file while tasks decide by them.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tollgate::rules::{Attributes, RuleSet, WatchedRules};
use tollgate::{Embedded, Limiter};
use tollgate_testing::effort::cases;
use tollgate_testing::polling::{PATIENCE, block_until};

/// A hundred rules that all say of which edition they are.
fn edition(number: u64) -> String {
    (0..100)
        .map(|rule| {
            format!(
                "[[rule]]\nname = \"r{rule}\"\nmatch = {{ path = \"/{rule}\" }}\nkey = \"user\"\n\
                 limits = [\"gcra 1000000/1s\"]\nmessage = \"{number}\"\n"
            )
        })
        .collect()
}

/// Of one edition, with all its rules.
fn number(rules: &RuleSet) -> u64 {
    let mut numbers = rules.definitions().iter().map(|rule| rule.message.as_deref().expect("its edition"));
    let first = numbers.next().expect("a rule");
    assert!(rules.len() == 100 && numbers.all(|number| number == first), "half a set");
    first.parse().expect("a number")
}

/// Ends the tasks also where the test has failed.
struct Over<'o>(&'o AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Four tasks decide while this changes the file ten times, with bad ones between.
fn followed(path: &Path, change: impl Fn(&str)) {
    let rules = WatchedRules::open(path).expect("rules");
    let (over, decided) = (AtomicBool::new(false), AtomicU64::new(0));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    std::thread::scope(|scope| {
        let tasks: Vec<_> = (0..4_usize)
            .map(|task| {
                let (rules, over, decided, runtime) = (rules.clone(), &over, &decided, &runtime);
                scope.spawn(move || {
                    let limiter = Limiter::new(Embedded::new());
                    let mut latest = 0;
                    while !over.load(Ordering::Relaxed) {
                        let current = rules.current();
                        let now = number(&current);
                        assert!(now >= latest, "an older set came back");
                        latest = now;
                        let path = format!("/{task}");
                        let request = Attributes::new().user("a").path(&path);
                        let verdict = runtime.block_on(limiter.acquire_by(&current, &request)).expect("a verdict");
                        assert_eq!(verdict.rule.as_deref(), Some(format!("r{task}").as_str()), "a gap");
                        decided.fetch_add(1, Ordering::Relaxed);
                        // The file must be followed beside them.
                        std::thread::sleep(Duration::from_millis(5));
                    }
                })
            })
            .collect();
        let ends = Over(&over);
        for round in 1..=u64::from(cases(10)) {
            if round % 3 == 0 {
                let failures = rules.failures();
                change(&edition(round).replace("gcra", "grca"));
                // A part of a file that is written in place may be read before, if that takes over a second.
                let told = || rules.error().is_some_and(|error| error.to_string().contains("rules.toml:5:11: rule r0"));
                block_until("the file is followed", || rules.failures() > failures && told());
                assert_eq!(number(&rules.current()), round - 1, "the last good one stays");
            }
            change(&edition(round));
            block_until("the file is followed", || number(&rules.current()) == round);
            assert_eq!((rules.error(), rules.reloads()), (None, round));
        }
        drop(ends);
        for task in tasks {
            task.join().expect("a task that found nothing wrong");
        }
    });
    assert!(decided.into_inner() > 100);
}

#[test]
fn a_file_that_is_written_in_place_is_followed() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    followed(&path, |text| fs::write(&path, text).expect("written"));
}

/// As editors save.
#[test]
fn a_file_that_is_replaced_is_followed() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    followed(&path, |text| {
        let new = directory.path().join("rules.toml~");
        fs::write(&new, text).expect("written");
        fs::rename(&new, &path).expect("renamed");
    });
}

/// As Kubernetes mounts a ConfigMap: the file is a link into `..data`, which is a link that is swapped.
#[test]
fn a_file_behind_links_that_are_swapped_is_followed() {
    let directory = TempDir::new().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let versions = AtomicU64::new(0);
    let mount = |text: &str| {
        let version = format!("..{}", versions.fetch_add(1, Ordering::Relaxed));
        fs::create_dir(at(&version)).expect("a directory");
        fs::write(at(&version).join("rules.toml"), text).expect("a file");
        std::os::unix::fs::symlink(&version, at("..data_tmp")).expect("a link");
        fs::rename(at("..data_tmp"), at("..data")).expect("renamed");
    };
    mount(&edition(0));
    std::os::unix::fs::symlink("..data/rules.toml", at("rules.toml")).expect("a link");
    followed(&at("rules.toml"), mount);
}

/// While this changes the file every 50 ms, some of the editions are taken, whole, and the last one soon after it.
fn followed_while_it_changes(path: &Path, change: impl Fn(&str)) {
    let rules = WatchedRules::open(path).expect("rules");
    let (began, mut latest, mut last) = (Instant::now(), 0, 0);
    while rules.reloads() < 3 {
        assert!(began.elapsed() < PATIENCE, "of {last} editions, {} were taken", rules.reloads());
        last += 1;
        change(&edition(last));
        let now = number(&rules.current());
        assert!(now >= latest, "an older set came back");
        latest = now;
        std::thread::sleep(Duration::from_millis(50));
    }
    block_until("the last edition is in force", || number(&rules.current()) == last);
    assert_eq!(rules.error(), None);
}

/// Replaces a file as editors do.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).expect("written");
    fs::rename(&new, path).expect("renamed");
}

#[test]
fn a_file_that_is_replaced_faster_than_it_is_looked_at_is_followed() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    followed_while_it_changes(&path, |text| replace(&path, text));
}

/// A file that took another's place is whole, so that what is wrong with it is known, whatever took its own.
#[test]
fn what_is_wrong_with_files_that_replace_each_other_is_reported() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let rules = WatchedRules::open(&path).expect("rules");
    let began = Instant::now();
    for bad in 1.. {
        replace(&path, &edition(bad).replace("gcra", "grca"));
        std::thread::sleep(Duration::from_millis(50));
        if rules.failures() > 0 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{bad} bad files, and none was reported");
    }
    assert!(rules.error().expect("what is wrong").to_string().contains("rules.toml:5:11: rule r0"));
    assert_eq!(number(&rules.current()), 0, "the last good one stays");
}

#[test]
fn an_included_file_that_is_replaced_faster_than_it_is_looked_at_is_followed() {
    let directory = TempDir::new().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("teams")).expect("a directory");
    fs::write(at("rules.toml"), "include = [\"teams/*.toml\"]\n").expect("a file");
    fs::write(at("teams/a.toml"), edition(0)).expect("a file");
    followed_while_it_changes(&at("rules.toml"), |text| replace(&at("teams/a.toml"), text));
}

/// Kubernetes swaps a link to a directory.
#[test]
fn files_behind_a_link_that_is_swapped_faster_than_it_is_looked_at_are_followed() {
    let directory = TempDir::new().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let versions = AtomicU64::new(0);
    let mount = |text: &str| {
        let version = at(&format!("..{}", versions.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&version).expect("a directory");
        fs::write(version.join("rules.toml"), "include = [\"more.toml\"]\n").expect("a file");
        fs::write(version.join("more.toml"), text).expect("a file");
        std::os::unix::fs::symlink(&version, at("..data_tmp")).expect("a link");
        fs::rename(at("..data_tmp"), at("..data")).expect("renamed");
    };
    mount(&edition(0));
    followed_while_it_changes(&at("..data/rules.toml"), mount);
}

#[test]
fn a_file_that_is_written_in_place_again_and_again_is_followed() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    followed_while_it_changes(&path, |text| fs::write(&path, text).expect("written"));
}

/// Each part ends where a rule does, so that what is there is always a set.
#[test]
fn a_file_that_takes_seconds_to_write_is_not_taken_before_its_end() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let rules = WatchedRules::open(&path).expect("rules");
    let text = edition(1);
    let mut file = fs::File::create(&path).expect("a file");
    let (mut last, mut longest, mut fewest) = (Instant::now(), Duration::ZERO, usize::MAX);
    for rule in text.split_inclusive("message = \"1\"\n") {
        std::io::Write::write_all(&mut file, rule.as_bytes()).expect("written");
        longest = longest.max(last.elapsed());
        last = Instant::now();
        std::thread::sleep(Duration::from_millis(30));
        fewest = fewest.min(rules.current().len());
    }
    // On a machine that is too busy, a part stands for long enough to be taken.
    assert!(longest >= Duration::from_millis(150) || fewest == 100, "{fewest} rules");
    block_until("the file is followed", || rules.current().len() == 100 && number(&rules.current()) == 1);
}

#[test]
fn a_set_that_a_request_still_uses_is_left_to_the_watching_thread() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let rules = WatchedRules::open(&path).expect("rules");
    let used = rules.current();
    for round in 1..=3 {
        replace(&path, &edition(round));
        block_until("the file is followed", || number(&rules.current()) == round);
    }
    assert!(used.is_shared(), "the request would free it");
}

#[test]
fn a_file_that_is_gone_or_empty_for_a_while_changes_nothing() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = Arc::clone(&told);
    let rules = WatchedRules::open_and(&path, move |reloaded| {
        let line = reloaded.map(|rules| format!("{} rules", rules.len())).map_err(ToString::to_string);
        telling.lock().expect("a list").push(line);
    })
    .expect("rules");
    for gone in [true, false] {
        let failures = rules.failures();
        if gone {
            fs::remove_file(&path).expect("removed")
        } else {
            fs::write(&path, "").expect("written")
        }
        block_until("the file is followed", || rules.failures() > failures);
        assert_eq!(number(&rules.current()), 0);
        fs::write(&path, edition(0)).expect("written");
        block_until("the file is followed", || rules.error().is_none());
    }
    // It hears of a change just after that is in force.
    block_until("the file is followed", || told.lock().expect("a list").len() >= 4);
    drop(rules);
    let told = told.lock().expect("a list").clone();
    let expected = |at: usize, text: &str| {
        let line = told[at].as_ref().map_or_else(String::clone, String::clone);
        assert!(line.contains(text), "{told:?}");
    };
    for (at, text) in ["No such file", "100 rules", "write at least one [[rule]]", "100 rules"].into_iter().enumerate()
    {
        expected(at, text);
    }
    assert_eq!(told.len(), 4);
}

#[test]
fn included_files_are_followed_and_new_ones_found() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    let of = |team: &str| format!("[[rule]]\nname = \"{team}\"\nmatch = {{ team = \"{team}\" }}\naction = \"block\"\n");
    fs::write(&path, format!("include = [\"teams/*.toml\"]\n{}", of("main"))).expect("a file");
    let teams = directory.path().join("teams");
    fs::create_dir(&teams).expect("a directory");
    let rules = WatchedRules::open(&path).expect("rules");
    let names = || rules.current().definitions().iter().map(|rule| rule.name.clone()).collect::<Vec<_>>();
    fs::write(teams.join("a.toml"), of("a")).expect("a file");
    block_until("the file is followed", || names() == ["main", "a"]);
    fs::write(teams.join("a.toml"), of("b")).expect("a file");
    block_until("the file is followed", || names() == ["main", "b"]);
    fs::remove_file(teams.join("a.toml")).expect("removed");
    block_until("the file is followed", || names() == ["main"]);
}

/// What stands in the file's place may have no end, or no beginning.
#[test]
fn a_path_that_is_no_regular_file_is_an_error_and_does_not_block() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let rules = WatchedRules::open(&path).expect("rules");
    let fifo = directory.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs").success());
    for (round, instead) in (1..).zip([Path::new("/dev/zero"), &fifo, directory.path()]) {
        fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink(instead, &path).expect("a link");
        block_until("the file is followed", || {
            rules.error().is_some_and(|error| error.to_string().contains("not a file of rules: it is "))
        });
        fs::remove_file(&path).expect("removed");
        fs::write(&path, edition(round)).expect("a file");
        block_until("the file is followed", || number(&rules.current()) == round && rules.error().is_none());
    }
}

#[test]
fn a_callback_that_panics_is_called_for_the_next_change_too() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let rules = WatchedRules::open_and(&path, |_| panic!("as a test does")).expect("rules");
    for round in 1..=2 {
        fs::write(&path, edition(round)).expect("written");
        block_until("the file is followed", || number(&rules.current()) == round);
    }
}

#[test]
fn the_thread_ends_with_its_last_owner() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let threads = || {
        let tasks = fs::read_dir("/proc/self/task").expect("Linux").flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.trim() == "tollgate-rules").count()
    };
    let alive = Arc::new(());
    let held = Arc::clone(&alive);
    let rules = WatchedRules::open_and(&path, move |_| drop(Arc::clone(&held))).expect("rules");
    let other = rules.clone();
    drop(rules);
    assert!(threads() > 0);
    drop(other);
    block_until("the file is followed", || Arc::strong_count(&alive) == 1);
}

/// As a slow writer leaves it for a moment: what stands there is a valid set, but not all of it.
#[test]
fn half_of_a_file_that_is_being_written_is_not_taken() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    fs::write(&path, edition(0)).expect("a file");
    let taken = Arc::new(Mutex::new(Vec::new()));
    let taking = Arc::clone(&taken);
    let rules = WatchedRules::open_and(&path, move |reloaded| {
        taking.lock().expect("a list").push(reloaded.map_or(0, RuleSet::len));
    })
    .expect("rules");
    for round in 1..=u64::from(cases(10)) {
        let text = edition(round);
        let half = text.find("[[rule]]\nname = \"r50\"").expect("its middle");
        // The file was just read: writes at another moment between two reads each time.
        std::thread::sleep(Duration::from_millis(round * 37 % 200));
        let began = Instant::now();
        fs::write(&path, &text[..half]).expect("written");
        std::thread::sleep(Duration::from_millis(100));
        fs::write(&path, &text).expect("written");
        let stood = began.elapsed();
        block_until("the file is followed", || {
            rules.current().definitions()[99 % rules.current().len()].message == Some(round.to_string())
        });
        block_until("the file is followed", || rules.current().len() == 100);
        // What was heard of the last round may come late: it was of all rules too.
        let taken = std::mem::take(&mut *taken.lock().expect("a list"));
        // On a machine that is too busy, the half stands for long enough to be taken.
        assert!(stood >= Duration::from_millis(190) || taken.iter().all(|rules| *rules == 100), "{taken:?}");
    }
}

/// As `rsync -a` and `cp -p` leave it: its times say that it is older than the file that it replaces.
#[test]
fn a_file_that_is_replaced_by_an_older_one_while_it_is_read_is_found() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    let part = |part: u32, number| {
        edition(number).replace("\"r", &format!("\"p{part}r")).replace("\"/", &format!("\"/{part}/"))
    };
    let long = |number: u64| (0..20).map(|at| part(at, number)).collect::<String>();
    let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    let write = |name: &str, number: u64| {
        let file = directory.path().join(name);
        fs::write(&file, long(number)).expect("a file");
        fs::File::options().write(true).open(&file).expect("it").set_modified(hour_ago).expect("its time");
        file
    };
    for round in 0..cases(6) {
        fs::rename(write("before.toml", 1), &path).expect("the first");
        let second = write("after.toml", 2);
        let swap = std::thread::spawn({
            let path = path.clone();
            move || {
                std::thread::sleep(Duration::from_millis(2) * round);
                fs::rename(second, path).expect("the second");
            }
        });
        let rules = WatchedRules::open(&path).expect("rules");
        swap.join().expect("swapped");
        block_until("the file is followed", || rules.current().definitions()[0].message.as_deref() == Some("2"));
    }
}

/// The main file and the one that it includes, of one version or of the other.
#[test]
fn versions_that_take_turns_while_they_are_read_are_never_mixed() {
    let directory = TempDir::new().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for version in ["a", "b"] {
        fs::create_dir(at(version)).expect("a directory");
        let rule =
            |name: &str| format!("[[rule]]\nname = \"{name}\"\nmatch = {{ path = \"/{name}\" }}\naction = \"allow\"\n");
        let main = format!(
            "include = [\"more.toml\"]\n{}",
            (0..3000).map(|at| rule(&format!("{version}{at}"))).collect::<String>()
        );
        fs::write(at(version).join("main.toml"), main).expect("a file");
        fs::write(at(version).join("more.toml"), rule(&format!("{version}-more"))).expect("a file");
    }
    std::os::unix::fs::symlink(at("a"), at("data")).expect("a link");
    let rules = WatchedRules::open(at("data/main.toml")).expect("rules");
    let whole = |rules: &RuleSet| {
        let names: Vec<_> = rules.definitions().iter().map(|rule| rule.name.as_bytes()[0]).collect();
        assert!(names.iter().all(|name| *name == names[0]), "a mixture of two versions");
        names[0]
    };
    let began = Instant::now();
    for turn in 0.. {
        std::os::unix::fs::symlink(at(if turn % 2 == 0 { "b" } else { "a" }), at("next")).expect("a link");
        fs::rename(at("next"), at("data")).expect("swapped");
        whole(&rules.current());
        std::thread::sleep(Duration::from_millis(20));
        if began.elapsed() > Duration::from_secs(3) && turn % 2 == 0 {
            break;
        }
    }
    block_until("the file is followed", || whole(&rules.current()) == b'b');
    assert_eq!(rules.failures(), 0);
}

#[test]
fn a_pipe_in_place_of_the_file_does_not_block_the_reader() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
    assert!(made.success());
    let error = RuleSet::read(&path).expect_err("a pipe").to_string();
    assert!(error.ends_with("not a file of rules: it is not a regular file"), "{error}");
}
