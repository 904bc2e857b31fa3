//! Errors of archives, each in one line, without credentials.

use std::fmt;
use std::sync::Arc;

use crate::postgres::PostgresError;

/// Why rows could not be archived or read back.
///
/// The message is complete; [`source`](std::error::Error::source) returns another error only if that says more. Of what
/// a store or database says, only what is in the message is kept: the rest may contain keys, signatures or a row's
/// values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveError {
    kind: Kind,
    message: String,
    cause: Option<Cause>,
}

/// The underlying error. Two are equal if they print alike.
#[derive(Clone, Debug)]
struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Cause {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Input,
    Unreachable,
    /// Another archiver is at work.
    Busy,
    /// The table and the archive don't hold the same rows.
    Mismatch,
    /// The stored data isn't what was written.
    Damaged,
    Missing,
    Refused,
}

/// The most characters of a store's message that are repeated.
const MOST_SAID: usize = 300;

impl ArchiveError {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), cause: None }
    }

    /// Attaches the error's cause, unless the message already contains it. It must not contain secrets.
    pub(super) fn caused_by(self, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        let is_repeated = self.message.contains(&cause.to_string());
        Self { cause: (!is_repeated).then(|| Cause(Arc::new(cause))), ..self }
    }

    pub(super) fn input(message: impl Into<String>) -> Self {
        Self::new(Kind::Input, message)
    }

    /// Another archiver holds the lock; the error names its session.
    pub(super) fn busy(error: &PostgresError) -> Self {
        Self::new(Kind::Busy, format!("archive: another archiver is running on this database: {error}"))
    }

    pub(super) fn mismatch(message: impl Into<String>) -> Self {
        Self::new(Kind::Mismatch, message)
    }

    pub(super) fn damaged(message: impl Into<String>) -> Self {
        Self::new(Kind::Damaged, message)
    }

    pub(super) fn missing(message: impl Into<String>) -> Self {
        Self::new(Kind::Missing, message)
    }

    pub(super) fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::Refused, message)
    }

    /// A blocking task ends early only if the program ends, or if it panics.
    pub(super) fn interrupted(ended: tokio::task::JoinError) -> Self {
        Self::refused("archive: a background task ended early").caused_by(ended)
    }

    /// A file that couldn't be read back: its name, and what is wrong with it.
    pub(super) fn unreadable(object: &str, error: &parquet::errors::ParquetError) -> Self {
        Self::damaged(format!("archive: {object}: not readable as Parquet: {}", said(&error.to_string())))
    }

    /// The bucket or directory to write to doesn't exist.
    pub(super) fn nowhere(address: &str) -> Self {
        Self::new(Kind::Unreachable, format!("archive: {address}: the bucket or directory doesn't exist"))
    }

    /// The file system's error about a file or folder. Only one about the whole disk counts as unreachable.
    pub(super) fn file(place: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;

        let (kind, why) = match error.kind() {
            ErrorKind::NotFound => (Kind::Missing, "file not found".to_owned()),
            ErrorKind::AlreadyExists => {
                (Kind::Refused, "the file already exists: another process created it".to_owned())
            }
            ErrorKind::PermissionDenied => (Kind::Refused, "permission denied".to_owned()),
            ErrorKind::UnexpectedEof => (Kind::Damaged, "the file is truncated".to_owned()),
            ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::StaleNetworkFileHandle => (Kind::Unreachable, said(&error.to_string())),
            _ => (Kind::Refused, said(&error.to_string())),
        };
        Self::new(kind, format!("archive: {place}: {why}"))
    }

    /// A store's error about an object.
    pub(super) fn store(object: &str, error: &object_store::Error) -> Self {
        use object_store::Error;

        let (kind, why) = match error {
            Error::NotFound { .. } => (Kind::Missing, "object not found".to_owned()),
            Error::AlreadyExists { .. } | Error::Precondition { .. } => {
                (Kind::Refused, "the object already exists: another process created it".to_owned())
            }
            Error::PermissionDenied { .. } => (Kind::Refused, "permission denied".to_owned()),
            Error::Unauthenticated { .. } => (Kind::Refused, "the credentials are refused".to_owned()),
            other => {
                // The innermost cause is the store's message; the others wrap it.
                let mut cause: &dyn std::error::Error = other;
                while let Some(source) = cause.source() {
                    cause = source;
                }
                (Kind::Unreachable, said(&cause.to_string()))
            }
        };
        Self::new(kind, format!("archive: {object}: {why}"))
    }

    /// What is wrong with the settings of S3. Repeats none of their values.
    pub(super) fn settings(error: &object_store::Error) -> Self {
        let why = match error {
            object_store::Error::UnknownConfigurationKey { key, .. } => format!("unknown setting {key}"),
            _ => "invalid values".to_owned(),
        };
        Self::input(format!("archive: can't use the S3 settings in the environment (AWS_*): {why}"))
    }

    /// Adds what to do about it, if the archive is damaged or missing.
    pub(super) fn with_remedy(self, remedy: &str) -> Self {
        match self.kind {
            Kind::Damaged | Kind::Missing => Self { message: format!("{}: {remedy}", self.message), ..self },
            _ => self,
        }
    }

    /// Puts the month in front.
    pub(super) fn of(self, month: impl fmt::Display) -> Self {
        if self.message.starts_with("archive of ") {
            return self;
        }
        let message = self.message.strip_prefix("archive: ").unwrap_or(&self.message);
        Self { message: format!("archive of {month}: {message}"), ..self }
    }

    /// The input can't be used: an address, a time, a month.
    #[must_use]
    pub fn is_input(&self) -> bool {
        self.kind == Kind::Input
    }

    /// The database or the store can't be reached.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        self.kind == Kind::Unreachable
    }

    /// Another archiver is running on this database.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.kind == Kind::Busy
    }

    /// A month's table and its archive don't hold the same rows. Neither was changed.
    #[must_use]
    pub fn is_mismatch(&self) -> bool {
        self.kind == Kind::Mismatch
    }

    /// The stored data isn't what was written, or part of it is missing.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.kind == Kind::Damaged
    }

    /// There is no such archive.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.kind == Kind::Missing
    }
}

