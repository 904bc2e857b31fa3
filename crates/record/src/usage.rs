//! What processes count for the database: written in batches, each once.

pub(crate) mod totals;
pub(crate) mod writers;
