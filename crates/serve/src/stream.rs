//! The connections that ports accept.

use std::pin::Pin;

use tokio::io::{AsyncRead, AsyncWrite};

/// A connection of any kind.
pub(crate) type Stream = Pin<Box<dyn Io>>;

/// What is read and written.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Io for S {}
