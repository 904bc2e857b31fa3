//! Redis by TLS: whom to trust and what to show, from files; and what a tool without TLS says to that.

use std::ffi::OsString;
#[cfg(feature = "tls")]
use std::path::{Path, PathBuf};

use clap::Args;
use tollgate::Engine;

use crate::Failure;

#[derive(Debug, Default, Args)]
pub(super) struct TlsFiles {
    /// The authorities to trust at rediss://..., in PEM, instead of the platform's.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CA")]
    tls_ca: Option<OsString>,
    /// The certificate to show at rediss://..., in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CERT")]
    tls_cert: Option<OsString>,
    /// The private key of that certificate, in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_KEY")]
    tls_key: Option<OsString>,
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// What is at this address, if there is one.
    pub(super) fn open(&self, url: Option<&str>) -> Result<Option<Engine>, Failure> {
        match (url, self.read()?) {
            (Some(url), Some(tls)) => Ok(Some(Engine::open_with_tls(url, &tls)?)),
            (Some(url), None) => Ok(Some(Engine::open(url)?)),
            (None, Some(_)) => {
                let message = "--tls-ca, --tls-cert: expected --url rediss://... with them, got no --url";
                Err(Failure::Told(message.into()))
            }
            (None, None) => Ok(None),
        }
    }

    /// What the files say, if any is named.
    fn read(&self) -> Result<Option<tollgate::Tls>, Failure> {
        let named = |path: &Option<OsString>| path.clone().filter(|path| !path.is_empty()).map(PathBuf::from);
        let (ca, cert, key) = (named(&self.tls_ca), named(&self.tls_cert), named(&self.tls_key));
        if ca.is_none() && cert.is_none() && key.is_none() {
            return Ok(None);
        }
        let mut tls = tollgate::Tls::new();
        if let Some(path) = ca {
            let told = |error| Failure::Told(format!("--tls-ca {}: {error}", path.display()));
            tls = tls.authority(&read("--tls-ca", &path)?).map_err(told)?;
        }
        match (cert, key) {
            (Some(cert), Some(key)) => {
                let files = format!("--tls-cert {} --tls-key {}", cert.display(), key.display());
                let (pem, secret) = (read("--tls-cert", &cert)?, read("--tls-key", &key)?);
                tls = tls.certificate(&pem, &secret).map_err(|error| Failure::Told(format!("{files}: {error}")))?;
            }
            (None, None) => {}
            (Some(_), None) => return Err(Failure::Told("--tls-cert: expected --tls-key with it, got none".into())),
            (None, Some(_)) => return Err(Failure::Told("--tls-key: expected --tls-cert with it, got none".into())),
        }
        Ok(Some(tls))
    }
}

#[cfg(feature = "tls")]
fn read(option: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| Failure::Told(format!("{option} {}: {error}", path.display())))
}

/// The options are parsed all the same, so that the error can name the feature that is missing.
#[cfg(not(feature = "tls"))]
impl TlsFiles {
    /// What is at this address, if there is one.
    pub(super) fn open(&self, url: Option<&str>) -> Result<Option<Engine>, Failure> {
        let scheme = url.and_then(|url| Some(url.split_once("://")?.0)).unwrap_or_default();
        let files = [("--tls-ca", &self.tls_ca), ("--tls-cert", &self.tls_cert), ("--tls-key", &self.tls_key)];
        let mut named = files.iter().filter(|(_, file)| file.as_ref().is_some_and(|file| !file.is_empty()));
        let what = match scheme.split('-').next() {
            Some("rediss" | "valkeys") => Some(format!("--url {scheme}://...")),
            _ => named.next().map(|(option, _)| (*option).to_owned()),
        };
        if let Some(what) = what {
            let why = "needs TLS, and this tollgate was built without its feature tls";
            let how = "cargo install --locked --path . --features cli,tls";
            return Err(Failure::Told(format!("{what} {why}: {how}")));
        }
        Ok(url.map(Engine::open).transpose()?)
    }
}
