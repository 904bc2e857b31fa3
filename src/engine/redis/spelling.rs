//! How the address of one Redis may be spelled. redis-rs overlooks what it doesn't know, and reads a password that
//! isn't encoded as host, port or database.

/// How a Redis is reached, by the scheme of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Tcp,
    Tls,
    Socket,
}

pub(super) const ENCODE: &str = ": in a user or password, each of @ : / ? # and space must be percent-encoded (%40 %3A %2F %3F %23 \
                      %20), and here one isn't";

pub(super) fn way(scheme: &str) -> Option<Way> {
    match scheme.to_ascii_lowercase().as_str() {
        "redis" | "valkey" => Some(Way::Tcp),
        "rediss" | "valkeys" => Some(Way::Tls),
        "unix" | "redis+unix" | "valkey+unix" => Some(Way::Socket),
        _ => None,
    }
}

/// Whether a user or password of this address has a character that must be encoded, so that other parts of it may be
/// read wrongly. Addresses with several hosts are checked too. Those of sockets aren't: their user and password are
/// options, which have rules of their own.
pub(super) fn has_a_raw_password(url: &str) -> bool {
    let Some((scheme, rest)) = url.split_once("://") else { return false };
    if way(scheme) == Some(Way::Socket) {
        return false;
    }
    let (authority, after) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let user = authority.rsplit_once('@').map_or("", |(user, _)| user);
    after.contains('@') || user.contains('@') || user.matches(':').count() > 1 || user.contains(char::is_whitespace)
}

/// What is wrong with the spelling of such an address, as the end of a message. It repeats nothing that may be a part
/// of a password.
pub(super) fn flaw(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://")?;
    let way = way(scheme)?;
    if has_a_raw_password(url) {
        return Some(ENCODE.into());
    }
    if rest.contains(char::is_control) || way != Way::Socket && rest.contains(char::is_whitespace) {
        return Some(": it has a space or a line break in it".into());
    }
    if let Some((_, fragment)) = rest.split_once('#') {
        return Some(match (way, fragment) {
            (Way::Tls, "insecure") => ", whose #insecure would leave the server's certificate unchecked".into(),
            _ => ": nothing may follow a # (in a user, a password or a path it is %23)".into(),
        });
    }
    let (place, options) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_at(place.find('/').unwrap_or(place.len()));
    // Where no @ ends the user and password, what follows a colon may be a password whose end was forgotten.
    let shows = |part: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_clear = (authority.contains('@') || !authority.contains(':')) && part.bytes().all(plain);
        if is_clear && !part.is_empty() && part.len() <= 32 { format!("{part:?}") } else { "something else".into() }
    };
    if way == Way::Socket {
        return flaw_of_socket(authority, path).map(Into::into).or_else(|| flaw_of_options(options, true, shows));
    }
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    if host.is_empty() || host.starts_with(':') {
        return Some(": it names no host".into());
    }
    let database = path.trim_matches('/');
    if !database.is_empty() && !is_number(database) {
        let got = shows(database);
        return Some(format!(": what follows the host is the number of a database, as in redis://host/6, not {got}"));
    }
    flaw_of_options(options, false, shows)
}

fn flaw_of_socket(authority: &str, path: &str) -> Option<&'static str> {
    match authority {
        _ if authority.contains('@') => Some(": user and password of a socket are options, ?user=...&pass=..."),
        "" | "localhost" if path.len() > 1 => None,
        _ => Some(": three slashes begin a socket's path, as in unix:///run/redis.sock"),
    }
}

