//! ARGV of scripts, packed as tollgate sends them.

use tollgate::Script;

/// Operations and options, by their numbers in `lua/decide.lua`.
pub const ACQUIRE: u8 = 128;
pub const RESERVE: u8 = 129;
pub const AT_MOST: u8 = 130;
pub const PEEK: u8 = 131;
pub const REFUND: u8 = 133;
pub const PENALTY: u8 = 134;
pub const SETTLE: u8 = 136;
pub const RELEASE: u8 = 139;
pub const WITH_ID: u8 = 32;
pub const LONG: u8 = 128;

/// An acquire in server time.
#[must_use]
pub fn acquire(script: &Script, numbers: &[i64], cost: u64) -> Vec<Vec<u8>> {
    vec![shape(script, &[numbers], [ACQUIRE, 0], cost, &[])]
}

/// An acquire of one permit.
#[must_use]
pub fn acquire_permit(script: &Script, numbers: &[i64], holder: String) -> Vec<Vec<u8>> {
    of_permit(script, numbers, ACQUIRE, holder)
}

/// The same of another operation.
#[must_use]
pub fn of_permit(script: &Script, numbers: &[i64], operation: u8, holder: String) -> Vec<Vec<u8>> {
    let shape = shape(script, &[numbers], [operation, 0], 1, &[]);
    [listed(shape, 1, 1), vec![holder.into_bytes()]].concat()
}

/// Calls of this shape, each of which takes a unit of so many limits: listed, since they share a key, or have holders.
#[must_use]
pub fn listed(shape: Vec<u8>, calls: usize, limits: usize) -> Vec<Vec<u8>> {
    let (once, one_unit) = (vec![1, 0, 0], [1, 0, 0, 0, 0, 0, 0].repeat(limits));
    vec![shape, b"-1".to_vec(), [once, one_unit].concat().repeat(calls)]
}

/// The shape of calls: the numbers of each limit, the operation and its options, and the values of those that have one.
///
/// # Panics
/// If the script's header doesn't say how numbers are packed.
#[must_use]
pub fn shape(script: &Script, limits: &[&[i64]], asked: [u8; 2], cost: u64, values: &[u64]) -> Vec<u8> {
    let (algorithm, widths) = packing(script).expect("a header that says how numbers are packed");
    let mut shape = Vec::new();
    for numbers in limits {
        shape.push(algorithm);
        let bytes = |(number, width): (&i64, &usize)| number.to_le_bytes().into_iter().take(*width);
        shape.extend(numbers.iter().zip(&widths).flat_map(bytes));
    }
    shape.extend(asked);
    shape.extend([cost].iter().chain(values).flat_map(|value| value.to_le_bytes().into_iter().take(7)));
    shape
}

/// The algorithm's number and the width in bytes of each of a limit's, from a line such as
/// `packed: BI7I7I7I3I7: 1, these`.
fn packing(script: &Script) -> Option<(u8, Vec<usize>)> {
    let (_, line) = script.text().split_once("--   packed: B")?;
    let (widths, line) = line.split_once(": ")?;
    let (algorithm, _) = line.split_once(',')?;
    let widths = widths.split(['I', 'i']).skip(1).map(|width| width.parse().ok());
    Some((algorithm.parse().ok()?, widths.collect::<Option<_>>()?))
}
