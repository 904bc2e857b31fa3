//! The examples, started as a reader would, and called.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tollgate_testing::polling::{PATIENCE, block_until};
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::read;

use crate::example_service::{Running, call, command, send, start};

#[test]
fn the_axum_service_follows_its_rules_on_both_engines() {
    let server = Server::start();
    for url in [None, Some(server.tcp_url())] {
        let service = start("service", url.as_deref(), &[]);
        let (status, text) = call(&service.address, "GET /api/v1/items", "X-User: 42\r\nX-Tier: free\r\n");
        assert!(status == 200 && text.contains("\r\nratelimit-policy: \"free"), "{text}");
        assert_eq!(call(&service.address, "GET /api/v1/items", "X-User: 666\r\nX-Tier: free\r\n").0, 403);
        let guesses: Vec<_> = (0..22).map(|_| call(&service.address, "POST /login", "").0).collect();
        assert_eq!((count(&guesses[..20], 401), &guesses[20..]), (20, &[429, 429][..]));
        let (_, metrics) = call(&service.address, "GET /metrics", "");
        let series = "tollgate_verdicts_total{rule=\"login\",outcome=\"denied\",reason=\"limits\"} 2";
        assert!(metrics.contains(series), "{metrics}");
        assert!(metrics.contains("tollgate_decision_duration_seconds_bucket{source="), "{metrics}");
    }
}

/// So many at once, over two processes in turn: the statuses.
fn at_once(services: &[Running; 2], count: usize, one: impl Fn(&str) -> u16 + Sync) -> Vec<u16> {
    std::thread::scope(|scope| {
        let one = &one;
        let calls: Vec<_> = (0..count).map(|number| scope.spawn(move || one(&services[number % 2].address))).collect();
        calls.into_iter().map(|call| call.join().expect("an answer")).collect()
    })
}

fn count(statuses: &[u16], wanted: u16) -> usize {
    statuses.iter().filter(|status| **status == wanted).count()
}