fn flaw_of_options(options: &str, of_socket: bool, shows: impl Fn(&str) -> String) -> Option<String> {
    let mut seen = Vec::new();
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if seen.contains(&name) {
            return Some(": it has an option twice".into());
        }
        seen.push(name);
        match name {
            "protocol" if ["2", "3", "resp2", "resp3"].contains(&value) => {}
            "protocol" => return Some(": its protocol is neither resp2 nor resp3".into()),
            "db" if of_socket && is_number(value) => {}
            "db" if of_socket => return Some(": its db isn't a number".into()),
            "user" | "pass" if of_socket && !value.contains('+') => {}
            "user" | "pass" if of_socket => return Some(": a + in a user or password must be written %2B".into()),
            _ if of_socket => {
                let got = shows(name);
                return Some(format!(": a socket's options are user, pass, db and protocol, not {got} (an & is %26)"));
            }
            "db" | "database" => return Some(": the database follows the host, as in redis://host/6".into()),
            "ssl" | "tls" => return Some(": with TLS it begins with rediss://".into()),
            "user" | "username" | "pass" | "password" => {
                return Some(": user and password come before the host, as in redis://user:password@host".into());
            }
            _ => {
                let got = shows(name);
                return Some(format!(": its only option is protocol, as in ?protocol=resp3, not {got}"));
            }
        }
    }
    None
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<i64>().is_ok()
}

#[cfg(test)]
mod tests {
    use crate::{Engine, Redis};

    #[test]
    fn addresses_are_read_strictly_and_the_error_names_what_is_wrong() {
        for (url, wrong) in [
            ("redis://h?db=6", "the database follows the host, as in redis://host/6"),
            ("redis://u:p%40ss@h:1/?db=6", "the database follows the host, as in redis://host/6"),
            ("redis://h?ssl=true", "with TLS it begins with rediss://"),
            ("valkey://h/1?tls=1", "with TLS it begins with rediss://"),
            ("redis://h?password=x", "user and password come before the host"),
            ("redis://h?timeout=5", "its only option is protocol, as in ?protocol=resp3, not \"timeout\""),
            ("redis://h?protocol=resp3&timeout", "not \"timeout\""),
            ("redis://h?protocol=resp3&protocol=resp2", "it has an option twice"),
            ("redis://h?protocol=4", "its protocol is neither resp2 nor resp3"),
            ("redis://h#x", "nothing may follow a #"),
            ("redis://h/1#", "nothing may follow a #"),
            ("redis://h/abc", "the number of a database, as in redis://host/6, not \"abc\""),
            ("redis://h/1/2", "the number of a database, as in redis://host/6, not something else"),
            ("redis://h/-1", "the number of a database"),
            ("redis://h/99999999999999999999", "the number of a database"),
            ("redis://", "it names no host"),
            ("redis:///1", "it names no host"),
            ("redis://:6379", "it names no host"),
            ("redis://u:p@", "it names no host"),
            ("redis://h \n", "it has a space or a line break in it"),
            ("unix://run/r.sock", "three slashes begin a socket's path"),
            ("redis+unix://", "three slashes begin a socket's path"),
            ("unix://u:p@/run/r.sock", "user and password of a socket are options"),
            ("valkey+unix:///run/r.sock#x", "nothing may follow a #"),
            ("unix:///run/r.sock?timeout=1", "a socket's options are user, pass, db and protocol, not \"timeout\""),
            ("unix:///run/r.sock?db=x", "its db isn't a number"),
            ("unix:///run/r.sock?pass=a+b", "a + in a user or password must be written %2B"),
        ] {
            let error = Engine::open(url).expect_err(url);
            let said = error.to_string();
            assert!(error.is_input() && said.starts_with("url: expected ") && said.contains(wrong), "{url}: {said}");
            assert!(!said.contains(char::is_control), "{url}: {said}");
        }
    }

