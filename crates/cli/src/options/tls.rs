//! TLS to Redis and PostgreSQL: trusted authorities and the client certificate, from files; and the errors of a build
//! without TLS.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
#[cfg(feature = "tls")]
use anyhow::{Context, bail};
use clap::Args;
use tollgate::{Engine, RedisBuilder};

#[derive(Debug, Default, Args)]
pub(super) struct TlsFiles {
    /// The certificate authorities to trust for rediss://..., in PEM.
    ///
    /// Default: the platform's.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CA", help_heading = "TLS")]
    tls_ca: Option<OsString>,
    /// The client certificate for rediss://..., in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_CERT", help_heading = "TLS")]
    tls_cert: Option<OsString>,
    /// The private key of the client certificate for rediss://..., in PEM.
    #[arg(long, value_name = "FILE", env = "TOLLGATE_TLS_KEY", help_heading = "TLS")]
    tls_key: Option<OsString>,
}

/// The files for one server, as given by options.
pub(crate) struct Files<'a> {
    /// The prefix of these options' names: `--tls` of `--tls-ca`.
    options: &'static str,
    ca: Option<&'a Path>,
    cert: Option<&'a Path>,
    key: Option<&'a Path>,
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// The engine at this address, if there is one.
    pub(super) fn open(&self, url: Option<&str>, builder: RedisBuilder) -> Result<Option<Engine>> {
        match (url, self.files().read()?) {
            (Some(url), Some(tls)) => Ok(Some(builder.tls(&tls).open_engine(url)?)),
            (Some(url), None) => Ok(Some(builder.open_engine(url)?)),
            (None, Some(_)) => {
                bail!("--tls-ca, --tls-cert: need --url rediss://...")
            }
            (None, None) => Ok(None),
        }
    }
}

/// The options are parsed without the feature too, so that the error can name it.
#[cfg(not(feature = "tls"))]
impl TlsFiles {
    /// The engine at this address, if there is one.
    pub(super) fn open(&self, url: Option<&str>, builder: RedisBuilder) -> Result<Option<Engine>> {
        let scheme = url.and_then(|url| Some(url.split_once("://")?.0)).unwrap_or_default();
        let what = match scheme.split('-').next() {
            Some("rediss" | "valkeys") => Some(format!("--url {scheme}://...")),
            _ => self.files().named(),
        };
        match what {
            Some(what) => Err(lacking(&what, "tls")),
            None => Ok(url.map(|url| builder.open_engine(url)).transpose()?),
        }
    }
}

impl TlsFiles {
    fn files(&self) -> Files<'_> {
        Files::new("--tls", [&self.tls_ca, &self.tls_cert, &self.tls_key])
    }
}

impl<'a> Files<'a> {
    /// Authorities, certificate and key. An empty name, such as from the environment, names no file.
    pub(crate) fn new(options: &'static str, files: [&'a Option<OsString>; 3]) -> Self {
        let [ca, cert, key] = files.map(|file| file.as_deref().filter(|name| !name.is_empty()).map(Path::new));
        Self { options, ca, cert, key }
    }

    /// The settings from the files, if any is named.
    #[cfg(feature = "tls")]
    pub(crate) fn read(&self) -> Result<Option<tollgate::Tls>> {
        let Self { options, ca, cert, key } = *self;
        if ca.is_none() && cert.is_none() && key.is_none() {
            return Ok(None);
        }
        let mut tls = tollgate::Tls::new();
        if let Some(path) = ca {
            let named = format!("{options}-ca {}", path.display());
            tls = tls.authority(&read(&named, path)?).context(named)?;
        }
        match (cert, key) {
            (Some(cert), Some(key)) => {
                let named = [format!("{options}-cert {}", cert.display()), format!("{options}-key {}", key.display())];
                let (pem, secret) = (read(&named[0], cert)?, read(&named[1], key)?);
                tls = tls.certificate(&pem, &secret).with_context(|| named.join(" "))?;
            }
            (None, None) => {}
            (Some(_), None) => {
                bail!("{options}-cert: needs {options}-key");
            }
            (None, Some(_)) => {
                bail!("{options}-key: needs {options}-cert");
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
fn read(named: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| named.to_owned())
}

/// The error for TLS that this build lacks, naming the features that provide it.
#[cfg(not(feature = "tls"))]
pub(crate) fn lacking(what: &str, features: &str) -> anyhow::Error {
    let why = "needs TLS, and this tollgate was built without its feature tls";
    anyhow::anyhow!("{what} {why}: cargo install --locked --path crates/cli --features {features}")
}
