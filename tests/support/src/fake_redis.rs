//! A server that speaks Redis's protocol and answers as the test says.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;

/// The address of a server that answers HELLO with this, and everything else with OK.
pub fn fake_redis_with_hello(hello: &'static str) -> String {
    fake_redis(move |words| {
        let reply = if words[0].eq_ignore_ascii_case(b"HELLO") { hello } else { "+OK\r\n" };
        Some(reply.into())
    })
}

/// The address of a server that answers each request with what this makes of its words, and closes the connection where
/// that is nothing.
pub fn fake_redis(answer: impl Fn(&[Vec<u8>]) -> Option<Vec<u8>> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut replies, answer) = (client.expect("a client"), Arc::clone(&answer));
            std::thread::spawn(move || {
                let mut requests = BufReader::new(replies.try_clone().expect("a second handle"));
                while let Some(reply) = request(&mut requests).and_then(|words| answer(&words)) {
                    if replies.write_all(&reply).is_err() {
                        break;
                    }
                }
                let _ = replies.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    format!("redis://{address}")
}

/// The words of the next request; none when the client has closed the connection.
fn request(from: &mut impl BufRead) -> Option<Vec<Vec<u8>>> {
    let words = number(from)?;
    let word = |_| {
        let mut word = vec![0; number(from)? + 2];
        from.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        Some(word)
    };
    (0..words).map(word).collect()
}

/// The number in a line such as `*3` or `$5`.
fn number(from: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    from.read_line(&mut line).ok()?;
    line.get(1..)?.trim_end().parse().ok()
}
