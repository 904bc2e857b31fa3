//! Addresses of databases. Nothing that may be part of a password is repeated: neither in messages nor in what is shown
//! of an address.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::iter::Peekable;
use std::str::Chars;

use tokio_postgres::Config;
use tokio_postgres::config::Host;

use super::PostgresError;

const EXPECTED: &str = "postgres: expected an address such as postgres://user:password@host/database";

/// Parses an address; its host must be given.
pub(crate) fn config(address: &str) -> Result<Config, PostgresError> {
    let rest = ["postgres://", "postgresql://"].iter().find_map(|scheme| address.strip_prefix(scheme));
    let is_twice = match rest {
        Some(rest) if rest.rsplit_once('@').is_some_and(|(before, _)| before.contains(['@', '?'])) => {
            // What stands between or before them is probably a part of a password, and would be read as something else.
            return Err(PostgresError::input("postgres: write an @ in the password as %40, and a ? as %3F"));
        }
        Some(rest) => has_a_parameter_twice(rest),
        None => has_an_option_twice(address),
    };
    if is_twice {
        return Err(PostgresError::input(
            "postgres: an option is given twice or has no name: a space in a password needs password='...' or %20",
        ));
    }
    let config: Config = address.parse().map_err(|error| unreadable(&error))?;
    if config.get_hosts().is_empty() {
        return Err(PostgresError::input("postgres: the address has no host"));
    }
    let (hosts, ports, addresses) = (config.get_hosts().len(), config.get_ports().len(), config.get_hostaddrs().len());
    if ports > 1 && ports != hosts {
        let expected = "expected one port, or one for each host";
        return Err(PostgresError::input(format!("postgres: {expected}, got {ports} for {hosts} hosts")));
    }
    if addresses > 0 && addresses != hosts {
        let expected = "expected a hostaddr for each host";
        return Err(PostgresError::input(format!("postgres: {expected}, got {addresses} for {hosts} hosts")));
    }
    let texts = config.get_hosts().iter().map(host_of).chain(config.get_dbname().map(str::to_owned));
    if texts.into_iter().any(|text| text.contains(['=', '@']) || text.contains(char::is_whitespace)) {
        // For instance, a backslash before a space has made the space part of a value.
        return Err(PostgresError::input(
            "postgres: a host or database can't contain a space, = or @: put quotes around a password that has one",
        ));
    }
    Ok(config)
}

fn host_of(host: &Host) -> String {
    match host {
        Host::Tcp(host) if host.contains(':') => format!("[{host}]"),
        Host::Tcp(host) => host.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    }
}

/// `host:port/database`, or `host:port,host:port/database`.
pub(crate) fn shown(config: &Config) -> String {
    format!("{}/{}", servers(config).join(","), database(config))
}

/// The same with the first host alone.
pub(crate) fn first(config: &Config) -> String {
    format!("{}/{}", servers(config).first().map_or("", String::as_str), database(config))
}

/// Each host with its port. One port is that of all hosts.
fn servers(config: &Config) -> Vec<String> {
    let ports = config.get_ports();
    let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
    config.get_hosts().iter().enumerate().map(|(at, host)| format!("{}:{}", host_of(host), port(at))).collect()
}

fn database(config: &Config) -> &str {
    config.get_dbname().or(config.get_user()).unwrap_or("postgres")
}

/// The parser quotes what it doesn't know, which may be the second half of a password with a space. Only where an
/// option's value is wrong does it quote just the name of a known option.
fn unreadable(error: &tokio_postgres::Error) -> PostgresError {
    let why = error.source().map(ToString::to_string).filter(|why| why.starts_with("invalid value for option `"));
    let why = why.map(|why| match why.ends_with("`sslmode`") {
        true => why + ": expected require, which verifies as libpq's verify-full does, or disable",
        false => why,
    });
    let why =
        why.unwrap_or_else(|| "in the form host=... password='...', a value with a space needs quotes".to_owned());
    PostgresError::input(format!("{EXPECTED}: {why}"))
}

/// Whether a URL, which names hosts and the database before its parameters, has an option twice, as it does if its
/// password contains `&dbname=` or `&host=`.
fn has_a_parameter_twice(url: &str) -> bool {
    let Some((before, parameters)) = url.split_once('?') else { return false };
    let (authority, database) = before.split_once('/').unwrap_or((before, ""));
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
    let named = [(!hosts.is_empty()).then_some("host"), (!database.is_empty()).then_some("dbname")];
    let names = parameters.split('&').filter_map(|parameter| parameter.split('=').next());
    let mut known = BTreeSet::new();
    !named.into_iter().flatten().chain(names).all(|name| known.insert(name))
}

