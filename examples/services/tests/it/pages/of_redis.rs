//! The pages on the library, the tool and Redis.

use std::thread;

use tollgate_testing::certificates::Authority;
use tollgate_testing::console::{Shell, without_figures};
use tollgate_testing::polling::block_until;
use tollgate_testing::python::python;
use tollgate_testing::redis_server::{Server, free_port, run_command};
use tollgate_testing::repository::read;
use tollgate_testing::sentinels::Sentinels;
use tollgate_testing::tls_server::Secured;

use super::{Page, hello};
use crate::example_service::{call, start};

/// A page whose commands call this Redis, by the tool and by redis-cli.
fn page(name: &'static str, redis: &Server) -> Page {
    let (shell, port) = (Shell::start(), redis.port());
    // Of several ports the last one counts. An error that Redis answers is one of the command.
    let own = shell.folder().join("bin").display().to_string();
    shell.program("redis-cli", &format!("PATH=${{PATH#{own}:}} exec redis-cli -e -p {port} \"$@\""));
    Page::new(name, shell)
        .replace("redis://127.0.0.1:6379", redis.tcp_url())
        .replace("redis.internal:6379", format!("127.0.0.1:{port}"))
        // It finds something to note on this machine, and may find it slow.
        .codes("tollgate doctor", &[0, 1])
        // Of many requests at once some are denied.
        .codes("tollgate probe", &[0, 1])
        .codes("cargo run -- probe", &[1])
        .replace("getent hosts redis.internal", "getent hosts localhost")
}

#[test]
fn readme() {
    let redis = Server::start();
    let listen = format!("127.0.0.1:{}", free_port());
    let (url, address) = (redis.tcp_url(), listen.clone());
    thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(hello::main(&url, &address)).expect("it serves");
    });
    block_until("the service listens", || std::net::TcpStream::connect(&listen).is_ok());
    let looked_at = page("README.md", &redis)
        .replace("127.0.0.1:3000", listen)
        .replace(" --keys zipf", " --keys zipf --duration 1s")
        .different("curl -si")
        .run();
    let [curl] = &looked_at[..] else { panic!("expected one call of the service") };
    // A machine that takes 0.6 s for 20 requests finds one unit more.
    let was_slow = curl.printed.contains("200 OK") && curl.printed.contains("\"api\";r=0");
    assert!(was_slow || without_figures(&curl.printed) == without_figures(&curl.shown), "{}", curl.printed);
}

#[test]
fn the_program_that_readme_begins_with_is_the_one_that_is_called() {
    let readme = read("README.md");
    let programs = readme.split("```rust,no_run\n").skip(1).filter_map(|rest| rest.split("```").next());
    let shown: Vec<_> = programs.filter(|program| program.contains("axum::serve")).collect();
    let [shown] = shown[..] else { panic!("expected one service, got {}", shown.len()) };
    let here = shown
        .replace("#[tokio::main]\nasync fn main()", "pub(super) async fn main(redis: &str, listen: &str)")
        .replace("\"redis://127.0.0.1/\"", "redis")
        .replace("\"127.0.0.1:3000\"", "listen");
    let own = include_str!("hello.rs");
    assert_eq!(own.split_once("\n\n").map(|(_, program)| program), Some(&*here));
}

/// Its versions are those with which this repository is tested, and its features are the library's.
#[test]
fn the_manifest_that_readme_begins_with_is_of_this_version() {
    let (readme, manifest) = (read("README.md"), read("Cargo.toml"));
    let (_, shown) = readme.split_once("```toml\n").expect("a manifest");
    let (shown, _) = shown.split_once("```").expect("its end");
    let line = |text: &str, begins: &str| text.lines().find(|line| line.starts_with(begins)).map(str::to_owned);
    let version = |line: &str| {
        line.split('"').find(|word| word.starts_with(|first: char| first.is_ascii_digit())).map(str::to_owned)
    };
    for name in ["axum = ", "edition = "] {
        let [ours, theirs] = [&*manifest, shown].map(|text| line(text, name).unwrap_or_else(|| panic!("{name}")));
        assert_eq!(version(&ours), version(&theirs), "{name}");
    }
    let features = line(shown, "tollgate = ").expect("the library");
    let (_, features) = features.split_once("features = [").expect("features");
    for feature in features.split('"').skip(1).step_by(2) {
        assert!(line(&manifest, &format!("{feature} = [")).is_some(), "{feature}");
    }
}

#[test]
fn the_tools_page() {
    let limited = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let redis = Server::with(&limited);
    let looked_at = page("crates/cli/README.md", &redis)
        .replace(" --keys zipf", " --keys zipf --duration 1s")
        .endless("tollgate watch")
        .different("tollgate doctor")
        .codes("tollgate rules diff", &[0, 1])
        .run();
    // Each check once, by name, and what is wrong with this server.
    let [doctor] = &looked_at[..] else { panic!("expected one doctor") };
    let checks = |text: &str| -> Vec<String> {
        let rows = text.lines().filter(|line| ["ok", "note", "warning", "bad"].iter().any(|one| line.starts_with(one)));
        rows.filter_map(|row| row.split_whitespace().nth(1).map(str::to_owned)).collect()
    };
    assert_eq!(checks(&doctor.printed), checks(&doctor.shown), "{}{}", doctor.printed, doctor.command);
    assert!(checks(&doctor.shown).len() > 10);
    let warns = |text: &str| text.contains("maxmemory-policy allkeys-lru evicts keys once 100.00 MiB");
    assert!(warns(&doctor.printed) && warns(&doctor.shown), "{}", doctor.printed);
}

