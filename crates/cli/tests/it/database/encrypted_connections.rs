//! The tool and PostgreSQL by TLS.

use tollgate_testing::certificates::{Authority, TlsFiles};
use tollgate_testing::postgres_server::PostgresServer;

use crate::support::tool::{code, command, stderr, stdout};

#[tokio::test]
async fn the_tool_reaches_the_database_by_tls() {
    let authority = Authority::new("ours");
    let pair = authority.signs(&["127.0.0.1"]);
    let server = PostgresServer::start_by_tls(&pair, &authority, "hostssl all limiter all cert").await;
    let tls_files = TlsFiles::of(&authority, authority.signs(&["limiter"]), "");
    let [ca, cert, key] = ["ca.pem", "server.pem", "server.key"].map(|file| tls_files.file(file));
    let url = server.url_of("limiter:sesame", "postgres");
    let required = format!("{url}?sslmode=require");
    let tool = |arguments: &[&str]| {
        let mut command = command(arguments);
        for variable in ["", "_TLS_CA", "_TLS_CERT", "_TLS_KEY"] {
            command.env_remove(format!("TOLLGATE_DATABASE{variable}"));
        }
        command
    };
    let (by_ca, by_cert) = (["--database-tls-ca", &ca], ["--database-tls-cert", &cert, "--database-tls-key", &key]);
    let all = [&["--database", &url][..], &by_ca, &by_cert].concat();
    for arguments in [&["db", "migrate"][..], &["db", "status"], &["rules", "pull"]] {
        let output = tool(&[arguments, &all].concat()).output().expect("the tool runs");
        assert_eq!(code(&output), 0, "{arguments:?}: {}", stderr(&output));
    }

    // The same by the environment, the authority as one of the platform's.
    let mut by_environment = tool(&["db", "status"]);
    by_environment.env("TOLLGATE_DATABASE", &required).env("SSL_CERT_FILE", &ca).env("TOLLGATE_DATABASE_TLS_CA", "");
    by_environment.env("TOLLGATE_DATABASE_TLS_CERT", &cert).env("TOLLGATE_DATABASE_TLS_KEY", &key);
    let output = by_environment.output().expect("the tool runs");
    assert_eq!(code(&output), 0, "{}", stderr(&output));

    let (missing, disabled) = (tls_files.file("missing.pem"), format!("{url}?sslmode=disable"));
    for (url, options, told) in [
        (&url, &["--database-tls-ca", &missing][..], format!("--database-tls-ca {missing}: No such file")),
        (
            &url,
            &["--database-tls-ca", &key],
            format!("--database-tls-ca {key}: authority: the text contains no certificate"),
        ),
        (&url, &["--database-tls-cert", &cert], "--database-tls-cert: needs --database-tls-key".into()),
        (&url, &["--database-tls-key", &key], "--database-tls-key: needs --database-tls-cert".into()),
        (&disabled, &by_ca, "for TLS, got sslmode=disable".into()),
        (&required, &[], "UnknownIssuer".into()),
        (&url, &by_ca, "valid client certificate".into()),
    ] {
        let output = tool(&[&["db", "status", "--database", url], options].concat()).output().expect("the tool runs");
        let told_so = stderr(&output);
        assert_eq!(code(&output), 2, "{told_so}");
        assert!(told_so.contains(&told) && told_so.lines().count() == 1, "{told_so}");
        assert!(stdout(&output).is_empty() && !told_so.contains("sesame"), "{told_so}");
    }
}
