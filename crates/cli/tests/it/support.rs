//! The tool, run as a command.

#[cfg(feature = "archive")]
pub(crate) mod s3;
pub(crate) mod tool;
