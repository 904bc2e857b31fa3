//! Where rules come from, and where decisions go: what a service implements to keep either in a place of its own.

use std::sync::Arc;
use std::time::Duration;

use super::{Account, Attributes, RuleSet, Verdict, WatchedRules};

/// Where a service's rules come from. [`RateLimitLayer`](crate::middleware::RateLimitLayer) (feature `http`) asks it
/// for each request.
///
/// A [`RuleSet`] is a source that never changes, [`WatchedRules`] follows its file, and `Configuration` of the crate
/// `tollgate-record` a PostgreSQL. For rules in MySQL, etcd or another service, keep a [`RuleSet`] that some task
/// replaces:
///
/// ```
/// use std::sync::{Arc, Mutex, PoisonError};
///
/// use tollgate::rules::{RuleSet, RuleSetError, RuleSource};
///
/// /// The rules under one key of etcd.
/// #[derive(Clone, Default)]
/// struct EtcdRules {
///     current: Arc<Mutex<RuleSet>>,
/// }
///
/// impl EtcdRules {
///     /// Called with each new value of the key. Rules that can't be used change nothing.
///     fn changed(&self, value: &str) -> Result<(), RuleSetError> {
///         let rules: RuleSet = value.parse()?;
///         *self.current.lock().unwrap_or_else(PoisonError::into_inner) = rules;
///         Ok(())
///     }
/// }
///
/// impl RuleSource for EtcdRules {
///     fn rules(&self) -> RuleSet {
///         self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
///     }
/// }
///
/// let source = EtcdRules::default();
/// source.changed("[[rule]]\nname = \"api\"\nkey = \"user\"\nlimits = [\"token-bucket 10/1s\"]")?;
/// assert_eq!(source.rules().len(), 1);
/// # Ok::<(), RuleSetError>(())
/// ```
pub trait RuleSource: Send + Sync + 'static {
    /// The rules in force: a clone, which is cheap. Called for each request, so it must not wait.
    fn rules(&self) -> RuleSet;

    /// Whether [`account_of_user`](Self::account_of_user) may know any user. Default: it doesn't.
    fn knows_users(&self) -> bool {
        false
    }

    /// What is known of this user beside the request: a tier, limits or a block of their own. Called for each request,
    /// so it must not wait. Default: nothing.
    fn account_of_user(&self, user: &str) -> Option<Account> {
        let _ = user;
        None
    }

    /// Where every decision by these rules goes, if the source keeps account of them, for example to count its users'
    /// requests. Default: nowhere.
    fn sink(&self) -> Option<&dyn DecisionSink> {
        None
    }
}

/// Where decisions go: an audit log, a count of what each customer uses.
/// [`RateLimitLayer::record`](crate::middleware::RateLimitLayer::record) (feature `http`) hands it each decision.
///
/// `History` of the crate `tollgate-record` is one, on PostgreSQL. One of your own:
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Arc, Mutex, PoisonError};
/// use std::time::Duration;
///
/// use tollgate::rules::{Attributes, DecisionSink, OnResponse, Verdict};
///
/// /// Denials by rule.
/// #[derive(Clone, Default)]
/// struct Denials(Arc<Mutex<HashMap<String, u64>>>);
///
/// impl DecisionSink for Denials {
///     fn decided(&self, _: &Attributes<'_>, verdict: &Verdict, _: Duration) -> Option<Box<dyn OnResponse>> {
///         if !verdict.allowed {
///             let rule = verdict.rule.as_deref().unwrap_or_default().to_owned();
///             *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(rule).or_default() += 1;
///         }
///         None
///     }
/// }
/// ```
pub trait DecisionSink: Send + Sync + 'static {
    /// Takes the decision on a request, and how long it took. It is on the request's path, so it must not wait: queue
    /// what takes time. What it returns is called with the response's status; it is dropped without a call if the
    /// client left before there was a response.
    fn decided(&self, request: &Attributes<'_>, verdict: &Verdict, latency: Duration) -> Option<Box<dyn OnResponse>>;
}

/// What becomes of a decision once its response is known: see [`DecisionSink::decided`].
pub trait OnResponse: Send {
    /// The response has this HTTP status.
    fn responded(self: Box<Self>, status: u16);
}

impl RuleSource for RuleSet {
    fn rules(&self) -> RuleSet {
        self.clone()
    }
}

impl RuleSource for WatchedRules {
    fn rules(&self) -> RuleSet {
        self.current()
    }
}

impl<S: RuleSource + ?Sized> RuleSource for Arc<S> {
    fn rules(&self) -> RuleSet {
        (**self).rules()
    }

    fn knows_users(&self) -> bool {
        (**self).knows_users()
    }

    fn account_of_user(&self, user: &str) -> Option<Account> {
        (**self).account_of_user(user)
    }

    fn sink(&self) -> Option<&dyn DecisionSink> {
        (**self).sink()
    }
}

impl<S: DecisionSink + ?Sized> DecisionSink for Arc<S> {
    fn decided(&self, request: &Attributes<'_>, verdict: &Verdict, latency: Duration) -> Option<Box<dyn OnResponse>> {
        (**self).decided(request, verdict, latency)
    }
}