    #[test]
    fn a_password_that_is_not_encoded_is_an_error_that_shows_nothing_of_it() {
        let urls = [
            "redis://:hu@nter2@h:6379",
            "redis://:hunter2@ss:6379#x@h",
            "redis://:hu#nter2@h",
            "redis://:hu#nter2@ss:6379@h",
            "redis://u:hu/nter2@h:6379/0",
            "redis://u:12/nter2@h:6379/0",
            "redis://u:hu?nter2@h:6379",
            "redis://u:hu:nter2@h:6379",
            "redis://:hu nter2@h:6379",
            "valkeys://u:hu/nter2@h:6379",
            "redis-cluster://u:hu@nter2@h:1,g:2",
            "redis-cluster://u:hu:nter2@h:1,g:2",
            "redis-cluster://u:12/nter2@h:1",
            "redis-sentinel://u:hu/nter2@h:1/main",
            "redis-sentinel://u:hu:nter2@h:1/main",
            "redis-sentinel://h:1/main?sentinel-password=hu@nter2",
        ];
        for url in urls {
            let error = Engine::open(url).expect_err(url);
            let said = format!("{error} {error:?} {:?}", std::error::Error::source(&error));
            assert!(error.is_input() && said.contains("percent-encoded"), "{url}: {said}");
            let secrets = ["hu@", "hu#", "hu/", "hu?", "hu:", "nter2", "hunter", "ss:", "12"];
            assert!(secrets.iter().all(|secret| !said.contains(secret)), "{url}: {said}");
        }
    }

    #[test]
    fn a_name_that_may_be_a_part_of_a_password_is_not_shown() {
        // Each without the @ that would end the password.
        for url in ["redis://u:12/hunter2", "redis://u:12?hunter2", "redis://u:12?hunter2=x", "redis://:12/hunter2"] {
            let said = Redis::open(url).expect_err(url).to_string();
            assert!(!said.contains("hunter2"), "{url}: {said}");
        }
    }

    #[test]
    fn addresses_as_people_write_them_are_read() {
        for url in [
            "redis://h",
            "REDIS://h",
            "redis://h:6380/",
            "redis://h:6380/6",
            "redis://h/6?protocol=resp3",
            "redis://h?protocol=2",
            "redis://:p%40ss@h",
            "redis://u:50%@h:1",
            "redis://u@h",
            "redis://[::1]:6379/1",
            "valkey://u:p@h",
            "unix:///run/r.sock",
            "redis+unix:///run/r.sock?db=3&pass=p%2Bq@:/",
            "valkey+unix:///run/my redis.sock?user=u&pass=p&protocol=resp3",
        ] {
            Engine::open(url).expect(url);
        }
    }

    #[test]
    fn an_address_says_whether_it_is_of_this_machine() {
        for (url, elsewhere) in [
            ("redis://localhost", None),
            ("redis://LOCALHOST.:7000/1", None),
            ("redis://:s3cret@127.0.0.1:6379", None),
            ("valkey://127.8.9.1", None),
            ("redis://[::1]:6379", None),
            ("redis://[::ffff:127.0.0.1]", None),
            ("unix:///run/redis.sock", None),
            ("redis+unix:///run/redis.sock?pass=s3cret", None),
            ("valkey+unix:///run/redis.sock", None),
            ("redis-cluster://u:s3cret@127.0.0.1:7000,localhost:7001,[::1]:7002", None),
            ("valkey-sentinel://localhost,127.0.0.1:26380/main/1", None),
            ("redis://user:s3cret@redis.example.com/0", Some("redis.example.com:6379")),
            ("redis://localhost.example.com", Some("localhost.example.com:6379")),
            ("redis://10.0.0.1:7000", Some("10.0.0.1:7000")),
            ("redis://[2001:db8::1]", Some("[2001:db8::1]:6379")),
            ("redis-cluster://127.0.0.1:7000,10.0.0.2:7000", Some("10.0.0.2:7000")),
            ("redis-sentinel://u:s3cret@sentinel.example.com/main", Some("sentinel.example.com:26379")),
        ] {
            let engine = Engine::open(url).expect(url);
            assert_eq!(engine.remote_address().as_deref(), elsewhere, "{url}");
        }
        let own: Engine = crate::Embedded::new().into();
        assert_eq!(own.remote_address(), None);
    }
}
