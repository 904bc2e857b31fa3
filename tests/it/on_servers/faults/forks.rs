//! A process that forks after its first call, as a server that forks its workers does. The children call on runtimes of
//! their own, and inherit all that the parent drew and counted.

use std::process::{Command, exit};

use tollgate::redis::{Client, cmd};
use tollgate_testing::polling::block_until;

use super::*;

const CHILDREN: usize = 4;
/// Where the parent finds its Redis: set in the process that forks, which is this test once more, by itself.
const URL: &str = "TOLLGATE_FORKS_ON";

#[test]
fn forked_processes_share_no_id_permit_or_order() {
    if let Ok(url) = std::env::var(URL) {
        return forks(&url);
    }
    let server = Server::start();
    let mut itself = Command::new(std::env::current_exe().expect("this test"));
    itself.args(["--exact", "on_servers::faults::forks::forked_processes_share_no_id_permit_or_order"]);
    let output = itself.env(URL, server.tcp_url()).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let told: Vec<String> = cmd("LRANGE").arg(&["told", "0", "-1"]).query(&mut server.connection()).expect("a list");
    let count = |what: &str| told.iter().filter(|told| *told == what).count();
    // Of both rules there is one; whoever has the same id as another is answered the same.
    assert_eq!((count("held"), count("not held"), count("waited"), count("not waited")), (1, 3, 1, 3), "{told:?}");
}

fn forks(url: &str) {
    let limiter = Limiter::builder(redis(url)).deadline(PATIENCE).build();
    let (permit, turn) = (rule("concurrency 1 ttl 1h", OnError::Closed), rule("gcra 1/1h max-debt 9", OnError::Closed));
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let parents = runtime();
    let first = parents.block_on(limiter.hold(&permit, "the parent's")).expect("a decision");
    assert!(first.permit.is_some());
    for _ in 0..CHILDREN {
        if let fork::Fork::Child = fork::fork().expect("a child") {
            let told = runtime().block_on(async {
                let held = limiter.hold(&permit, "key").await.expect("a decision").permit;
                let waited = limiter.acquire_wait(&turn, "key", Duration::from_millis(1)).await.expect("a decision");
                let told = [
                    ["held", "not held"][usize::from(held.is_none())],
                    ["waited", "not waited"][usize::from(!waited.allowed)],
                ];
                std::mem::forget(held);
                told
            });
            let mut connection = Client::open(url).and_then(|client| client.get_connection()).expect("a connection");
            cmd("RPUSH").arg("told").arg(&told).exec(&mut connection).expect("told");
            exit(0);
        }
    }
    let mut connection = Client::open(url).and_then(|client| client.get_connection()).expect("a connection");
    block_until("the children's answers", || {
        let told: usize = cmd("LLEN").arg("told").query(&mut connection).expect("a length");
        told == 2 * CHILDREN
    });
    drop(first);
}
