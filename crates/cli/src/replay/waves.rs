//! Which of several calls can be made at once, so that those of one key are still decided in order.

use std::collections::HashMap;

/// The wave in which each call is made, given the keys that each uses: the first in which no earlier call uses any of
/// them. Calls of one wave share no key.
pub(super) fn waves(keys: impl Iterator<Item = impl IntoIterator<Item = String>>) -> Vec<usize> {
    let mut next_of: HashMap<String, usize> = HashMap::new();
    let of_call = |keys: Vec<String>| {
        let wave = keys.iter().filter_map(|key| next_of.get(key)).max().copied().unwrap_or(0);
        next_of.extend(keys.into_iter().map(|key| (key, wave + 1)));
        wave
    };
    keys.map(|keys| keys.into_iter().collect()).map(of_call).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(keys: &[&[&str]]) -> Vec<usize> {
        waves(keys.iter().map(|keys| keys.iter().map(|key| (*key).to_owned())))
    }

    #[test]
    fn a_call_comes_after_all_earlier_ones_of_its_keys() {
        assert_eq!(of(&[&["a"], &["b"], &["c"]]), [0, 0, 0]);
        assert_eq!(of(&[&["a"], &["b"], &["a"], &["a"], &["b"]]), [0, 0, 1, 2, 1]);
        // One key that all share, and one that only some share.
        assert_eq!(of(&[&["a", "all"], &["b", "all"], &["a", "all"]]), [0, 1, 2]);
        assert_eq!(of(&[&["a", "x"], &["b"], &["b", "x"], &["a"], &["b"]]), [0, 0, 1, 1, 2]);
        assert_eq!(of(&[&[], &["a"], &[]]), [0, 0, 0]);
    }
}
