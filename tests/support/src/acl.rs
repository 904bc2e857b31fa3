//! The rights of Redis users, as `src/operations.md` documents them.

const OPERATIONS: &str = include_str!("../../../src/operations.md");

/// What the smallest user is allowed, as documented.
pub fn least() -> Vec<&'static str> {
    rights_of("limiter")
}

/// What this user is allowed, as documented.
pub fn rights_of(user: &str) -> Vec<&'static str> {
    let command = format!("ACL SETUSER {user} reset on '>PASSWORD' ");
    let (_, rest) = OPERATIONS.split_once(&command).expect("the user");
    let (line, _) = rest.split_once("```").expect("the end of its line");
    line.split_whitespace().filter(|word| *word != "\\").map(|word| word.trim_matches('\'')).collect()
}

/// What the documentation adds for some purpose, with the right that it names first.
pub fn more(first: &'static str) -> Vec<&'static str> {
    let (_, rest) = OPERATIONS.split_once(&format!("| `{first}")).expect("a row");
    let (others, _) = rest.split_once('`').expect("the end of the rights");
    [first].into_iter().chain(others.split_whitespace()).collect()
}
