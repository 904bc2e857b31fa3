//! The tool, run as a command and in a terminal.

pub(crate) mod browser;
pub(crate) mod page;
#[cfg(feature = "archive")]
pub(crate) mod s3;
pub(crate) mod terminal;
pub(crate) mod tool;
