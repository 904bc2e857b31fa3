//! Users and passwords that are asked for anew at each connection, since they expire.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{RedisConnectionInfo, RedisError};
use tokio::time::Instant;

use super::connect::guarded;

/// The user and password of a connection, and how long the server accepts them.
#[derive(Clone)]
pub struct Credentials {
    user: Option<String>,
    password: String,
    lifetime: Option<Duration>,
}

impl Credentials {
    /// This user with this password or token.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: Some(user.into()), password: password.into(), lifetime: None }
    }

    /// The server's `default` user with this password.
    pub fn for_default_user(password: impl Into<String>) -> Self {
        Self { user: None, password: password.into(), lifetime: None }
    }

    /// The server accepts them for this long from now on. A connection is replaced by one with new credentials at the
    /// first call after four fifths of that time, though not within its first second. Default: for good.
    #[must_use]
    pub fn expiring_in(mut self, time: Duration) -> Self {
        self.lifetime = Some(time);
        self
    }
}

/// Shows the user alone.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Credentials");
        shown.field("user", &self.user).field("lifetime", &self.lifetime).finish_non_exhaustive()
    }
}

/// The error of a [`CredentialSource`], of any type.
pub type CredentialError = Box<dyn std::error::Error + Send + Sync>;

/// The credentials that a [`CredentialSource`] is asked for, or why it has none.
pub type CredentialFuture<'a> = Pin<Box<dyn Future<Output = Result<Credentials, CredentialError>> + Send + 'a>>;

/// Gives the credentials for each new connection, such as tokens that expire after some minutes: those of IAM for
/// ElastiCache and Memorystore, of Entra ID for Azure. A closure that returns a future is one.
///
/// It is asked at each attempt to connect, on the runtime that the connection is for. After a failed attempt the next
/// call makes another; once the [breaker](crate::Redis::breaker) has opened, 0.1 to 0.6 s pass between attempts. While
/// an attempt has no answer, another begins every half a second, so a slow source is asked several times at once. An
/// error or a panic counts as an unreachable Redis. So does a source that is silent: after one second for new calls,
/// after five for those already waiting. The rule's [`OnError`](crate::OnError) then answers. Messages show the error.
/// A source that gets tokens over the network keeps them until shortly before they expire.
///
/// ```no_run
/// # async fn token() -> std::io::Result<String> { Ok(String::new()) }
/// # fn main() -> Result<(), tollgate::Error> {
/// use std::time::Duration;
/// use tollgate::Redis;
/// use tollgate::connect::Credentials;
///
/// let login = || async { Ok(Credentials::new("limiter", token().await?).expiring_in(Duration::from_secs(15 * 60))) };
/// let redis = Redis::builder().credentials(login).open("redis://redis.internal")?;
/// # Ok(())
/// # }
/// ```
pub trait CredentialSource: Send + Sync {
    /// Those of the next connection.
    fn credentials(&self) -> CredentialFuture<'_>;
}

impl<F, R> CredentialSource for F
where
    F: Fn() -> R + Send + Sync,
    R: Future<Output = Result<Credentials, CredentialError>> + Send + 'static,
{
    fn credentials(&self) -> CredentialFuture<'_> {
        Box::pin(self())
    }
}

/// By what a connection was authenticated.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Login {
    /// When another connection is to take its place, since its credentials expire.
    pub(super) due: Option<Instant>,
    /// Whether a source gave the credentials.
    pub(super) has_source: bool,
    /// How long that took.
    pub(super) asked_for: Duration,
}

/// What is asked at each connection, if anything is.
#[derive(Clone, Default)]
pub(crate) struct Asked(Option<Arc<dyn CredentialSource>>);

impl Asked {
    pub(in crate::engine) fn of(source: impl CredentialSource + 'static) -> Self {
        Self(Some(Arc::new(source)))
    }

    /// These settings with the user and password of a new connection.
    pub(super) async fn applied_to(
        &self,
        settings: &RedisConnectionInfo,
    ) -> Result<(RedisConnectionInfo, Login), RedisError> {
        let Some(source) = &self.0 else { return Ok((settings.clone(), Login::default())) };
        let asked = Instant::now();
        let none = |error| std::io::Error::other(format!("no credentials were given: {error}"));
        let given = guarded("the source of credentials", async { source.credentials().await.map_err(none) }).await?;
        let Credentials { user, password, lifetime } = given;
        let user = user.unwrap_or_else(|| "default".to_owned());
        let settings = settings.clone().set_username(user).set_password(password);
        // A lifetime that no clock reaches is for good.
        let due = lifetime.and_then(|lifetime| asked.checked_add(lifetime.mul_f64(0.8)));
        Ok((settings, Login { due, has_source: true, asked_for: asked.elapsed() }))
    }
}
