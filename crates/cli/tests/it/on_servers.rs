//! Commands whose results depend on the server, its version and its build: `tests/servers.sh` runs these on each
//! supported server.

mod chaos;
mod cluster_and_sentinels;
mod contention;
mod doctor;
mod faults;
mod script_files;
mod shards;
#[cfg(feature = "tls")]
mod tls;
mod watch;