/// Of two processes that share a Redis, and then have none.
#[test]
fn a_service_with_five_limits_keeps_each_of_them() {
    let mut server = Server::start();
    let services = [(); 2].map(|()| start("completions", Some(&server.tcp_url()), &[]));
    let complete = |address: &str, key: &str, prompt: &str| {
        let headers = format!("Authorization: Bearer {key}\r\nX-Org: acme\r\n");
        send(address, "POST /completions", &headers, prompt)
    };
    // What each took in the end is charged, not the 500 that it might have.
    for (before, service) in services.iter().enumerate() {
        let (status, text) = complete(&service.address, "a", "Why?");
        assert!(status == 200 && text.contains("\"model/tokens\";r=99"), "{text}");
        // A permit is given back after the answer.
        let left = [7, 6].map(|left| text.contains(&format!("\"requests/concurrency\";r={left}")));
        assert!(left[..=before].contains(&true), "{text}");
    }
    // As a request finds it that reserves 500.
    let left = |prompt: &str| -> u64 {
        let (_, text) = complete(&services[0].address, "a", prompt);
        let left = text.split("\"model/tokens\";r=").nth(1);
        left.and_then(|rest| rest.split(['\r', ';', ',']).next()?.parse().ok()).unwrap_or_else(|| panic!("{text}"))
    };
    let settled = |at_least: u64| {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = left("Why?");
            if left >= at_least || Instant::now() > until {
                break left;
            }
        }
    };
    // Each takes a token for each word of it and of its answer.
    let settled_to = settled(99_450);
    assert!((99_450..=99_500).contains(&settled_to), "{settled_to}");
    // Whoever goes after the first word of 204 pays for what was said until that was noticed.
    let prompt = "why ".repeat(200);
    let mut caller = TcpStream::connect(&services[0].address).expect("the service");
    let head = "Host: x\r\nAuthorization: Bearer a\r\nX-Org: acme\r\n";
    write!(caller, "POST /completions HTTP/1.1\r\n{head}Content-Length: {}\r\n\r\n{prompt}", prompt.len())
        .expect("sent");
    let mut answer = Vec::new();
    while !answer.ends_with(b"why \r\n") {
        let mut byte = [0];
        caller.read_exact(&mut byte).expect("the first word");
        answer.extend(byte);
    }
    drop(caller);
    let settled_to = settled(99_200);
    assert!((99_200..=99_350).contains(&settled_to), "{settled_to}");
    // Of 16 at once, 8 are under way at a time; of more, 20 of a burst are let through.
    let statuses = at_once(&services, 16, |address| complete(address, "b", &"why ".repeat(50)).0);
    assert_eq!((count(&statuses, 200), count(&statuses, 429)), (8, 8), "{statuses:?}");
    let began = Instant::now();
    let statuses: Vec<_> = (0..30)
        .map(|at| call(&services[at % 2].address, "POST /completions", "Authorization: Bearer c\r\n").0)
        .collect();
    // Without an organisation: those whom the outer limit lets through get that far, of which 100 a minute come back.
    let passed = count(&statuses, 400);
    let most = 21 + usize::try_from(began.elapsed().as_millis() * 100 / 60_000).expect("units");
    assert!((20..=most).contains(&passed) && count(&statuses, 429) == 30 - passed, "{statuses:?}");
    assert_eq!(call(&services[0].address, "POST /completions", "").0, 400, "without a key");
    // Guesses of a password, at once.
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    let guess = |address: &str, account: &str, password: &str| {
        send(address, "POST /login", form, &format!("account={account}&password={password}")).0
    };
    let statuses = at_once(&services, 200, |address| guess(address, "eve", "wrong"));
    assert_eq!((count(&statuses, 401), count(&statuses, 429)), (5, 195));
    assert_eq!(guess(&services[0].address, "eve", "right"), 429, "also with the right one");
    for _ in 0..3 {
        let tries: Vec<_> = (0..4).map(|at| guess(&services[at % 2].address, "bob", "wrong")).collect();
        assert_eq!((count(&tries, 401), guess(&services[0].address, "bob", "right")), (4, 200));
    }
    server.stop();
    for at in 0..30 {
        let address = &services[at % 2].address;
        let (completed, login) = (complete(address, "a", "").0, guess(address, "eve", "right"));
        assert_eq!((completed, login), (200, 200), "{at}");
    }
    let statuses = at_once(&services, 40, |address| guess(address, "mallory", "wrong"));
    assert_eq!((count(&statuses, 401), count(&statuses, 429)), (4, 36), "{statuses:?}");
}

