//! The protocol on the server's side: requests read, replies written.

use crate::engine::embedded::raw::Answer;

/// Requests as they arrive, in pieces of any size.
#[derive(Default)]
pub(super) struct Requests {
    bytes: Vec<u8>,
    at: usize,
}

impl Requests {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.at));
        self.bytes.extend_from_slice(bytes);
    }

    /// The next request, once it is complete.
    pub(super) fn next(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut at = self.at;
        let count = self.number(b'*', &mut at)?;
        let mut words = Vec::with_capacity(count);
        for _ in 0..count {
            let length = self.number(b'$', &mut at)?;
            words.push(self.bytes.get(at..at + length)?.to_vec());
            self.bytes.get(at + length + 1)?;
            at += length + 2;
        }
        self.at = at;
        Some(words)
    }

    /// Whether a request has been begun.
    pub(super) fn is_half_way(&self) -> bool {
        self.at < self.bytes.len()
    }

    fn number(&self, kind: u8, at: &mut usize) -> Option<usize> {
        let rest = self.bytes.get(*at..)?;
        let length = rest.windows(2).position(|pair| pair == b"\r\n")?;
        assert_eq!(rest[0], kind, "a client sends arrays of strings");
        *at += length + 2;
        Some(std::str::from_utf8(&rest[1..length]).expect("digits").parse().expect("a number"))
    }
}

pub(super) fn write(answer: &Answer, resp3: bool, to: &mut Vec<u8>) {
    match answer {
        Answer::Nil => to.extend_from_slice(if resp3 { b"_\r\n" } else { b"$-1\r\n" }),
        Answer::Integer(integer) => to.extend_from_slice(format!(":{integer}\r\n").as_bytes()),
        Answer::Status(text) => to.extend_from_slice(format!("+{text}\r\n").as_bytes()),
        Answer::Error(text) => to.extend_from_slice(format!("-{}\r\n", text.replace(['\r', '\n'], " ")).as_bytes()),
        Answer::Bytes(bytes) => {
            to.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
            to.extend_from_slice(bytes);
            to.extend_from_slice(b"\r\n");
        }
        Answer::Array(items) => {
            to.extend_from_slice(format!("*{}\r\n", items.len()).as_bytes());
            items.iter().for_each(|item| write(item, resp3, to));
        }
    }
}

/// Names with values: a map in RESP3, a flat list in RESP2.
pub(super) fn write_map(pairs: &[(&str, Answer)], resp3: bool, to: &mut Vec<u8>) {
    let begins = if resp3 { format!("%{}\r\n", pairs.len()) } else { format!("*{}\r\n", 2 * pairs.len()) };
    to.extend_from_slice(begins.as_bytes());
    for (name, value) in pairs {
        write(&Answer::Bytes(name.as_bytes().to_vec()), resp3, to);
        write(value, resp3, to);
    }
}
