//! Many users with settings of their own beside many rules: the time to start, the memory of a user, how long decisions
//! wait on a one-thread runtime, and how long a change takes to be in force.
//!
//! Starts a PostgreSQL and a Redis of its own. Arguments: the number of users (1000000), and that of rules (10000).
//! Each kind of users is measured in a process of its own, which is started with the argument `measure`.

use std::error::Error;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::sleep;
use tokio_postgres::NoTls;
use tollgate::rules::{Action, Definition, RuleSet};
use tollgate::{Embedded, Limiter, Redis};
use tollgate_benches::postgres::PostgresServer;
use tollgate_benches::report::{Targets, header, row, short};
use tollgate_benches::server::Server;
use tollgate_benches::{process, rule};
use tollgate_record::{Configuration, Postgres};

/// Kinds of users, and the columns that set them apart, of the user with number `n`.
const KINDS: [(&str, &str); 4] = [
    ("a tier", "'paid', NULL, NULL, false"),
    ("a block", "NULL, NULL, NULL, true"),
    ("limits, of 100 different ones", "NULL, 100 + n % 100, 10000, false"),
    ("limits, all different", "NULL, 100 + n, 1000000 + n, false"),
];
/// During which decisions are made. Each time has the longest wait and, in parentheses, the processor time that the
/// runtime's thread spent on something else meanwhile, which is the share of it that tollgate answers for.
const WAITED_THROUGH: [&str; 6] =
    ["before, doing nothing", "the start", "10 s after it", "a lost connection", "a user's changes", "a rule's change"];
const BETWEEN_DECISIONS: Duration = Duration::from_micros(100);
/// How long the process is watched after its start.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// How long a change is waited for. One that takes longer is shown as this long.
const MOST: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [what, postgres, redis] = &arguments[..]
        && what == "measure"
    {
        return measure(postgres, redis);
    }
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse::<u64>());
    let (users, rules) = (number(0, 1_000_000)?, number(1, 10_000)?);
    println!("## {users} users beside {rules} rules\n");
    let columns = ["users with", "start, s", "bytes a user after the start", "10 s later", "at most"];
    let waits = WAITED_THROUGH.map(|what| format!("a decision waits, ms: {what}"));
    let changes = ["in force, ms: a user's change", "one after a lost connection", "a rule's change"];
    let columns: Vec<_> = columns.into_iter().chain(waits.iter().map(String::as_str)).chain(changes).collect();
    println!("{}", header(&columns));
    let mut worst = [0_f64; 4 + 2 * WAITED_THROUGH.len() + 3];
    for (kind, columns) in KINDS {
        let (postgres, redis) = (PostgresServer::start(), Server::start());
        prepare(&postgres.url(), columns, users, rules)?;
        let own = std::env::current_exe()?;
        let output = Command::new(own).args(["measure", &postgres.url(), &redis.url()]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            println!("{}", row([kind, &String::from_utf8_lossy(&output.stderr).replace('\n', " ")]));
            continue;
        }
        let mut measured: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        measured[1..4].iter_mut().for_each(|bytes| *bytes /= users as f64);
        let waits =
            measured[4..measured.len() - 3].chunks(2).map(|both| format!("{} ({})", short(both[0]), short(both[1])));
        let numbers = |some: &[f64]| some.iter().map(|value| short(*value)).collect::<Vec<_>>();
        let (before, after) = (numbers(&measured[..4]), numbers(&measured[measured.len() - 3..]));
        println!("{}", row(std::iter::once(kind.to_owned()).chain(before).chain(waits).chain(after)));
        for (worst, measured) in worst.iter_mut().zip(&measured) {
            *worst = worst.max(*measured);
        }
    }
    let mut targets = Targets::default();
    targets.at_most("seconds to start", 10.0, worst[0]);
    let (waits, changes) = worst[4..].split_at(2 * WAITED_THROUGH.len());
    let works = waits[2..].iter().skip(1).step_by(2).copied();
    targets.at_most("milliseconds of the runtime's thread that a decision waits", 5.0, works.fold(0.0, f64::max));
    targets.at_most("milliseconds until a user's change is in force", 1000.0, changes[0].max(changes[1]));
    targets.at_most("milliseconds until a rule's change is in force", 1000.0, changes[2]);
    println!("\n{targets}");
    Ok(())
}

/// Fills the tables.
fn prepare(url: &str, columns: &str, users: u64, rules: u64) -> Result<(), Box<dyn Error>> {
    runtime()?.block_on(async {
        let postgres = Postgres::open(url)?;
        postgres.migrate().await?;
        let definitions = (0..rules).map(|number| {
            let mut rule = Definition::new(&format!("rule-{number}"));
            rule.conditions.insert("path".to_owned(), [format!("/api/v1/resource-{number}/*")].into());
            rule.conditions.insert("tier".to_owned(), [["free", "paid"][number as usize % 2].to_owned()].into());
            rule.key = ["user"].into();
            rule.limits = vec!["token-bucket 1000/1h burst 20".into()];
            rule
        });
        postgres.push_rules(&RuleSet::new(definitions)?, "bench").await?;
        run(
            url,
            &format!(
                "INSERT INTO tollgate.user_quotas (user_id, tier, per_hour, per_day, blocked)
            SELECT 'user-' || lpad(n::text, 8, '0'), {columns} FROM generate_series(1, {users}) AS n;
            ANALYZE tollgate.user_quotas"
            ),
        )
        .await
    })
}

