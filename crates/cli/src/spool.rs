//! Requests between the passes over them: in memory while they are few, then in a temporary file, which the system
//! removes when the process ends.

use std::env;
use std::fmt;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::marker::PhantomData;

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::SpooledTempFile;

use crate::by_time::{At, Horizon, Sorted};

/// How much stays in memory, in bytes.
const IN_MEMORY: usize = 32 << 20;
const BUFFER: usize = 1 << 18;

/// A request packed into `BYTES` bytes.
pub(crate) trait Packed<const BYTES: usize>: At {
    fn pack(&self) -> [u8; BYTES];
    fn unpack(bytes: &[u8; BYTES]) -> Self;
}

/// Requests in some order.
pub(crate) struct Spool<T, const BYTES: usize> {
    file: BufWriter<SpooledTempFile>,
    of: PhantomData<T>,
}

impl<T: Packed<BYTES>, const BYTES: usize> Spool<T, BYTES> {
    pub(crate) fn new() -> Self {
        Self { file: BufWriter::with_capacity(BUFFER, SpooledTempFile::new(IN_MEMORY)), of: PhantomData }
    }

    pub(crate) fn push(&mut self, request: &T) -> Result<()> {
        self.file.write_all(&request.pack()).with_context(told)
    }

    /// All requests, in order.
    pub(crate) fn requests(&mut self) -> Result<Requests<&mut SpooledTempFile, T, BYTES>> {
        self.file.flush().with_context(told)?;
        Requests::of(self.file.get_mut())
    }

    /// All requests, in order; consumes the spool.
    pub(crate) fn into_requests(self) -> Result<Requests<SpooledTempFile, T, BYTES>> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error);
        Requests::of(file.with_context(told)?)
    }
}

impl<T: Packed<BYTES> + Serialize + DeserializeOwned, const BYTES: usize> Spool<T, BYTES> {
    /// The requests sorted by time; requests of the same time keep their order.
    pub(crate) fn by_time(mut self, horizon: Horizon) -> Result<Self> {
        let mut sorted = Self::new();
        for request in Sorted::new(horizon, self.requests()?) {
            sorted.push(&request?)?;
        }
        Ok(sorted)
    }
}

impl<T, const BYTES: usize> fmt::Debug for Spool<T, BYTES> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spool").finish_non_exhaustive()
    }
}

pub(crate) struct Requests<R: Read, T, const BYTES: usize> {
    file: BufReader<R>,
    of: PhantomData<T>,
}

impl<R: Read + Seek, T: Packed<BYTES>, const BYTES: usize> Requests<R, T, BYTES> {
    fn of(mut file: R) -> Result<Self> {
        file.rewind().with_context(told)?;
        Ok(Self { file: BufReader::with_capacity(BUFFER, file), of: PhantomData })
    }
}

impl<R: Read, T: Packed<BYTES>, const BYTES: usize> Iterator for Requests<R, T, BYTES> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        let mut bytes = [0; BYTES];
        match self.file.read_exact(&mut bytes) {
            Ok(()) => Some(Ok(T::unpack(&bytes))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => Some(Err(error).with_context(told)),
        }
    }
}

fn told() -> String {
    format!("a temporary file in {}", env::temp_dir().display())
}
