//! A call as its caller makes it.

use crate::operation::Operation;
use crate::request::Request;
use crate::rule::Rule;

/// What is asked for, by which rule, for which request.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) rule: &'a Rule,
    pub(crate) request: &'a Request<'a>,
    pub(crate) operation: Operation,
}

impl<'a> Call<'a> {
    pub(crate) fn acquire(rule: &'a Rule, request: &'a Request<'a>) -> Self {
        Self { rule, request, operation: Operation::Acquire }
    }
}
