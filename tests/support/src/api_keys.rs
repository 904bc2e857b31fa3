//! Keys that were never made but have a right checksum, which takes the database's own secret.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::postgres_server::PostgresServer;

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

pub struct Forger {
    hmac: Hmac<Sha256>,
}

impl Forger {
    pub async fn of(server: &PostgresServer) -> Self {
        let hex = server.run("SELECT encode(key_secret, 'hex') FROM tollgate.configuration").await.remove(0);
        let secret: Vec<_> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect();
        assert_eq!(secret.len(), 32);
        Self { hmac: Hmac::new_from_slice(&secret).expect("a secret") }
    }

    pub fn unknown(&self, number: u64) -> String {
        self.whole(body(number))
    }

    /// With its checksum.
    pub fn whole(&self, body: String) -> String {
        let mac = self.hmac.clone().chain_update(&body).finalize().into_bytes();
        body + &digits(u64::from_be_bytes(mac[..8].try_into().expect("8 bytes")), 6)
    }
}

/// As somebody makes it up who doesn't have the secret.
pub fn made_up(number: u64) -> String {
    body(number) + &digits(number, 6)
}

fn body(number: u64) -> String {
    format!("tg_{}_{}", digits(number, 12), digits(number, 24))
}

/// The last of its digits.
fn digits(mut number: u64, count: usize) -> String {
    let mut text = vec![b'0'; count];
    for digit in text.iter_mut().rev() {
        *digit = ALPHABET[(number % 62) as usize];
        number /= 62;
    }
    String::from_utf8(text).expect("text")
}
