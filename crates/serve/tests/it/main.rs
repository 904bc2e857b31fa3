//! The service as its clients see it, on a real Redis.
#![allow(missing_docs)]
