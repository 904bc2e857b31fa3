//! TLS settings of a Redis client: which are refused before any connection is made.

use tollgate::{Redis, Tls};
use tollgate_testing::certificates::Authority;

#[test]
fn an_invalid_certificate_or_key_is_an_error_at_once() {
    let authority = Authority::new("ours");
    let (one, other) = (authority.signs(&["one"]), authority.signs(&["other"]));
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (pem, why) in [
        ("", "the text contains no certificate in PEM"),
        (one.key.as_str(), "the text contains no certificate in PEM"),
        (&one.key[..40], "the text can't be read as PEM"),
        (broken, "it can't be used: "),
    ] {
        let error = Tls::new().authority(pem.as_bytes()).unwrap_err();
        let message = error.to_string();
        assert!(error.is_input() && message.starts_with(&format!("authority: {why}")), "{message}");
    }
    let garbled = one.key.replace("MI", "!!");
    let secret = one.key.lines().nth(1).expect("a key's text");
    for (certificate, key, names) in [
        ("", &*one.key, "certificate: the text contains no certificate in PEM"),
        (broken, &one.key, "certificate: it can't be used: "),
        (&one.certificate, "", "key: the text contains no unencrypted private key in PEM"),
        (&one.certificate, &one.certificate, "key: the text contains no unencrypted private key in PEM"),
        (&one.certificate, &garbled, "key: the text can't be read as PEM"),
        (&one.certificate, &other.key, "key: it can't be used with this certificate: "),
    ] {
        let error = Tls::new().certificate(certificate.as_bytes(), key.as_bytes()).unwrap_err();
        let message = error.to_string();
        assert!(error.is_input() && message.starts_with(names) && !message.contains('\n'), "{message}");
        assert!(!message.contains(&secret[4..]), "{message}");
    }
    let tls = authority.trusted().certificate(one.certificate.as_bytes(), one.key.as_bytes()).expect("a certificate");
    let redis = Redis::builder().tls(&tls).open("rediss://127.0.0.1").expect("a good address");
    for shown in [format!("{tls:?}"), format!("{redis:?}")] {
        // Neither as text nor as a list of its bytes.
        assert!(!shown.contains(secret) && !shown.contains("45, 45, 45, 45, 45"), "{shown}");
    }
}

#[test]
fn no_address_leaves_a_certificate_unchecked() {
    let tls = Authority::new("ours").trusted();
    for url in ["rediss://:hunter2@localhost/#insecure", "valkeys://:hunter2@localhost/#insecure"] {
        for error in [Redis::open(url).unwrap_err(), Redis::builder().tls(&tls).open(url).unwrap_err()] {
            let message = error.to_string();
            assert!(error.is_input() && message.contains("unchecked") && !message.contains("hunter2"), "{message}");
        }
    }
    for url in ["redis://:hunter2@localhost", "unix:///run/redis.sock"] {
        let error = Redis::builder().tls(&tls).open(url).unwrap_err();
        let message = error.to_string();
        assert!(error.is_input() && message.contains("rediss://") && !message.contains("hunter2"), "{message}");
    }
}