/// A store's message on one line. Of S3's XML only the code and the message: the rest may contain what was signed, and
/// by which key.
fn said(text: &str) -> String {
    let element = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        rest.split_once("</").map(|(inside, _)| inside)
    };
    let text = match (element("Code"), element("Message")) {
        (Some(code), Some(message)) => format!("{message} ({code})"),
        (Some(code), None) => code.to_owned(),
        _ if text.contains("<?xml") => "an answer that can't be read".to_owned(),
        _ => text.to_owned(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = without_credentials(&line);
    for secret in SECRETS.iter().filter_map(|name| std::env::var(name).ok()).filter(|secret| !secret.is_empty()) {
        line = line.replace(&secret, "...");
    }
    line.chars().take(MOST_SAID).collect()
}

/// Variables whose values a server may repeat from a request.
const SECRETS: [&str; 4] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"];

/// Removes what precedes the `@` in a URL, such as the credentials of a proxy.
fn without_credentials(line: &str) -> String {
    let word = |word: &str| match word.split_once("://") {
        Some((scheme, rest)) => match rest.rsplit_once('@') {
            Some((_, host)) => format!("{scheme}://...@{host}"),
            None => word.to_owned(),
        },
        None => word.to_owned(),
    };
    line.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

impl From<PostgresError> for ArchiveError {
    fn from(error: PostgresError) -> Self {
        let kind = match &error {
            error if error.is_unreachable() => Kind::Unreachable,
            error if error.is_input() => Kind::Input,
            _ => Kind::Refused,
        };
        Self::new(kind, error.to_string())
    }
}

impl fmt::Display for ArchiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ArchiveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.cause.as_ref()?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_ended_a_computation_is_the_source_and_stays_it_under_a_month() {
        let ended = tokio::spawn(async { panic!("out of numbers") }).await.expect_err("a panic");
        let error = ArchiveError::interrupted(ended).of("2026-05");
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert_eq!(error.to_string(), "archive of 2026-05: a background task ended early");
        assert!(source.contains("out of numbers"), "{source}");
    }

    #[test]
    fn of_what_s3_says_the_code_and_the_message_are_repeated() {
        let xml = "<?xml version=\"1.0\"?>\n<Error><Code>SignatureDoesNotMatch</Code><Message>Not the\nsignature</Message>\
                   <AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>AWS4</StringToSign></Error>";
        assert_eq!(said(xml), "Not the signature (SignatureDoesNotMatch)");
        assert_eq!(said("<?xml version=\"1.0\"?><x>AKIA</x>"), "an answer that can't be read");
        assert_eq!(said("one\n two"), "one two");
        let proxy = "error sending request for (http://me:p@ss@127.0.0.1:1/x) to http://127.0.0.1:2/";
        assert_eq!(said(proxy), "error sending request for (http://...@127.0.0.1:1/x) to http://127.0.0.1:2/");
        assert_eq!(said(&"x".repeat(400)).len(), MOST_SAID);
    }
}
