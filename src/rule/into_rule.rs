//! What a rule can be made of.

use super::Rule;
use crate::error::RuleError;
use crate::limit::Limit;

/// What [`Rule::new`] takes: text, a [`Limit`], or a rule, which is renamed and keeps its settings.
#[diagnostic::on_unimplemented(
    message = "a rule can't be made of `{Self}`",
    label = "expected text such as \"token-bucket 10/1s\", a `Limit` or a `Rule`"
)]
pub trait IntoRule: sealed::Sealed {}

pub(super) mod sealed {
    use super::{Rule, RuleError};

    pub trait Sealed {
        fn into_rule(self) -> Result<Rule, RuleError>;
    }
}

impl<T: AsRef<str>> IntoRule for T {}

impl<T: AsRef<str>> sealed::Sealed for T {
    fn into_rule(self) -> Result<Rule, RuleError> {
        self.as_ref().parse()
    }
}

impl IntoRule for Limit {}

impl sealed::Sealed for Limit {
    fn into_rule(self) -> Result<Rule, RuleError> {
        Ok(Rule::unnamed(self))
    }
}

impl IntoRule for Rule {}

impl sealed::Sealed for Rule {
    fn into_rule(self) -> Result<Rule, RuleError> {
        Ok(self)
    }
}
