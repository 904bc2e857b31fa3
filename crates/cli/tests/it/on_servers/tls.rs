//! The tool by TLS to Redis. Every test here needs a server that speaks TLS, which not every build does.

use tollgate_testing::certificates::{Authority, Pair, TlsFiles};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::sentinels::Sentinels;
use tollgate_testing::server_setup::ServerSetup;
use tollgate_testing::tls_server::Secured;

use crate::support::tool::{code, command, lines, stderr, stdout};

#[test]
fn the_tool_decides_by_tls() {
    let authority = Authority::new("ours");
    let secured = Secured::start(&authority, "127.0.0.1", "yes");
    let Pair { certificate, key } = authority.signs(&["tool"]);
    for (file, text) in [("tool.pem", &certificate), ("tool.key", &key)] {
        secured.tls_files.write(file, text);
    }
    let (url, ca) = (secured.url(), secured.tls_files.file("ca.pem"));
    let (cert, key) = (secured.tls_files.file("tool.pem"), secured.tls_files.file("tool.key"));
    let probe = |options: &[&str]| {
        let mut command = command(&[&["probe", "gcra 5/30d", "key", "--deadline", "30s"], options].concat());
        for variable in ["TOLLGATE_TLS_CA", "TOLLGATE_TLS_CERT", "TOLLGATE_TLS_KEY"] {
            command.env_remove(variable);
        }
        command
    };
    let all = ["--url", &url, "--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key];
    let output = probe(&all).output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("\"remaining\":4") && stdout(&output).contains("\"by\":\"redis\""));

    let output = command(&[&["doctor", "--deadline", "30s"], &all[..]].concat()).output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));

    // The same by the environment, the authority as one of the platform's.
    let mut command = probe(&[]);
    command.env("TOLLGATE_URL", &url).env("SSL_CERT_FILE", &ca).env("TOLLGATE_TLS_CA", "");
    let output = command.env("TOLLGATE_TLS_CERT", &cert).env("TOLLGATE_TLS_KEY", &key).output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("\"remaining\":3"));

    let missing = secured.tls_files.file("missing.pem");
    for (options, told) in [
        (vec!["--url", &url, "--tls-ca", &missing], format!("--tls-ca {missing}: No such file")),
        (vec!["--url", &url, "--tls-ca", &key], format!("--tls-ca {key}: authority: the text contains no certificate")),
        (
            vec!["--url", &url, "--tls-cert", &cert, "--tls-key", &cert],
            format!("--tls-key {cert}: key: the text contains no unencrypted private key"),
        ),
        (vec!["--url", &url, "--tls-cert", &cert], "--tls-cert: needs --tls-key".into()),
        (vec!["--url", &url, "--tls-key", &key], "--tls-key: needs --tls-cert".into()),
        (vec!["--tls-ca", &ca], "need --url rediss://".into()),
        (vec!["--url", "redis://127.0.0.1:1", "--tls-ca", &ca], "expected rediss://".into()),
        (vec!["--url", &url], "UnknownIssuer".into()),
    ] {
        let output = probe(&options).output().expect("the tool runs");
        let told_so = stderr(&output);
        assert_eq!(code(&output), 2, "{told_so}");
        assert!(told_so.contains(&told) && told_so.lines().count() == 1, "{told_so}");
        assert!(stdout(&output).is_empty() && !told_so.contains("PRIVATE"), "{told_so}");
    }
}

#[test]
fn the_tool_decides_on_a_cluster_and_under_sentinels_by_tls() {
    let authority = Authority::new("ours");
    let cluster = ClusterServers::of_primaries_with(ServerSetup::by_tls(&authority));
    let fleet = Sentinels::with(ServerSetup::by_tls(&authority));
    let tls_files = TlsFiles::of(&authority, authority.signs(&["tool"]), "yes");
    let [ca, cert, key] = ["ca.pem", "server.pem", "server.key"].map(|file| tls_files.file(file));
    let tls = ["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key];
    for (url, primaries) in [(cluster.url(), 3), (fleet.url(), 1)] {
        let run = |words: &[&str], tls: &[&str]| {
            let all = [words, &["--deadline", "30s", "--url", &url], tls].concat();
            command(&all).output().expect("the tool runs")
        };
        for key in 0..10 {
            let output = run(&["probe", "gcra 5/30d", &key.to_string()], &tls);
            assert_eq!(code(&output), 0, "{}", stderr(&output));
            assert_eq!(lines(&output)[0]["remaining"], 4);
        }
        let doctor = run(&["doctor"], &tls);
        assert!(code(&doctor) < 2, "{}{}", stdout(&doctor), stderr(&doctor));
        let reached = lines(&doctor).iter().filter(|finding| finding["check"] == "latency").count();
        assert_eq!(reached, primaries, "{}", stdout(&doctor));
        if primaries == 1 {
            let findings = lines(&doctor);
            let sentinels = findings.iter().find(|finding| finding["check"] == "sentinels").expect("a finding");
            assert_eq!(sentinels["numbers"]["known"], 3, "{sentinels}");
        }
        for command in [&["probe", "gcra 5/30d", "0"][..], &["doctor"]] {
            let told = || {
                let output = run(command, &[]);
                let told = format!("{}{}", stdout(&output), stderr(&output));
                assert_eq!((code(&output), told.lines().count()), (2, 1), "{told}");
                told
            };
            // On a busy machine a node may take longer than is waited for it.
            let slow = |told: &String| told.contains("within the deadline of");
            let told = (0..20).map(|_| told()).find(|told| !slow(told)).expect("a node in time");
            assert!(told.contains("UnknownIssuer"), "{told}");
        }
    }
}
