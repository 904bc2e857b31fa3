//! An endpoint at which a service exports its metrics: its address, and one reading of it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// How long a reading may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest text that is read.
const MOST_BYTES: usize = 8 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    host: String,
    port: u16,
    path: String,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected http://HOST[:PORT][/PATH], such as http://127.0.0.1:9000/metrics";
        let uri = text.parse::<Uri>().map_err(|_| EXPECTED.to_owned())?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(format!("{EXPECTED}: TLS isn't supported here")),
            _ => return Err(EXPECTED.to_owned()),
        }
        let authority = uri.authority().ok_or(EXPECTED)?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err(EXPECTED.to_owned());
        }
        let port = match authority.port_u16() {
            Some(port) => port,
            None if authority.as_str() == authority.host() => 80,
            None => return Err(EXPECTED.to_owned()),
        };
        let path = uri.path_and_query().map(|path| path.as_str()).filter(|path| *path != "/").unwrap_or("/metrics");
        Ok(Self { host: authority.host().to_owned(), port, path: path.to_owned() })
    }
}

/// Without the query, which may hold a secret.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, path } = self;
        match path.split_once('?') {
            Some((path, _)) => write!(f, "http://{host}:{port}{path}?…"),
            None => write!(f, "http://{host}:{port}{path}"),
        }
    }
}

impl Address {
    /// The text of the endpoint, or why there is none.
    pub(super) async fn read(&self) -> Result<String, String> {
        let read = tokio::time::timeout(PATIENCE, self.try_to_read()).await;
        read.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")))
    }

    async fn try_to_read(&self) -> Result<String, String> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((host, self.port)).await.map_err(|error| format!("no connection: {error}"))?;
        let broken = |error: hyper::Error| format!("no HTTP response: {error}");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let request = Request::get(&self.path)
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::ACCEPT, "text/plain")
            .header(header::CONNECTION, "close")
            .body(Empty::<Bytes>::new())
            .map_err(|error| error.to_string())?;
        // The connection is polled here, so that it ends with this call.
        let body = async {
            let response = sender.send_request(request).await.map_err(broken)?;
            if response.status() != StatusCode::OK {
                return Err(format!("expected the status 200 OK, got {}", response.status()));
            }
            let too_long = |error: Box<dyn std::error::Error + Send + Sync>| match error.downcast::<hyper::Error>() {
                Ok(error) => format!("the response broke off: {error}"),
                Err(_) => format!("the response is larger than {} MiB", MOST_BYTES >> 20),
            };
            let body = Limited::new(response.into_body(), MOST_BYTES).collect().await.map_err(too_long)?;
            Ok(body.to_bytes())
        };
        tokio::pin!(body, connection);
        let bytes = tokio::select! {
            biased;
            body = &mut body => body?,
            ended = &mut connection => match ended {
                // What has arrived is still to be read.
                Ok(()) => body.await?,
                Err(error) => return Err(broken(error)),
            }
        };
        String::from_utf8(bytes.to_vec()).map_err(|_| "the response isn't UTF-8".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_may_leave_out_the_rest() {
        for (text, expected) in [
            ("http://localhost", "http://localhost:80/metrics"),
            ("http://localhost/", "http://localhost:80/metrics"),
            ("http://10.0.0.1:9000", "http://10.0.0.1:9000/metrics"),
            ("http://[::1]:9000/a/b?token=s3cret", "http://[::1]:9000/a/b?…"),
        ] {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), expected);
        }
    }

    #[test]
    fn what_is_no_such_address_is_refused_without_repeating_a_password() {
        for text in [
            "",
            "localhost:9000",
            "/metrics",
            "ftp://h",
            "http://",
            "http://h:99999",
            "http://u:s3cret@h/",
            "http://h:x",
        ] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.starts_with("expected http://HOST[:PORT][/PATH]") && !error.contains("s3cret"), "{error}");
        }
        assert!("https://h".parse::<Address>().is_err_and(|error| error.ends_with("TLS isn't supported here")));
    }
}
