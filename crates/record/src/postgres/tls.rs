//! TLS connections to PostgreSQL.
//!
//! The crate that provides them, tokio-postgres-rustls, would add ten others, most of which parse certificates. And
//! Cargo can't add a dependency only where two features meet: Redis over TLS would pull in a PostgreSQL client, or
//! PostgreSQL without TLS a C library.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use rustls::ClientConfig;
use rustls::pki_types::{AlgorithmIdentifier, ServerName, alg_id};
use sha2::{Digest, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Socket;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tollgate::Tls;

/// PostgreSQL's name in ALPN; without it `sslnegotiation=direct` is refused.
const PROTOCOL: &[u8] = b"postgresql";

/// Makes TLS connections. Connections without TLS bypass it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Connector {
    tls: Tls,
}

/// A connection about to be made to this host.
#[derive(Debug)]
pub(crate) struct Handshake {
    tls: Tls,
    host: String,
}

/// A connection to a server whose certificate is trusted and valid for its host.
#[derive(Debug)]
pub(crate) struct Stream(TlsStream<Socket>);

impl From<&Tls> for Connector {
    fn from(tls: &Tls) -> Self {
        Self { tls: tls.clone() }
    }
}

impl MakeTlsConnect<Socket> for Connector {
    type Stream = Stream;
    type TlsConnect = Handshake;
    type Error = io::Error;

    /// Also called for connections without TLS, so nothing is read or checked yet.
    fn make_tls_connect(&mut self, host: &str) -> io::Result<Handshake> {
        Ok(Handshake { tls: self.tls.clone(), host: host.to_owned() })
    }
}

impl TlsConnect<Socket> for Handshake {
    type Stream = Stream;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Stream>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let mut config = ClientConfig::clone(&*self.tls.client_config()?);
            config.alpn_protocols = vec![PROTOCOL.to_vec()];
            let host = ServerName::try_from(self.host).map_err(io::Error::other)?;
            Ok(Stream(TlsConnector::from(Arc::new(config)).connect(host, socket).await?))
        })
    }
}

/// Channel binding: a password then also proves that nobody is in between (`channel_binding=require` in an address).
impl tokio_postgres::tls::TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        let (_, session) = self.0.get_ref();
        let certificate = session.peer_certificates().and_then(<[_]>::first);
        let hash = certificate.and_then(|certificate| end_point(certificate));
        hash.map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

/// RFC 5929's `tls-server-end-point`: the certificate's hash, with the hash function of its own signature. Ed25519 has
/// none, and servers before PostgreSQL 16 don't know one for RSA-PSS.
fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    let algorithm = signature_algorithm(certificate)?;
    let is_one_of = |known: [AlgorithmIdentifier; 2]| known.iter().any(|known| algorithm == known.as_ref());
    if is_one_of([alg_id::ECDSA_SHA256, alg_id::RSA_PKCS1_SHA256]) {
        Some(Sha256::digest(certificate).to_vec())
    } else if is_one_of([alg_id::ECDSA_SHA384, alg_id::RSA_PKCS1_SHA384]) {
        Some(Sha384::digest(certificate).to_vec())
    } else if is_one_of([alg_id::ECDSA_SHA512, alg_id::RSA_PKCS1_SHA512]) {
        Some(Sha512::digest(certificate).to_vec())
    } else {
        None
    }
}

/// The second of a certificate's three parts (RFC 5280, section 4.1); in DER it follows the first.
fn signature_algorithm(certificate: &[u8]) -> Option<&[u8]> {
    let (parts, _) = element(certificate)?;
    let (_, after_the_first) = element(parts)?;
    Some(element(after_the_first)?.0)
}

/// The content of a DER element, and the bytes after it.
fn element(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&[_, length], rest) = der.split_first_chunk()?;
    if length < 0x80 {
        return rest.split_at_checked(length.into());
    }
    // In the long form, this says how many octets the length takes.
    let (octets, rest) = rest.split_at_checked(usize::from(length - 0x80))?;
    rest.split_at_checked(octets.iter().fold(0, |length, octet| length << 8 | usize::from(*octet)))
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_certificate_has_no_hash() {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let whole = made.cert.der();
        assert_eq!(end_point(whole), Some(Sha256::digest(whole).to_vec()));
        for length in 0..whole.len() {
            assert_eq!(end_point(&whole[..length]), None, "{length}");
        }
        for length in [&[0x80][..], &[0x81], &[0x84, 255, 255, 255, 255], &[0x88; 9], &[255; 300]] {
            assert_eq!(end_point(&[&[0x30], length].concat()), None, "{length:?}");
        }
    }
}
