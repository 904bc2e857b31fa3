//! The blocks of the crate's README: its rules and requests are made, its commands are those that there are. What its
//! configurations do behind real gateways is tested by tests/gateways.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tollgate::rules::RuleSet;
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::{read, root};

use crate::client::post;
use crate::running::{Running, builder};

const PAGE: &str = "crates/serve/README.md";

/// The blocks of the page that are marked so.
fn blocks(mark: &str) -> Vec<String> {
    let (page, mark) = (read(PAGE), format!("```{mark}\n"));
    let of_mark = page.split(&mark).skip(1);
    of_mark.map(|rest| rest.split("```").next().expect("an end").to_owned()).collect()
}

/// The commands of all consoles.
fn commands() -> Vec<String> {
    let text = blocks("console").join("\n");
    text.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned).collect()
}

/// Path and body of a request by curl, if this command makes one to the service.
fn request(command: &str) -> Option<(String, Value)> {
    let rest = command.strip_prefix("curl -d '")?;
    let (body, url) = rest.split_once("' http://127.0.0.1:8080")?;
    Some((url.to_owned(), serde_json::from_str(body).expect("JSON")))
}

#[tokio::test]
async fn the_requests_of_the_page_are_answered_by_its_rules() {
    let server = Server::start();
    let start = &blocks("console")[0];
    let rules = start.split("<<'END'\n").nth(1).and_then(|rest| rest.split("END\n").next()).expect("rules");
    let [model] = blocks("toml").try_into().expect("one set of rules");
    // Those of the model first, since those of the start apply to every user.
    let running = Running::start(builder(&server, &format!("{model}{rules}")).build()).await;
    let requests: Vec<_> = commands().iter().filter_map(|command| request(command)).collect();
    let paths: Vec<_> = requests.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["/v1/decide", "/v1/decide", "/v1/settle"]);
    for (path, body) in &requests {
        let answer = post(&running.http, path, body).await;
        assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
    }
    let left = json!({ "attributes": requests[1].1["attributes"], "costs": { "tokens": 0 } });
    let left = post(&running.http, "/v1/peek", &left).await.json();
    let left = left["limits"][1]["remaining"].as_u64().expect("a number");
    assert!((98_750..100_000).contains(&left), "100,000 less the 1,250 that were settled, and what refills: {left}");
    // What the page prints is how the answer begins.
    let printed = start_of_answer();
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "user": "43" } })).await;
    assert_eq!(answer.body[..printed.len()], printed.replace("user:42", "user:43"));
    let [body] = blocks("json").try_into().expect("one body");
    let answer = post(&running.http, "/v1/decide", &serde_json::from_str(&body).expect("JSON")).await;
    assert_eq!(answer.status, 409, "no limit of its rule takes tokens: {answer:?}");
    running.end().await;
}

/// The answer of the start, as far as it is printed.
fn start_of_answer() -> String {
    let text = blocks("console").join("\n");
    let line = text.lines().find(|line| line.starts_with("{\"op\"")).expect("an answer").to_owned();
    line.split("...").next().expect("a beginning").to_owned()
}

#[test]
fn the_commands_of_the_page_name_files_and_options_that_there_are() {
    let help = Command::new(env!("CARGO_BIN_EXE_tollgate-serve")).arg("--help").output().expect("a process");
    let help = String::from_utf8(help.stdout).expect("text");
    let examples = root().join("crates/serve/examples");
    let mut services = 0;
    for command in commands() {
        let words: Vec<_> = command.split_whitespace().collect();
        if words[0] == "tollgate-serve" {
            services += 1;
            for option in words.iter().filter(|word| word.starts_with("--")) {
                assert!(help.contains(&format!("{option} ")), "{command}");
            }
            if words[1] != "rules.toml" {
                RuleSet::read(examples.join(words[1])).unwrap_or_else(|error| panic!("{command}: {error}"));
            }
        }
        for file in words.iter().filter(|word| word.ends_with(".yaml") || word.ends_with("nginx.conf\"")) {
            let name = Path::new(file.trim_matches('"')).file_name().expect("a name");
            assert!(examples.join(name).exists(), "{command}");
        }
    }
    assert!(services >= 3, "{services}");
}
