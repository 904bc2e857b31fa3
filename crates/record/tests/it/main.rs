//! One binary for all tests of the system of record that need a PostgreSQL. A missing server is a failure, never a
//! skip.

mod api_keys;
mod clocks;
mod configuration_cache;
mod encrypted_connections;
mod following_rules;
mod forged_entries;
mod grants;
mod history;
mod history_at_scale;
mod history_interrupted;
mod indexes;
mod known_keys;
mod locks;
mod one_bad_row;
mod pages;
mod prepared_schemas;
mod rules;
mod schema;
mod search_path;
mod silent_server;
mod starts_without_database;
mod usage_totals;
mod users;
mod users_at_scale;
mod writers;
