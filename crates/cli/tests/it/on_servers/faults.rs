//! Faults of the servers that the tool asks.

mod tool;