/// The same for an address in libpq's form, if its password contains ` dbname=` or ` =`.
fn has_an_option_twice(address: &str) -> bool {
    let (mut rest, mut known) = (address.chars().peekable(), BTreeSet::new());
    loop {
        skip_spaces(&mut rest);
        let mut name = String::new();
        while let Some(character) = rest.next_if(|character| *character != '=' && !character.is_whitespace()) {
            name.push(character);
        }
        skip_spaces(&mut rest);
        if rest.next() != Some('=') {
            // The end, or what the parser refuses.
            return false;
        }
        skip_spaces(&mut rest);
        skip_value(&mut rest);
        // The parser stops at an option without a name, and ignores what follows.
        if name.is_empty() || !known.insert(name) {
            return true;
        }
    }
}

fn skip_spaces(rest: &mut Peekable<Chars<'_>>) {
    while rest.next_if(|character| character.is_whitespace()).is_some() {}
}

/// A value in quotes, or up to the next space; a backslash escapes the next character.
fn skip_value(rest: &mut Peekable<Chars<'_>>) {
    let is_quoted = rest.next_if_eq(&'\'').is_some();
    while let Some(character) =
        rest.next_if(|character| if is_quoted { *character != '\'' } else { !character.is_whitespace() })
    {
        if character == '\\' {
            rest.next();
        }
    }
    if is_quoted {
        rest.next();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::postgres::Postgres;

    #[test]
    fn addresses_that_could_show_a_part_of_a_password_are_refused() {
        for (address, expected) in [
            ("postgres://u:open@sesame@h/db", "%40"),
            ("postgres://h/db?user=u&password=open@sesame", "%40"),
            ("postgres://h/db?user=u&password=open&dbname=sesame", "given twice"),
            ("postgres://h/db?user=u&password=open&host=sesame", "given twice"),
            ("postgres://u:open@sesame/x@h/db", "%40"),
            ("host=h user=u password=open sesame=x", "needs quotes"),
            ("host=h user=u password=open sesame", "needs quotes"),
            ("host=h user=u dbname=db password=open dbname=sesame", "given twice"),
            ("host=h password='open", "needs quotes"),
            ("user=u password=open host=sesame = host=h", "given twice"),
            ("host=h port=sesame password=x", "invalid value for option `port`"),
            ("postgres://u:sesame@h/db?sslmode=verify-full", "expected require, which verifies"),
            ("host=a,b,c port=1,2 password=sesame", "one for each host, got 2 for 3 hosts"),
            ("host=a,b hostaddr=127.0.0.1 password=sesame", "a hostaddr for each host, got 1 for 2 hosts"),
            ("user=u password=open host=sesame\\ host=h", "put quotes around"),
            ("dbname=x", "has no host"),
        ] {
            let error = Postgres::open(address).expect_err(address).to_string();
            assert!(error.contains(expected) && !error.contains("sesame"), "{address}: {error}");
        }
        for address in [
            "postgres://u:open%40sesame@h/db",
            "postgres://u:open/sesame@h:5432/db",
            "host=h dbname=db password='open dbname=sesame' user=u",
            "host=h dbname=db password=open\\ dbname=sesame user=u",
            "host = h dbname = db password = sesame",
        ] {
            assert_eq!(Postgres::open(address).expect(address).address(), "h:5432/db");
        }
        let several = Postgres::open("postgres://u@[::1]:1,h:2/db").expect("an address");
        assert_eq!(several.address(), "[::1]:1,h:2/db");
    }

    proptest! {
        /// Whatever a password has in it, as it is or escaped.
        #[test]
        fn no_part_of_a_password_is_shown(
            words in prop::collection::vec("[A-Z]{4}", 1..5),
            between in prop::collection::vec("[ @:/?#&=%'\\\\,]{1,2}|[ @:/?&]dbname=|[ @:/?&]host=|[ @:/?&]x=", 5),
        ) {
            let password: String = words.iter().zip(&between).map(|(word, mark)| format!("{word}{mark}")).collect();
            for address in [
                format!("postgres://u:{password}@h/db"),
                format!("postgres://u:{password}@h:5432"),
                format!("postgres://h/db?user=u&password={password}"),
                format!("host=h dbname=db user=u password={password}"),
                format!("host=h dbname=db user=u password='{password}'"),
                format!("user=u password={password} host=h dbname=db"),
                format!("mysql://u:{password}@h/db"),
            ] {
                let shown = match Postgres::open(&address) {
                    Ok(postgres) => format!("{} {postgres:?}", postgres.address()),
                    Err(error) => format!("{error} {error:?}"),
                };
                for word in &words {
                    prop_assert!(!shown.contains(word), "{address}: {shown}");
                }
            }
        }
    }
}
