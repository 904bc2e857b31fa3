//! The certificate of a port, which may be replaced while it is in use.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::stream::Stream;

/// A certificate and its key, from files. Clones share it.
#[derive(Clone, Debug)]
pub struct Certificate {
    files: Arc<(PathBuf, PathBuf)>,
    current: Arc<RwLock<Arc<ServerConfig>>>,
}

impl Certificate {
    /// The certificate chain and the private key in these files, in PEM.
    ///
    /// # Errors
    ///
    /// A file that can't be read, or has none; a key that isn't the certificate's.
    pub fn read(certificate: &Path, key: &Path) -> io::Result<Self> {
        let current = RwLock::new(config(certificate, key)?).into();
        Ok(Self { files: Arc::new((certificate.into(), key.into())), current })
    }

    /// Reads the files again, for connections that begin from now on. Files that can't be used change nothing.
    ///
    /// # Errors
    ///
    /// The same as [`read`](Self::read).
    pub fn reload(&self) -> io::Result<()> {
        let (certificate, key) = &*self.files;
        let read = config(certificate, key)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    pub(crate) async fn accept(&self, stream: Stream) -> io::Result<Stream> {
        let current = Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner));
        Ok(Box::pin(TlsAcceptor::from(current).accept(stream).await?))
    }
}

fn config(certificate: &Path, key: &Path) -> io::Result<Arc<ServerConfig>> {
    let unusable = |path: &Path, why: &dyn std::fmt::Display| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
    };
    let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(|error| unusable(certificate, &error))?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, &error))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_no_client_auth().with_single_cert(chain, secret);
    let mut config = config.map_err(|error| unusable(certificate, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