async fn run(url: &str, sql: &str) -> Result<(), Box<dyn Error>> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    let connection = tokio::spawn(connection);
    client.batch_execute(sql).await?;
    drop(client);
    connection.await??;
    Ok(())
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Prints the numbers of one row, separated by spaces.
fn measure(url: &str, redis: &str) -> Result<(), Box<dyn Error>> {
    let longest = Arc::new(Longest::default());
    let administrator = Administrator::start(url.to_owned());
    let before = process::resident_bytes();
    runtime()?.block_on(async {
        let (ticks, received) = unbounded_channel();
        thread::spawn(move || {
            while ticks.send(Instant::now()).is_ok() {
                thread::sleep(BETWEEN_DECISIONS);
            }
        });
        tokio::spawn(decide(received, Arc::clone(&longest)));
        // Whatever is done once.
        sleep(Duration::from_millis(300)).await;
        longest.take();
        sleep(Duration::from_secs(3)).await;
        let mut waits = vec![longest.take()];
        let limiter = Limiter::new(Redis::open(redis)?);
        let began = Instant::now();
        let configuration = Postgres::open(url)?.follow(&limiter).await?;
        let mut measured = vec![began.elapsed().as_secs_f64()];
        let grown = || process::resident_bytes().saturating_sub(before) as f64;
        measured.push(grown());
        waits.push(longest.take());
        sleep(SETTLED_AFTER).await;
        measured.push(grown());
        measured.push(peak_bytes() - before as f64);
        waits.push(longest.take());
        administrator.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tollgate'");
        let after_loss = changed(&administrator, &configuration, "after-loss").await;
        // Whatever is read again after that.
        sleep(SETTLED_AFTER).await;
        waits.push(longest.take());
        let mut in_force: Vec<f64> = Vec::new();
        for number in 0..5 {
            in_force.push(changed(&administrator, &configuration, &format!("changed-{number}")).await);
        }
        sleep(Duration::from_secs(1)).await;
        waits.push(longest.take());
        let rule = rule_changed(&administrator, &configuration).await;
        sleep(Duration::from_secs(1)).await;
        waits.push(longest.take());
        measured.extend(waits.into_iter().flatten());
        measured.extend([in_force.into_iter().fold(0.0, f64::max), after_loss, rule]);
        let text: Vec<_> = measured.iter().map(ToString::to_string).collect();
        println!("{}", text.join(" "));
        Ok(())
    })
}

/// The longest that a decision had to wait, in microseconds.
#[derive(Default)]
struct Longest {
    /// Of time.
    wait: AtomicU64,
    /// Of processor time that the runtime's thread spent on something else. Other programs don't count here.
    work: AtomicU64,
}

impl Longest {
    /// Both since the last call, in milliseconds.
    fn take(&self) -> [f64; 2] {
        [&self.wait, &self.work].map(|longest| longest.swap(0, Ordering::Relaxed) as f64 / 1e3)
    }
}

/// Makes a decision for each tick.
async fn decide(mut ticks: UnboundedReceiver<Instant>, longest: Arc<Longest>) {
    let (limiter, rule) = (Limiter::new(Embedded::new()), rule("token-bucket 1000000/1s"));
    let mut before = process::thread_time();
    while let Some(due) = ticks.recv().await {
        limiter.acquire(&rule, "user").await.expect("a decision");
        longest.wait.fetch_max(due.elapsed().as_micros() as u64, Ordering::Relaxed);
        let now = process::thread_time();
        longest.work.fetch_max((now - before).as_micros() as u64, Ordering::Relaxed);
        before = now;
    }
}

/// Milliseconds from the commit of a new user to where decisions know it.
async fn changed(by: &Administrator, configuration: &Configuration, user: &str) -> f64 {
    by.run(&format!("INSERT INTO tollgate.user_quotas (user_id, blocked) VALUES ('{user}', true)"));
    by.in_force(|| configuration.account_of_user(user).is_some()).await
}

/// The same of a rule.
async fn rule_changed(by: &Administrator, configuration: &Configuration) -> f64 {
    by.run(
        "UPDATE tollgate.rate_limit_rules SET definition = definition - 'key' - 'limits' || '{\"action\": \"block\"}'
        WHERE name = 'rule-1'",
    );
    let is_blocking = |rules: RuleSet| rules.definitions()[1].action == Action::Block;
    by.in_force(|| is_blocking(configuration.rules())).await
}

/// Changes the database on a thread of its own, so that the measured one doesn't wait for it.
struct Administrator {
    statements: mpsc::Sender<String>,
    is_done: Arc<AtomicBool>,
    done_at: Arc<Mutex<Instant>>,
}

impl Administrator {
    fn start(url: String) -> Self {
        let (statements, received) = mpsc::channel::<String>();
        let (is_done, done_at) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Instant::now())));
        let administrator = Self { statements, is_done: Arc::clone(&is_done), done_at: Arc::clone(&done_at) };
        thread::spawn(move || {
            let runtime = runtime().expect("a runtime");
            for sql in received {
                runtime.block_on(run(&url, &sql)).expect("a statement that runs");
                *done_at.lock().expect("no panic") = Instant::now();
                is_done.store(true, Ordering::Release);
            }
        });
        administrator
    }

    fn run(&self, sql: &str) {
        self.is_done.store(false, Ordering::Release);
        self.statements.send(sql.to_owned()).expect("its thread");
    }

    async fn in_force(&self, is: impl Fn() -> bool) -> f64 {
        let began = Instant::now();
        while !is() {
            if began.elapsed() > MOST {
                return MOST.as_secs_f64() * 1e3;
            }
            sleep(Duration::from_millis(1)).await;
        }
        let seen_at = Instant::now();
        while !self.is_done.load(Ordering::Acquire) {
            sleep(Duration::from_millis(1)).await;
        }
        seen_at.saturating_duration_since(*self.done_at.lock().expect("no panic")).as_secs_f64() * 1e3
    }
}

/// The most memory that this process ever had in use.
fn peak_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux's /proc");
    let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("a peak");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok()).expect("a number") * 1024.0
}