#[test]
fn the_guide() {
    let redis = Server::start();
    for name in ["src/guide.md", "src/guide/numbers.md", "src/guide/trace.md"] {
        page(name, &redis).codes("tollgate rules diff", &[0, 1]).run();
    }
}

#[test]
fn the_page_on_files_of_rules() {
    let redis = Server::start();
    page("src/rules/format.md", &redis).run();
}

#[test]
fn the_scripts_page() {
    let redis = Server::start();
    page("lua/README.md", &redis).replace("pip install redis && python3", python().display().to_string()).run();
}

/// After a call of the service, for which the tool stands.
#[test]
fn the_page_on_sharing_a_limit() {
    let redis = Server::start();
    let script = "cat lua/arguments.lua lua/token_bucket.lua lua/keys.lua lua/decide.lua > token_bucket.lua";
    let call = "tollgate probe 'token-bucket 100/1m burst 20' user:42 --name api --url redis://127.0.0.1:6379";
    let exists = "redis-cli SCRIPT EXISTS ";
    page("lua/sharing.md", &redis).before(exists, format!("{script} && {call}")).run();
}

#[test]
fn operations() {
    let redis = Server::start();
    let service = start("service", Some(&redis.tcp_url()), &[]);
    let authority = Authority::new("ours");
    let secured = Secured::start(&authority, "127.0.0.1", "yes");
    let mut page = page("src/operations.md", &redis)
        .replace("rediss://redis.internal:6380", secured.url())
        .replace("http://127.0.0.1:9000", format!("http://{}", service.address))
        .endless("tollgate watch --url redis://127.0.0.1:6379 --metrics")
        .endless("tollgate watch --url redis://127.0.0.1:6379 --format jsonl");
    let client = authority.signs(&["limiter"]);
    for (file, text) in [("ca.pem", authority.pem()), ("limiter.pem", client.certificate), ("limiter.key", client.key)]
    {
        std::fs::write(page.shell.folder().join(file), text).expect("written");
    }
    page.run();
}

/// With a service that has denied, and an operator who finds what the page says may be found.
fn on_call(name: &'static str, redis: &Server) -> (Page, Vec<crate::example_service::Running>) {
    let services = [(); 2].map(|()| start("service", Some(&redis.tcp_url()), &[]));
    let addresses: Vec<_> = services.iter().map(|service| service.address.clone()).collect();
    for address in &addresses {
        assert_eq!(call(address, "GET /api/v1/items", "X-User: 42\r\nX-Tier: free\r\n").0, 200);
        assert_eq!(call(address, "GET /api/v1/items", "X-User: 666\r\nX-Tier: free\r\n").0, 403);
    }
    run_command(redis, &["ACL", "SETUSER", "operator", "on", ">PASSWORD", "~*", "&*", "+@all"]);
    let limiter = tollgate_testing::acl::least();
    run_command(redis, &[&["ACL", "SETUSER", "limiter", "on", ">PASSWORD"][..], &limiter].concat());
    // As after an outage,
    redis.signal("-STOP");
    for address in &addresses {
        assert_eq!(call(address, "GET /api/v1/items", "X-User: 7\r\nX-Tier: free\r\n").0, 503);
    }
    redis.signal("-CONT");
    // a restart of Redis, and an accident.
    let mut unknown = tollgate::redis::cmd("EVALSHA");
    let _ = unknown.arg("0".repeat(40)).arg(0).exec(&mut redis.connection()).expect_err("no such script");
    run_command(redis, &["FLUSHDB"]);
    for address in &addresses {
        let answers = || call(address, "GET /api/v1/items", "X-User: 42\r\nX-Tier: free\r\n").0 == 200;
        block_until("the service asks Redis again", answers);
    }
    let page = page(name, redis)
        .replace("SERVICE1 SERVICE2", addresses.join(" "))
        .replace("http://SERVICE/", format!("http://{}/", addresses[0]));
    (page, services.into())
}

#[test]
fn the_runbook() {
    let redis = Server::start();
    let (page, _services) = on_call("src/operations/runbook.md", &redis);
    let sentinels = Sentinels::start();
    // Of one node, which knows itself.
    let cluster = Server::with(&["--cluster-enabled", "yes"]);
    let sentinel = sentinels.sentinel(0).port();
    page.replace("-p 26379", format!("-p {sentinel}"))
        .replace(" NAME", " main")
        .replace("redis-cli CLUSTER", format!("redis-cli -p {} CLUSTER", cluster.port()))
        // A process has it once its breaker was open.
        .codes("for service in", &[0, 1])
        // Redis 7.4 and newer have such a number.
        .codes("redis-cli INFO stats | grep evicted_scripts", &[0, 1])
        .run();
    // The line of a log is one of those that the page lists.
    let page = read("src/operations/runbook.md");
    let (_, line) = page.split_once(" WARN tollgate: ").expect("a line of a log");
    let (message, error) = line.lines().next().and_then(|line| line.split_once(" error=")).expect("its error");
    assert!(page.contains(&format!("| `{message}` |")), "{message}");
    assert!(page.contains(&format!("| `{}` |", error.trim_matches('"'))), "{error}");
}

#[test]
fn the_runbook_of_limits() {
    let redis = Server::start();
    let (mut page, _services) = on_call("src/operations/limits.md", &redis);
    // As on the runbook's first page.
    page.shell.run(&format!("export TOLLGATE_URL={}", redis.tcp_url()));
    page.codes("tollgate rules diff", &[0, 1]).run();
}
