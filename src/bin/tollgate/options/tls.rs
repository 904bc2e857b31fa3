//! TLS to Redis and to PostgreSQL: whom to trust and what to show, from files; and what a tool without TLS says to that.

use std::ffi::OsString;
#[cfg(feature = "tls")]
use std::fmt;
use std::path::Path;

use clap::Args;
use tollgate::Engine;

use crate::Failure;

#[derive(Debug, Default, Args)]
pub(super) struct TlsFiles {
    /// The certificate authorities to trust for rediss://..., in PEM, instead of the platform's.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CA")]
    tls_ca: Option<OsString>,
    /// The client certificate for rediss://..., in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CERT")]
    tls_cert: Option<OsString>,
    /// The private key of that certificate, in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_KEY")]
    tls_key: Option<OsString>,
}

/// The files of one server, as options name them.
pub(crate) struct Files<'a> {
    /// What these options begin with: `--tls` of `--tls-ca`.
    options: &'static str,
    ca: Option<&'a Path>,
    cert: Option<&'a Path>,
    key: Option<&'a Path>,
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// What is at this address, if there is one.
    pub(super) fn open(&self, url: Option<&str>) -> Result<Option<Engine>, Failure> {
        match (url, self.files().read()?) {
            (Some(url), Some(tls)) => Ok(Some(Engine::open_with_tls(url, &tls)?)),
            (Some(url), None) => Ok(Some(Engine::open(url)?)),
            (None, Some(_)) => {
                let message = "--tls-ca, --tls-cert: expected --url rediss://... with them, got no --url";
                Err(Failure::Told(message.into()))
            }
            (None, None) => Ok(None),
        }
    }
}

/// The options are parsed all the same, so that the error can name the feature that is missing.
#[cfg(not(feature = "tls"))]
impl TlsFiles {
    /// What is at this address, if there is one.
    pub(super) fn open(&self, url: Option<&str>) -> Result<Option<Engine>, Failure> {
        let scheme = url.and_then(|url| Some(url.split_once("://")?.0)).unwrap_or_default();
        let what = match scheme.split('-').next() {
            Some("rediss" | "valkeys") => Some(format!("--url {scheme}://...")),
            _ => self.files().named(),
        };
        match what {
            Some(what) => Err(lacking(&what, "cli,tls")),
            None => Ok(url.map(Engine::open).transpose()?),
        }
    }
}

impl TlsFiles {
    fn files(&self) -> Files<'_> {
        Files::new("--tls", [&self.tls_ca, &self.tls_cert, &self.tls_key])
    }
}

impl<'a> Files<'a> {
    /// Authorities, certificate and key. An empty name, such as the environment may have, names no file.
    pub(crate) fn new(options: &'static str, files: [&'a Option<OsString>; 3]) -> Self {
        let [ca, cert, key] = files.map(|file| file.as_deref().filter(|name| !name.is_empty()).map(Path::new));
        Self { options, ca, cert, key }
    }

    /// What the files say, if any is named.
    #[cfg(feature = "tls")]
    pub(crate) fn read(&self) -> Result<Option<tollgate::Tls>, Failure> {
        let Self { options, ca, cert, key } = *self;
        if ca.is_none() && cert.is_none() && key.is_none() {
            return Ok(None);
        }
        let mut tls = tollgate::Tls::new();
        if let Some(path) = ca {
            let named = format!("{options}-ca {}", path.display());
            tls = tls.authority(&read(&named, path)?).map_err(|error| told(&named, &error))?;
        }
        match (cert, key) {
            (Some(cert), Some(key)) => {
                let named = [format!("{options}-cert {}", cert.display()), format!("{options}-key {}", key.display())];
                let (pem, secret) = (read(&named[0], cert)?, read(&named[1], key)?);
                tls = tls.certificate(&pem, &secret).map_err(|error| told(&named.join(" "), &error))?;
            }
            (None, None) => {}
            (Some(_), None) => {
                return Err(told(&format!("{options}-cert"), &format!("expected {options}-key with it, got none")));
            }
            (None, Some(_)) => {
                return Err(told(&format!("{options}-key"), &format!("expected {options}-cert with it, got none")));
            }
        }
        Ok(Some(tls))
    }

    /// The option that names a file, if one does.
    #[cfg(not(feature = "tls"))]
    pub(crate) fn named(&self) -> Option<String> {
        let files = [("ca", self.ca), ("cert", self.cert), ("key", self.key)];
        files.into_iter().find_map(|(name, file)| file.map(|_| format!("{}-{name}", self.options)))
    }
}

#[cfg(feature = "tls")]
fn read(named: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| told(named, &error))
}

#[cfg(feature = "tls")]
fn told(named: &str, why: &dyn fmt::Display) -> Failure {
    Failure::Told(format!("{named}: {why}"))
}

/// What asks for TLS in vain, and by which features the tool has it.
#[cfg(not(feature = "tls"))]
pub(crate) fn lacking(what: &str, features: &str) -> Failure {
    let why = "needs TLS, and this tollgate was built without its feature tls";
    Failure::Told(format!("{what} {why}: cargo install --locked --path . --features {features}"))
}
