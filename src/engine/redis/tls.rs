//! What a TLS connection trusts, and the certificate it presents.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, TlsCertificates};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore};

use super::shown_address::without_password;
use crate::error::{Error, Kind};

/// The authorities to trust for a `rediss://` address, and the certificate to present: see
/// [`RedisBuilder::tls`](crate::RedisBuilder::tls). Also for PostgreSQL, with the crate `tollgate-record`:
/// `Postgres::open_with_tls`.
///
/// By default the platform's authorities are trusted (or those in the file that the environment variable
/// `SSL_CERT_FILE` names), and no certificate is presented. TLS 1.2 and 1.3. The server's certificate is always
/// checked, its names included.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::fs::read;
/// use tollgate::{Limiter, Redis, Tls};
///
/// let tls = Tls::new().authority(&read("ca.pem")?)?.certificate(&read("limiter.pem")?, &read("limiter.key")?)?;
/// let limiter = Limiter::new(Redis::builder().tls(&tls).open("rediss://redis.internal:6380")?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Tls {
    authority: Option<Vec<u8>>,
    certificate: Option<(Vec<u8>, Vec<u8>)>,
    /// The resulting configuration, made at the first connection: by then the program has chosen its provider.
    config: Arc<OnceLock<Arc<ClientConfig>>>,
}

impl Tls {
    /// The platform's authorities, and no certificate to present.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts the authorities in this PEM text, one or several, instead of the platform's.
    ///
    /// # Errors
    ///
    /// A text without a certificate, or with an unreadable one.
    pub fn authority(self, pem: &[u8]) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates("authority", pem)? {
            roots.add(certificate).map_err(|error| input("authority", &format!("it can't be used: {error}")))?;
        }
        Ok(Self { authority: Some(pem.to_vec()), config: Arc::default(), ..self })
    }

    /// Presents this certificate to a server that asks for one: PEM texts of the certificate, followed by any
    /// intermediates, and of its private key (PKCS #8, PKCS #1 or SEC 1, not encrypted).
    ///
    /// # Errors
    ///
    /// A text that can't be read, or a key of another certificate. The message shows nothing of the key.
    pub fn certificate(self, pem: &[u8], key: &[u8]) -> Result<Self, Error> {
        let chain = certificates("certificate", pem)?;
        let wanted = "unencrypted private key";
        let parsed = PrivateKeyDer::from_pem_slice(key).map_err(|error| unread("key", wanted, &error))?;
        CertifiedKey::from_der(chain, parsed, &provider()).map_err(|error| match error {
            rustls::Error::InvalidCertificate(why) => input("certificate", &format!("it can't be used: {why}")),
            error => input("key", &format!("it can't be used with this certificate: {error}")),
        })?;
        Ok(Self { certificate: Some((pem.to_vec(), key.to_vec())), config: Arc::default(), ..self })
    }

    /// The same address, which must be a TLS address, with this configuration.
    pub(crate) fn applied_to(&self, info: ConnectionInfo, url: &str) -> Result<ConnectionInfo, Error> {
        if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            let message = format!("url: expected rediss://... for TLS, got {:?}", without_password(url));
            return Err(Error::new(Kind::Input, message));
        }
        let client = Client::build_with_tls(info, self.certificates());
        let info = client.map(|client| client.get_connection_info().clone());
        info.map_err(|error| Error::new(Kind::Input, format!("tls: {error}")))
    }

    /// The same configuration for other connections of the service, such as those to its database. It is made once.
    /// Unstable: for the system of record.
    ///
    /// # Errors
    ///
    /// Certificates that can't be read, or a key that doesn't belong to its certificate.
    #[doc(hidden)]
    pub fn client_config(&self) -> io::Result<Arc<ClientConfig>> {
        match self.config.get() {
            Some(config) => Ok(Arc::clone(config)),
            None => {
                let made = self.make_config().map_err(io::Error::other)?;
                Ok(Arc::clone(self.config.get_or_init(|| Arc::new(made))))
            }
        }
    }

    fn make_config(&self) -> Result<ClientConfig, Box<dyn std::error::Error + Send + Sync>> {
        let mut roots = RootCertStore::empty();
        match &self.authority {
            Some(pem) => {
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    roots.add(certificate?)?;
                }
            }
            None => {
                let platform = rustls_native_certs::load_native_certs();
                // Of some hundred certificates, one may be unreadable.
                if let (true, Some(error)) = (platform.certs.is_empty(), platform.errors.into_iter().next()) {
                    return Err(error.into());
                }
                roots.add_parsable_certificates(platform.certs);
            }
        }
        let config = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let config = config.with_root_certificates(roots);
        Ok(match &self.certificate {
            Some((pem, key)) => {
                let chain = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>()?;
                config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key)?)?
            }
            None => config.with_no_client_auth(),
        })
    }

    fn certificates(&self) -> TlsCertificates {
        let client =
            |(pem, key): &(Vec<u8>, Vec<u8>)| ClientTlsConfig { client_cert: pem.clone(), client_key: key.clone() };
        TlsCertificates { client_tls: self.certificate.as_ref().map(client), root_cert: self.authority.clone() }
    }
}

/// Keys stay out of logs.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (authority, certificate) = (self.authority.is_some(), self.certificate.is_some());
        f.debug_struct("Tls").field("authority", &authority).field("certificate", &certificate).finish()
    }
}

/// The process's provider, or aws-lc-rs.
fn provider() -> Arc<CryptoProvider> {
    CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(aws_lc_rs::default_provider()))
}

/// redis-rs takes the process's provider, and rustls panics if none is set and the program was built with several.
/// Called as late as possible, so that a program that sets its own comes first.
#[cfg(feature = "redis-rs")]
pub(super) fn have_a_provider() {
    if CryptoProvider::get_default().is_none() {
        // Another thread came first.
        let _ = aws_lc_rs::default_provider().install_default();
    }
}

fn certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let wanted = "certificate";
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(read) if read.is_empty() => Err(unread(what, wanted, &pem::Error::NoItemsFound)),
        read => read.map_err(|error| unread(what, wanted, &error)),
    }
}

/// The error for text that isn't PEM. Some of the parser's errors quote the text, which may be part of a key.
fn unread(what: &str, wanted: &str, error: &pem::Error) -> Error {
    match error {
        pem::Error::NoItemsFound => input(what, &format!("the text contains no {wanted} in PEM")),
        _ => input(what, "the text can't be read as PEM"),
    }
}

fn input(what: &str, why: &str) -> Error {
    Error::new(Kind::Input, format!("{what}: {why}"))
}
