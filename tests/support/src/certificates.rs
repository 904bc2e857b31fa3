//! Authorities, certificates and servers that show them. All are made here, and last as long as the test.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;
use tollgate::Tls;

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

/// A server's certificate and the authority of clients that it trusts, as files.
pub struct TlsFiles {
    files: TempDir,
    /// Which clients must show a certificate: redis-server's `tls-auth-clients`.
    clients: &'static str,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        Self::signing_by(name, &rcgen::PKCS_ECDSA_P256_SHA256)
    }

    pub fn signing_by(name: &str, algorithm: &'static rcgen::SignatureAlgorithm) -> Self {
        let mut params = CertificateParams::new([]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate_for(algorithm).expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for hosts and addresses.
    pub fn signs(&self, names: &[&str]) -> Pair {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        params.as_mut().expect("names").distinguished_name.push(DnType::CommonName, names[0]);
        let certificate = params.and_then(|params| params.signed_by(&key, &self.0)).expect("a certificate").pem();
        Pair { certificate, key: key.serialize_pem() }
    }

    /// Its own certificate, which is no server's.
    pub fn itself(&self) -> Pair {
        Pair { certificate: self.pem(), key: self.0.key().serialize_pem() }
    }

    pub fn trusted(&self) -> Tls {
        Tls::new().authority(self.pem().as_bytes()).expect("an authority")
    }

    /// The same, and a certificate by another to show.
    pub fn trusted_by(&self, other: &Self) -> Tls {
        let Pair { certificate, key } = other.signs(&["limiter"]);
        self.trusted().certificate(certificate.as_bytes(), key.as_bytes()).expect("a certificate")
    }
}

impl TlsFiles {
    pub fn of(authority: &Authority, Pair { certificate, key }: Pair, clients: &'static str) -> Self {
        let tls_files = Self { files: tempfile::tempdir().expect("a temporary directory"), clients };
        for (file, text) in [("ca.pem", authority.pem()), ("server.pem", certificate), ("server.key", key)] {
            tls_files.write(file, &text);
        }
        tls_files
    }

    /// The options by which a server listens by TLS here.
    pub fn at(&self, port: u16) -> Vec<String> {
        let [ca, certificate, key] = ["ca.pem", "server.pem", "server.key"].map(|file| self.file(file));
        let options = [
            ("--tls-port", &*port.to_string()),
            ("--tls-ca-cert-file", &ca),
            ("--tls-cert-file", &certificate),
            ("--tls-key-file", &key),
            ("--tls-auth-clients", self.clients),
        ];
        options.into_iter().flat_map(|(name, value)| [name.to_owned(), value.to_owned()]).collect()
    }

    /// The same for one that listens by TLS alone, and talks to other servers by it.
    pub fn alone_at(&self, port: u16) -> Vec<String> {
        let others = ["--port", "0", "--tls-replication", "yes", "--tls-cluster", "yes"];
        self.at(port).into_iter().chain(others.map(str::to_owned)).collect()
    }

    /// Another file in the same folder, for a client of the test's.
    pub fn write(&self, file: &str, text: &str) {
        std::fs::write(self.file(file), text).expect("written");
    }

    pub fn file(&self, name: &str) -> String {
        self.files.path().join(name).display().to_string()
    }
}
