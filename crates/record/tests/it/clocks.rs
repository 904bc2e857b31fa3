//! Hosts whose clock is wrong, and processes that stood still: the database's clock counts, and nothing stays that is
//! gone.

#[cfg(target_os = "linux")]
use std::ffi::OsStr;

use tollgate::rules::{Account, Attributes};
use tollgate_record::{KeyTerms, Postgres as Database};
#[cfg(target_os = "linux")]
use tollgate_testing::alone::alone;
#[cfg(target_os = "linux")]
use tollgate_testing::clock::{AHEAD, clock};
use tollgate_testing::record::{database, limiter, prepared};

#[cfg(target_os = "linux")]
#[tokio::test]
async fn requests_of_a_host_whose_clock_is_wrong_count_for_today() {
    const DATABASE: &str = "TOLLGATE_TEST_DATABASE";
    let count = async |url: &str, key: &str| {
        let service = Database::open(url).expect("an address").follow(&limiter()).await.expect("a configuration");
        service.count(&Attributes::new().account(&Account::new("42").api_key(key)), true);
        service.finish().await.expect("written");
    };
    if let (Ok(url), Ok(key)) = (std::env::var(DATABASE), std::env::var("KEY")) {
        println!("by a clock of {} s", std::time::UNIX_EPOCH.elapsed().expect("later").as_secs());
        return count(&url, &key).await;
    }
    let (server, tool) = prepared().await;
    let (_, key) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let directory = tempfile::tempdir().expect("a directory");
    let (clock, url) = (clock(directory.path()), server.url());
    let test = "clocks::requests_of_a_host_whose_clock_is_wrong_count_for_today";
    for (so_far, days) in [(1, 400_i64), (3, -400), (5, 800)] {
        count(&url, &key.id).await;
        let ahead = (days * 86_400).to_string();
        let variables = [
            ("LD_PRELOAD", clock.as_os_str()),
            (AHEAD, OsStr::new(&ahead)),
            (DATABASE, OsStr::new(&url)),
            ("KEY", OsStr::new(&key.id)),
        ];
        let text = alone(test, &variables).expect("its output");
        let (_, seconds) = text.split_once("by a clock of ").expect("the other process's clock");
        let seconds: i64 = seconds.split(' ').next().expect("a number").parse().expect("seconds");
        let here = i64::try_from(std::time::UNIX_EPOCH.elapsed().expect("later").as_secs()).expect("before 2262");
        assert!((here + days * 86_400 - seconds).abs() < 3600, "{text}");
        let user = tool.user("42").await.expect("an answer").expect("known");
        assert_eq!((user.total_today, user.total_this_month), (so_far + 1, so_far + 1), "{days}");
        let key = tool.key(&key.id).await.expect("an answer").expect("known");
        assert!(key.total == so_far + 1 && key.last_used_at.expect("used") <= key.read_at, "{key:?}");
        assert!(user.last_request_at.expect("counted") <= user.read_at, "{user:?}");
    }
}

/// What a database's own clock wrote before it was set back, or an earlier version of this program.
#[tokio::test]
async fn totals_of_a_day_that_is_yet_to_come_are_todays() {
    let (server, tool) = prepared().await;
    let (_, key) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let account = Account::new("42").api_key(&key.id);
    let count = async || {
        service.count(&Attributes::new().account(&account), true);
        service.finish().await.expect("written");
        tool.user("42").await.expect("an answer").expect("known")
    };
    count().await;
    server
        .run(
            "UPDATE tollgate.user_quotas SET today = today + 400, total_today = 10,
                this_month = date_trunc('month', today + 400), total_this_month = 100,
                last_request_at = now() + interval '400 days';
            UPDATE tollgate.api_keys SET last_used_at = now() + interval '400 days'",
        )
        .await;
    let user = tool.user("42").await.expect("an answer").expect("known");
    assert_eq!((user.total_today, user.total_this_month), (10, 100));
    let user = count().await;
    assert_eq!((user.total_today, user.total_this_month), (11, 101));
    let key = tool.key(&key.id).await.expect("an answer").expect("known");
    assert!(user.last_request_at <= Some(user.read_at) && key.last_used_at <= Some(key.read_at), "{user:?} {key:?}");
    assert_eq!(count().await.total_today, 12);
}
