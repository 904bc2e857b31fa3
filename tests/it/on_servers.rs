//! What depends on the server, its version and its build: `tests/servers.sh` runs these on each supported server. The
//! other tests would find nothing new there.

mod across_slots;
mod across_slots_rights;
mod batching;
mod block_for;
mod calendar_windows;
mod cluster_and_sentinels;
mod combined_limits;
mod concurrent_operations;
mod connections;
mod contention;
mod corrupted_state;
mod crowds;
mod differential;
mod faults;
mod half_way;
mod key_spelling;
mod late_refunds;
mod laws;
mod layouts;
mod operations;
mod own_costs;
mod packed;
mod permissions;
mod permits;
mod redis_engine;
mod request_ids;
mod reserve_within;
mod script_cache;
mod script_calls;
mod script_files;
mod several_calls;
mod several_slots;
mod shards;
mod tls;
mod vectors;
