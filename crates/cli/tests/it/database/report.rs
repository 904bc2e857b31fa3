//! The report of statistics, in a browser.

use tollgate_testing::record::prepared;

use crate::support::browser::Browser;
use crate::support::page::is_sound;
use crate::support::tool::{code, stderr, stdout, tollgate};

#[tokio::test]
async fn a_report_of_statistics_is_sound_in_a_browser() {
    let (server, _) = prepared().await;
    // Two hours of minutes with a gap, of hostile users too; a third of the buckets are slow.
    server
        .run(
            "INSERT INTO tollgate.rate_limit_metrics (width, began, user_id, endpoint, region, allowed, throttled, blocked,
                cache_hits, cache_misses, latency)
             SELECT 'minute', date_trunc('minute', now()) - at * interval '1 minute', name, '/api/' || at % 3, 'eu',
                 50 + at % 7, CASE WHEN at BETWEEN 20 AND 30 THEN 40 ELSE 0 END, at % 2, 10, 40,
                 ROW(ARRAY[100 + at % 3 * 60], ARRAY[91 + at])::tollgate.histogram
             FROM generate_series(1, 80) AS at, unnest(ARRAY['42', '<script>alert(1)</script>', E'\\u202eevil']) AS name
             WHERE at NOT BETWEEN 50 AND 60",
        )
        .await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut browser = Browser::start();
    for (name, options, said) in [
        ("stats", &["--per", "minute", "--last", "90m"][..], ["Over time", "Latency", "were throttled"]),
        (
            "stats-by-user",
            &["--each", "user", "--last", "3h", "--per", "minute"],
            ["By user", "&lt;script&gt;", "\\u{202e}"],
        ),
        ("stats-of-nobody", &["--user", "nobody"], ["No decision is counted.", "Decisions from", "In numbers"]),
    ] {
        let file = folder.path().join(format!("{name}.html"));
        let (url, path) = (server.url(), file.to_str().expect("UTF-8"));
        let output = tollgate(&[&["stats", "--database", &url, "--report", path], options].concat());
        assert_eq!(code(&output), i32::from(stdout(&output).is_empty()), "{}", stderr(&output));
        let page = std::fs::read_to_string(&file).expect("a page");
        for said in said {
            assert!(page.contains(said), "{said}");
        }
        is_sound(&mut browser, &file);
    }
}
