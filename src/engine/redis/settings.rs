//! How servers are reached and asked, whatever their addresses.

use std::sync::Arc;

use super::confirm::Confirm;
use super::connect::{Connect, Tcp};
use super::credentials::Asked;
#[cfg(feature = "tls")]
use super::tls::Tls;

/// What a builder sets for one server or for all of a cluster.
#[derive(Clone)]
pub(in crate::engine) struct Settings {
    pub(in crate::engine) connector: Arc<dyn Connect>,
    pub(in crate::engine) credentials: Asked,
    /// The replicas that must have what a call took.
    pub(in crate::engine) confirm: Option<Confirm>,
    /// None where addresses say all there is.
    #[cfg(feature = "tls")]
    pub(in crate::engine) tls: Option<Tls>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            connector: Arc::new(Tcp),
            credentials: Asked::default(),
            confirm: None,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}
