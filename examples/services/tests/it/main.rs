//! The example services against servers of their own. A missing server is a failure, never a skip.

mod behind_nginx;
mod database;
mod example_service;
mod examples;
mod migration;
mod monitoring;
mod pages;
