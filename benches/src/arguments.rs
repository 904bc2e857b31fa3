//! The arguments of an acquire, according to a script's header.

use tollgate::Script;

/// ARGV of an acquire in server time: packed if the script's header has a packed form, else as text.
pub fn acquire(script: &Script, numbers: &[i64], cost: u64) -> Vec<Vec<u8>> {
    match packing(script) {
        Some((layout, widths)) => {
            let bytes = |(number, width): (&i64, usize)| number.to_le_bytes().into_iter().take(width);
            let cost = [cost as i64];
            let numbers = numbers.iter().chain(&cost);
            vec![std::iter::once(layout).chain(numbers.zip(widths).flat_map(bytes)).collect()]
        }
        None => {
            let numbers = numbers.iter().map(i64::to_string);
            numbers.chain([cost.to_string(), "acquire".into(), "-1".into()]).map(String::into_bytes).collect()
        }
    }
}

/// Whether the script decides several keys in one call.
pub fn is_packed(script: &Script) -> bool {
    packing(script).is_some()
}

/// The layout and the width in bytes of each number, from a line such as `packed: BI7I7I7I3I7I7: the layout (2), these,
/// cost`.
fn packing(script: &Script) -> Option<(u8, Vec<usize>)> {
    let (_, line) = script.text().split_once("--   packed: B")?;
    let (widths, line) = line.split_once(": the layout (")?;
    let (layout, _) = line.split_once(')')?;
    let widths = widths.split(['I', 'i']).skip(1).map(|width| width.parse().ok());
    Some((layout.parse().ok()?, widths.collect::<Option<_>>()?))
}
