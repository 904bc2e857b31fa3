//! What the tool needs to know of an operation.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use tollgate::{Decision, Error, Limiter, OnChange, Operation, Request, Rule};

use crate::escape::one_of;
use crate::records::field::quoted;

/// The operation with this name.
pub(crate) fn named(name: &str) -> Result<Operation, String> {
    name.parse().map_err(|_| {
        let names: Vec<_> = Operation::ALL.iter().map(|operation| operation.name()).collect();
        format!("expected {}, got {}", one_of(&names), quoted(name.as_bytes()))
    })
}

/// Any operation, as an option's value.
pub(crate) fn any() -> impl TypedValueParser<Value = Operation> {
    PossibleValuesParser::new(Operation::ALL.iter().map(|operation| operation.name())).try_map(|name| named(&name))
}

/// What may happen to a key's state when its rule has changed, as an option's values.
pub(crate) fn change() -> impl TypedValueParser<Value = OnChange> {
    PossibleValuesParser::new(["keep-used", "as-is", "reset"]).try_map(|name| name.parse::<OnChange>())
}

/// Checks that the operation has what it needs and no more; the error is one short line.
pub(crate) fn check(operation: Operation, has_id: bool, has_length: bool) -> Result<(), String> {
    use Operation::{Block, Cancel, Release, Renew, Settle};
    let of_an_id = matches!(operation, Renew | Release | Settle | Cancel);
    match operation {
        _ if of_an_id && !has_id => Err(format!("id: it is missing: {operation} needs the id of an earlier call")),
        Block if !has_length => {
            Err("for: it is missing: block needs a duration such as 10m (0s lifts the block)".into())
        }
        Block => Ok(()),
        _ if has_length => Err(format!("for: only block takes it, and this is {operation}")),
        _ => Ok(()),
    }
}

/// Whether it takes from a limit; permits are then held by an id.
pub(crate) fn takes(operation: Operation) -> bool {
    matches!(operation, Operation::Acquire | Operation::AtMost | Operation::Penalty)
}

/// Whether it can be denied.
pub(crate) fn asks(operation: Operation) -> bool {
    matches!(operation, Operation::Acquire | Operation::Peek | Operation::Reserve | Operation::AtMost)
}

/// Whether it uses a cost.
pub(crate) fn costs(operation: Operation) -> bool {
    use Operation::{Block, Cancel, Release, Renew, Reset};
    !matches!(operation, Block | Renew | Release | Cancel | Reset)
}

/// Makes the call; `length` is that of a block.
pub(crate) async fn call(
    limiter: &Limiter,
    rule: &Rule,
    operation: Operation,
    request: Request<'_>,
    length: Option<Duration>,
) -> Result<Decision, Error> {
    limiter.call(operation, rule, request.block_for(length.unwrap_or_default())).await
}
