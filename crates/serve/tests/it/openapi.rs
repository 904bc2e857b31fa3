//! The service does what its OpenAPI says, of requests that another program makes of that.

use tokio::process::Command;
use tollgate_testing::polling::in_time;
use tollgate_testing::python::python;
use tollgate_testing::redis_server::Server;

use crate::running::{Running, builder};

const RULES: &str = r#"
    [[rule]]
    name = "users"
    match = { user = "*" }
    key = "user"
    limits = ["fixed-window 500/1m"]

    [[rule]]
    name = "jobs"
    match = { job = "*" }
    key = "job"
    limits = ["concurrency 1 ttl 10s"]

    [[rule]]
    name = "everybody"
    key = "global"
    limits = ["fixed-window 100/1s"]
"#;

#[tokio::test]
async fn requests_made_of_the_openapi_are_answered_as_it_says() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let url = format!("http://{}", running.http);
    let mut schemathesis = Command::new(python());
    schemathesis.args(["-m", "schemathesis.cli", "run", &format!("{url}/v1/openapi.json"), "--url", &url]);
    schemathesis.args(["--max-examples", "25", "--seed", "51", "--phases", "coverage,fuzzing", "--no-color"]);
    // It keeps what it has found where it runs.
    let directory = tempfile::tempdir().expect("a directory");
    let output = schemathesis.current_dir(directory.path()).kill_on_drop(true).output();
    let output = in_time(output).await.expect("schemathesis runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    running.end().await;
}
