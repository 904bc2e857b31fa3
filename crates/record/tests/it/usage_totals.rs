//! What users have used, as the database has it: all of it, once, and how far it is behind.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate::rules::{Account, Attributes};
use tollgate_record::history::HistorySettings;
use tollgate_record::{KeyTerms, PostgresError};
use tollgate_testing::polling::{is_pending, wait_until};
use tollgate_testing::record::{database, limiter, prepared};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_equal_the_decisions_also_after_postgres_was_killed() {
    let (mut server, tool) = prepared().await;
    let mut services = Vec::new();
    for _ in 0..2 {
        services.push(database(&server).follow(&limiter()).await.expect("a configuration"));
    }
    let mut expected = [(0_u64, 0_u64); 7];
    for round in 0..60 {
        for call in 0..100_usize {
            let user = (round + call) % expected.len();
            let allowed = !call.is_multiple_of(3);
            let name = user.to_string();
            services[call % 2].count(&Attributes::new().user(&name), allowed);
            if allowed { expected[user].0 += 1 } else { expected[user].1 += 1 }
        }
        if round % 20 == 10 {
            server.stop();
        }
        if round % 20 == 15 {
            assert!(services.iter().any(|service| service.status().totals_lag > Duration::ZERO));
            server.start_again();
        }
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    for service in &services {
        wait_until("all is written", async || service.finish().await.is_ok()).await;
        assert_eq!((service.status().totals_lag, service.status().totals_lost), (Duration::ZERO, 0));
    }
    for (user, (allowed, denied)) in expected.into_iter().enumerate() {
        let stored = tool.user(&user.to_string()).await.expect("an answer").expect("known");
        assert_eq!((stored.total_today, stored.total_this_month, stored.times_exceeded), (allowed, allowed, denied));
    }
    let writers = tool.writers().await.expect("writers");
    assert_eq!(writers.iter().map(|writer| writer.requests).sum::<u64>(), 6000);
    assert!(writers.len() == 2 && writers.iter().all(|writer| writer.ended_at.is_some() && !writer.killed));
}

/// A service whose host is gone in the middle of a batch holds up neither other services nor those who change anything.
#[tokio::test]
async fn a_stopped_service_delays_the_totals_only_briefly() {
    let (server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    service.count(&Attributes::new().user("42"), true);
    service.finish().await.expect("written");
    // Its last batch, of which the end never comes.
    let (gone, connection) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    gone.batch_execute(
        "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '5s'; UPDATE tollgate.user_quotas SET total_today = 9",
    )
    .await
    .expect("begun");
    tool.block_user("42", None, None, "").await.expect("as soon as the batch is given up");
    service.count(&Attributes::new().user("42"), true);
    wait_until("it is written", async || service.finish().await.is_ok()).await;
    assert_eq!(tool.user("42").await.expect("an answer").expect("known").total_today, 2);
}

#[tokio::test]
async fn a_new_day_and_a_new_month_begin_at_zero() {
    let (server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let totals = async || {
        let user = tool.user("42").await.expect("an answer").expect("known");
        (user.total_today, user.total_this_month)
    };
    let count = async || {
        service.count(&Attributes::new().user("42"), true);
        service.finish().await.expect("written");
        totals().await
    };
    assert_eq!(count().await, (1, 1));
    let set = async |sql: &str| server.run(&format!("UPDATE tollgate.user_quotas SET {sql}")).await;
    set("today = today - 1, total_today = 50").await;
    assert_eq!(totals().await, (0, 1), "of yesterday");
    assert_eq!(count().await, (1, 2));
    set("this_month = this_month - interval '1 month', total_this_month = 50").await;
    assert_eq!(totals().await, (1, 0));
    assert_eq!(count().await, (2, 1));
}

/// A service that is dropped without `finish` is distinguished from one that was killed.
#[tokio::test]
async fn a_killed_service_is_reported() {
    let (server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let account = Account::new("42").api_key("none");
    service.count(&Attributes::new().account(&account), true);
    wait_until("it is written", async || tool.user("42").await.expect("an answer").is_some()).await;
    // Another, which no longer reports.
    server
        .run("INSERT INTO tollgate.writers (writer, writes, requests, written_at) VALUES ('gone', 'totals', 17, now() - interval '1 minute')")
        .await;
    service.finish().await.expect("written");
    let writers = tool.writers().await.expect("writers");
    let gone = writers.iter().find(|writer| writer.name == "gone").expect("known");
    assert!(gone.killed && gone.ended_at == Some(gone.written_at), "{gone:?}");
    // The last clone writes what is left.
    service.count(&Attributes::new().user("43"), true);
    drop(service);
    wait_until("it is written", async || tool.user("43").await.expect("an answer").is_some()).await;
}

/// While PostgreSQL is unreachable, memory is bounded, and what it doesn't hold is counted.
#[tokio::test]
async fn more_users_than_are_kept_are_counted_as_lost() {
    let (mut server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    server.stop();
    for user in 0..100_500_u32 {
        service.count(&Attributes::new().user(&user.to_string()), true);
    }
    let lost = service.status().totals_lost;
    // A first batch may have been taken out of the way before.
    assert!(lost <= 500, "{lost}");
    for user in 0..200_500_u32 {
        service.count(&Attributes::new().user(&format!("x{user}")), true);
    }
    let lost = service.status().totals_lost;
    assert!(lost >= 100_000, "{lost}");
    server.start_again();
    wait_until("all that is left is written", async || service.finish().await.is_ok()).await;
    wait_until("all that is left is written", async || {
        service.finish().await.is_ok() && service.status().totals_lag.is_zero()
    })
    .await;
    let written: u64 =
        server.run("SELECT sum(total_today) FROM tollgate.user_quotas").await[0].parse().expect("a number");
    assert_eq!(written + lost, 301_000);
    let writers = tool.writers().await.expect("writers");
    assert_eq!(writers[0].lost, lost);
}

/// A total that somebody set to the largest number stays there, and costs no other user anything.
#[tokio::test]
async fn a_total_that_is_full_stays_so() {
    let (server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let most = i64::MAX;
    server
        .run(&format!(
            "INSERT INTO tollgate.user_quotas (user_id, today, total_today, this_month, total_this_month, times_exceeded)
            SELECT 'full', day, {most}, date_trunc('month', day)::date, {most}, {most}
            FROM (SELECT (now() AT TIME ZONE 'UTC')::date AS day) AS now"
        ))
        .await;
    for user in ["full", "other"] {
        service.count(&Attributes::new().user(user), true);
        service.count(&Attributes::new().user(user), false);
    }
    service.finish().await.expect("written");
    let stored = async |user| tool.user(user).await.expect("an answer").expect("a user").total_today;
    assert_eq!(
        (stored("full").await, stored("other").await, service.status().totals_lost),
        (most.unsigned_abs(), 1, 0)
    );
}

/// As of members of an organisation that share a key.
#[tokio::test]
async fn a_key_counts_the_requests_of_all_its_users() {
    let (server, tool) = prepared().await;
    let (_, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let account = Account::new("42").api_key(&stored.id);
    for number in 0..100 {
        let member = format!("member {}", number % 50);
        service.count(&Attributes::new().account(&account).user(&member), true);
    }
    service.finish().await.expect("written");
    assert_eq!(tool.key(&stored.id).await.expect("an answer").expect("stored").total, 100);
}

/// Whoever writes holds what is counted; a future that nobody polls would hold it for good.
#[tokio::test]
async fn finishing_ends_though_another_call_is_not_polled_any_more() {
    let (_server, tool) = prepared().await;
    let service = tool.follow(&limiter()).await.expect("a configuration");
    service.count(&Attributes::new().user("42"), true);
    let mut unpolled = Box::pin(service.finish());
    assert!(is_pending(unpolled.as_mut()).await);
    tokio::time::pause();
    let error = service.finish().await.expect_err("the other call writes");
    tokio::time::resume();
    assert!(error.is_unreachable(), "{error}");
    drop(unpolled);
    wait_until("it is written", async || service.finish().await.is_ok()).await;
    assert_eq!(tool.user("42").await.expect("an answer").expect("known").total_today, 1);
}

#[tokio::test]
async fn totals_of_a_dropped_configuration_are_written_after_a_short_outage() {
    let (mut server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    service.count(&Attributes::new().user("42"), true);
    service.finish().await.expect("written");
    server.stop();
    service.count(&Attributes::new().user("42"), true);
    drop(service);
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.start_again();
    let total = async || tool.user("42").await.ok().flatten().map(|user| user.total_today);
    wait_until("it is written", async || total().await == Some(2)).await;
}

/// A server that acknowledges before it has written may lose what it acknowledged.
#[tokio::test]
async fn batches_are_on_disk_once_they_are_acknowledged() {
    let (server, tool) = prepared().await;
    server.run("ALTER DATABASE postgres SET synchronous_commit = off").await;
    server.run("CREATE TABLE public.commits (kind text)").await;
    server
        .run(
            "CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN INSERT INTO public.commits VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$",
        )
        .await;
    server.run("CREATE TRIGGER note AFTER UPDATE ON tollgate.writers EXECUTE FUNCTION note_commit()").await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    service.count(&Attributes::new().user("42"), true);
    service.finish().await.expect("written");
    drop(tool);
    assert_eq!(server.run("SELECT DISTINCT kind FROM public.commits").await, ["on"]);
}

#[test]
fn calls_outside_a_runtime_are_errors() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (server, tool) = runtime.block_on(prepared());
    let service = runtime.block_on(database(&server).follow(&limiter())).expect("a configuration");
    let history = runtime.block_on(async { tool.record(HistorySettings::new()) }).expect("recording");
    service.count(&Attributes::new().user("42"), true);
    fn refused<T>(call: impl Future<Output = Result<T, PostgresError>>) -> bool {
        let polled = pin!(call).poll(&mut Context::from_waker(Waker::noop()));
        matches!(polled, Poll::Ready(Err(error)) if error.to_string().contains("call this within a tokio runtime"))
    }
    assert!(refused(tool.follow(&limiter())) && refused(tool.writers()) && refused(tool.user("42")));
    assert!(refused(service.finish()) && refused(history.finish()));
}
