//! limitador's conditions: the value that a descriptor's entry must or must not have.

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) name: String,
    pub(super) is_equal: bool,
    pub(super) value: String,
}

/// The comparisons of a condition; `None` if it is more than comparisons.
pub(super) fn conditions(text: &str) -> Option<Vec<Condition>> {
    let mut rest = text;
    let mut all = Vec::new();
    loop {
        let (condition, more) = comparison(rest)?;
        all.push(condition);
        if more.is_empty() {
            return Some(all);
        }
        rest = more.strip_prefix("&&")?;
    }
}

/// One comparison, and what follows it.
fn comparison(text: &str) -> Option<(Condition, &str)> {
    let (name, rest) = variable(text.trim_start())?;
    let rest = rest.trim_start();
    let (is_equal, rest) = match rest.strip_prefix("==") {
        Some(rest) => (true, rest),
        None => (false, rest.strip_prefix("!=")?),
    };
    let (value, rest) = literal(rest.trim_start())?;
    Some((Condition { name, is_equal, value }, rest.trim_start()))
}

/// What an expression names: an entry of the first descriptor, or an entry by itself.
pub(super) fn variable(text: &str) -> Option<(String, &str)> {
    if let Some(rest) = text.strip_prefix("descriptors[0]") {
        if let Some(rest) = rest.strip_prefix('.') {
            return word(rest);
        }
        let (name, rest) = literal(rest.strip_prefix('[')?.trim_start())?;
        return Some((name, rest.trim_start().strip_prefix(']')?));
    }
    word(text).filter(|(name, rest)| name != "descriptors" && !rest.starts_with(['[', '(']))
}

fn word(text: &str) -> Option<(String, &str)> {
    let is_part = |letter: char| letter.is_alphanumeric() || ['_', '.', '-'].contains(&letter);
    let (name, rest) = text.split_at(text.find(|letter| !is_part(letter)).unwrap_or(text.len()));
    (!name.is_empty() && !name.starts_with(|letter: char| letter.is_ascii_digit())).then(|| (name.to_owned(), rest))
}

/// A text in quotes. Without escapes: versions don't agree on them.
fn literal(text: &str) -> Option<(String, &str)> {
    let quote = text.chars().next().filter(|letter| ['\'', '"'].contains(letter))?;
    let (value, rest) = text[1..].split_once(quote)?;
    (!value.contains('\\')).then(|| (value.to_owned(), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_of_entries_are_read_and_nothing_else() {
        let one = |name: &str, is_equal, value: &str| Condition { name: name.into(), is_equal, value: value.into() };
        for (text, expected) in [
            ("descriptors[0]['req.method'] == 'GET'", Some(vec![one("req.method", true, "GET")])),
            ("descriptors[0].user_id != \"7\"", Some(vec![one("user_id", false, "7")])),
            ("req.method=='GET'", Some(vec![one("req.method", true, "GET")])),
            (
                "descriptors[0]['a'] == ' b' && descriptors[0][\"c\"] != \"it's\"",
                Some(vec![one("a", true, " b"), one("c", false, "it's")]),
            ),
            ("descriptors[1].a == 'b'", None),
            ("a == b", None),
            ("a == 'b' || c == 'd'", None),
            ("a.startsWith('b')", None),
            ("!(a == 'b')", None),
            ("a == '\\n'", None),
            ("a == 'b", None),
            ("'b' == a", None),
            ("a == 'b' &&", None),
            ("", None),
        ] {
            assert_eq!(conditions(text), expected, "{text}");
        }
    }
}
