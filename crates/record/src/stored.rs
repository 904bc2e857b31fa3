//! Reads and writes the tables of the configuration: rules, users and API keys.

pub(crate) mod input;
pub(crate) mod key_text;
pub(crate) mod keys;
pub(crate) mod rules;
pub(crate) mod users;
pub(crate) mod users_in_force;