/// Lines that its limits add to a service, of which all else is here.
#[test]
fn five_limits_take_at_most_forty_lines() {
    let unlimited = "
        use std::collections::HashMap;
        use std::convert::Infallible;
        use std::error::Error;
        use std::time::Duration;
        use axum::body::Body;
        use axum::http::StatusCode;
        use axum::routing::post;
        use axum::{Form, Router};
        use futures_util::{StreamExt, stream};
        use tollgate_examples::{address, interrupted};
        #[tokio::main]
        async fn main() -> Result<(), Box<dyn Error>> {
        tracing_subscriber::fmt().with_writer(std::io::stderr).init();
        let app = Router::new()
        .route(\"/completions\", post(complete))
        .route(\"/login\", post(login));
        let listener = tokio::net::TcpListener::bind(address(\"127.0.0.1:3000\")).await?;
        println!(\"listening on {}\", listener.local_addr()?);
        axum::serve(listener, app).with_graceful_shutdown(interrupted()).await?;
        Ok(())
        }
        async fn complete(prompt: String) -> Body {
        let answer = format!(\"{prompt} I don't know.\\n\");
        let words: Vec<_> = answer.split_inclusive(' ').map(str::to_owned).collect();
        let words = stream::iter(words).then(move |word| {
        async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok::<_, Infallible>(word)
        }
        });
        Body::from_stream(words)
        }
        async fn login(
        Form(form): Form<HashMap<String, String>>,
        ) -> StatusCode {
        let account = form.get(\"account\").map_or(\"\", String::as_str).trim().to_lowercase();
        tokio::time::sleep(Duration::from_millis(20)).await;
        if form.get(\"password\").is_none_or(|password| password != \"right\") {
        return StatusCode::UNAUTHORIZED;
        }
        StatusCode::OK
        }
    ";
    let mut known: Vec<_> = unlimited.lines().map(str::trim).collect();
    let program = read("examples/services/src/bin/completions.rs");
    let code = program.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
    let added: Vec<_> = code
        .filter(|line| match known.iter().position(|other| other == line) {
            Some(at) => {
                known.swap_remove(at);
                false
            }
            None => true,
        })
        .collect();
    assert!(added.len() <= 40, "{}: {added:#?}", added.len());
}

#[test]
fn the_actix_service_answers_with_header_fields() {
    let server = Server::start();
    for url in [None, Some(server.tcp_url())] {
        let service = start("actix", url.as_deref(), &[]);
        // At once: one by one, a busy machine may take longer than the bucket takes to refill.
        let answers: Vec<_> = std::thread::scope(|scope| {
            let calls: Vec<_> = (0..40).map(|_| scope.spawn(|| call(&service.address, "GET /", ""))).collect();
            calls.into_iter().map(|call| call.join().expect("an answer")).collect()
        });
        let allowed = answers.iter().filter(|(status, _)| *status == 200).count();
        let denied = answers.iter().find(|(status, _)| *status == 429);
        let Some((_, denied)) = denied.filter(|_| allowed >= 5) else { panic!("{answers:?}") };
        for field in ["retry-after: 1\r\n", "ratelimit-policy: \"hello\";q=60;w=60\r\n"] {
            assert!(denied.contains(field), "{field}: {denied}");
        }
    }
    let away = start("actix", Some("redis://127.0.0.1:1"), &[]);
    assert_eq!(call(&away.address, "GET /", "").0, 503);
}

#[test]
fn two_workers_share_five_jobs_a_second() {
    let server = Server::start();
    let began = Instant::now();
    let workers: Vec<_> = (0..2)
        .map(|_| command("worker", Some(&server.tcp_url())).stdout(Stdio::piped()).spawn().expect("a worker"))
        .collect();
    // Longer than their deadline: they ask again.
    std::thread::sleep(Duration::from_millis(300));
    server.signal("-STOP");
    std::thread::sleep(Duration::from_millis(700));
    server.signal("-CONT");
    for worker in workers {
        let output = worker.wait_with_output().expect("its end");
        assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 10, "{output:?}");
    }
    assert!(began.elapsed() >= Duration::from_millis(19 * 200), "{:?}", began.elapsed());
}

#[test]
fn the_tonic_service_answers_in_grpcs_terms() {
    let server = Server::start();
    for url in [None, Some(server.tcp_url())] {
        let service = start("grpc", url.as_deref(), &[]);
        let output =
            command("grpc", None).args(["call", &format!("http://{}", service.address)]).output().expect("a client");
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[..5].iter().all(|line| *line == "ok")), (10, true), "{output:?}");
        assert!(lines[9].starts_with("ResourceExhausted: Too many requests, retry after "), "{text}");
    }
}

const STRICT: &str =
    "[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"fixed-window 1000/1h start first-hit\"]\n";

/// Decisions that a service has counted, of this outcome.
fn counted(service: &Running, outcome: &str) -> u64 {
    let (_, metrics) = call(&service.address, "GET /metrics", "");
    let series = metrics.lines().filter(|line| line.starts_with("tollgate_decisions_total{") && line.contains(outcome));
    series.map(|line| line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok()).expect("a count")).sum()
}

/// Two processes and one Redis under a load tool, while Redis is killed and restarted and the rules are changed.
#[test]
fn two_services_under_load_admit_exactly_what_their_rules_allow() {
    let mut server = Server::start();
    let directory = tempfile::TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    std::fs::write(&path, STRICT).expect("rules");
    let rules = path.to_str().expect("text");
    let services = [(); 2].map(|()| start("service", Some(&server.tcp_url()), &[("RULES", rules)]));
    let load: Vec<_> = services
        .iter()
        .map(|service| {
            let target = format!("http://{}/", service.address);
            let wrk = Command::new("wrk")
                .args(["-t1", "-c16", "-d5m", "--timeout", "2m", &target])
                .stdout(Stdio::piped())
                .spawn();
            wrk.expect("wrk, which tests/run.sh installs")
        })
        .collect();
    let all = |outcome: &str| services.iter().map(|service| counted(service, outcome)).sum::<u64>();
    // Some answers may be lost, as each time that Redis dies: those of all that were under way.
    let used_up = |units: u64| block_until("nearly all is used up", || all("outcome=\"allowed\"") > units * 96 / 100);
    used_up(1000);
    server.stop();
    block_until("Redis is unreachable", || all("outcome=\"error\"") > 0);
    server.restart();
    used_up(2000);
    std::fs::write(directory.path().join("next"), STRICT.replace("1000/1h", "1500/1h")).expect("rules");
    std::fs::rename(directory.path().join("next"), &path).expect("replaced");
    used_up(2500);
    let (mut answered, mut refused) = (0, 0);
    for wrk in load {
        // It prints what it has counted.
        let ended = Command::new("kill").args(["-INT", &wrk.id().to_string()]).status().expect("kill runs");
        assert!(ended.success());
        let output = wrk.wait_with_output().expect("its end");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let number = |line: &str| line.split_whitespace().find_map(|word| word.parse::<u64>().ok()).expect("a number");
        answered +=
            text.lines().find(|line| line.contains("requests in")).map(number).unwrap_or_else(|| panic!("{text}"));
        refused += text.lines().find(|line| line.contains("Non-2xx")).map(number).unwrap_or_else(|| panic!("{text}"));
        assert!(!text.contains("Socket errors"), "{text}");
    }
    // The killed Redis lost its counts: once more as many, and 500 by the changed rules. What
    // was taken as it died, without an answer, is missing.
    let admitted = all("outcome=\"allowed\"");
    assert!((2300..=2500).contains(&admitted), "{admitted}");
    let passed = answered - refused;
    assert!((2200..=admitted).contains(&passed), "{passed} of {admitted}: of {answered}");
    for service in &services {
        let (_, metrics) = call(&service.address, "GET /metrics", "");
        assert!(metrics.contains("\ntollgate_rules_reloads_total{outcome=\"taken\"} 1\n"), "{metrics}");
    }
    let mut text = String::new();
    block_until("the rest is used up", || {
        let (status, answer) = call(&services[0].address, "GET /", "");
        text = answer;
        status == 429
    });
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    let wait: u64 = field("retry-after: ").parse().expect("seconds");
    for (name, parameter, value) in [("ratelimit-policy: ", "q", 1500), ("ratelimit: ", "t", wait)] {
        let list: sfv::List = sfv::Parser::new(field(name)).parse().expect(name);
        let [sfv::ListEntry::Item(item)] = list.as_slice() else { panic!("{list:?}") };
        assert_eq!(item.bare_item.as_string().map(|name| name.as_str()), Some("all"));
        assert_eq!(
            item.params.get(parameter).and_then(|value| value.as_integer()).map(i64::from),
            Some(value.cast_signed())
        );
    }
}

/// It waits for its own turn, and for as long as the other side says.
#[test]
fn the_client_stays_under_a_third_partys_limit() {
    let rules = "[[rule]]\nname = \"strict\"\nkey = \"global\"\nlimits = [\"fixed-window 4/2s start first-hit\"]\n";
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), rules).expect("rules");
    let third_party = start("service", None, &[("RULES", file.path().to_str().expect("text"))]);
    let target = format!("http://{}/", third_party.address);
    let output = command("client", None).env("TARGET", target).output().expect("a client");
    let text = String::from_utf8_lossy(&output.stdout);
    let statuses: Vec<_> = text.lines().map(|line| line.rsplit(": ").next().unwrap_or_default()).collect();
    assert_eq!(statuses.len(), 10, "{output:?}");
    // It learns of each limit by an answer, and isn't denied twice for one.
    let refused = statuses.iter().filter(|status| status.starts_with("429")).count();
    assert!(refused <= 3 && statuses.iter().filter(|status| status.starts_with("200")).count() >= 7, "{text}");
}
