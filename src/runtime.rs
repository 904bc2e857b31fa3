//! The tokio runtime that a call is made on.

use std::panic::catch_unwind;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::error::{Error, Kind};

/// That of this call.
///
/// # Errors
///
/// None.
pub(crate) fn current() -> Result<Handle, Error> {
    Handle::try_current().map_err(|error| misused("none").caused_by(error))
}

/// The same, if it can wait.
pub(crate) fn with_timers() -> Result<Handle, Error> {
    let runtime = current()?;
    // There is no other way to ask.
    catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_| misused("one without timers"))?;
    Ok(runtime)
}

pub(crate) fn misused(got: &str) -> Error {
    Error::new(Kind::Input, format!("runtime: expected to be called within a tokio runtime with enable_all, got {got}"))
}
