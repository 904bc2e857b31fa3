//! What is in the tables of the configuration, read and written: rules, users and API keys.

pub(crate) mod input;
pub(crate) mod key_text;
pub(crate) mod keys;
pub(crate) mod rules;
pub(crate) mod users;
pub(crate) mod users_in_force;
