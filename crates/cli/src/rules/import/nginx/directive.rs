//! nginx's configuration as directives within directives, each with its line.

use super::super::fault::{Fault, expected, fault};

/// Deeper than any configuration, and far from the end of the stack.
const DEEPEST: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Directive {
    pub(super) name: String,
    pub(super) arguments: Vec<String>,
    pub(super) line: usize,
    /// The line where it ends: with `;` or `}`.
    pub(super) end: usize,
    pub(super) block: Option<Vec<Directive>>,
}

impl Directive {
    pub(super) fn within(&self) -> &[Self] {
        self.block.as_deref().unwrap_or_default()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    End,
    Open,
    Close,
}

impl Token {
    fn shown(&self) -> &str {
        match self {
            Self::Word(word) => word,
            Self::End => ";",
            Self::Open => "{",
            Self::Close => "}",
        }
    }
}

pub(super) fn directives(text: &str) -> Result<Vec<Directive>, Fault> {
    let mut tokens = Tokens { text: text.chars().peekable(), line: 1 };
    block(&mut tokens, None, 0)
}

/// The directives up to the end of the block that opened at this line, or of the file.
fn block(tokens: &mut Tokens<'_>, opened: Option<usize>, depth: usize) -> Result<Vec<Directive>, Fault> {
    if depth > DEEPEST {
        return Err(fault(tokens.line, format!("more than {DEEPEST} levels")));
    }
    let mut all = Vec::new();
    loop {
        match (tokens.next()?, opened) {
            (Some((_, Token::Close)), Some(_)) | (None, None) => return Ok(all),
            (Some((line, Token::Word(name))), _) => all.push(directive(tokens, name, line, depth)?),
            (Some((line, other)), _) => return Err(expected(line, "a directive", other.shown())),
            (None, Some(line)) => return Err(expected(line, "a } that closes this block", "the end of the file")),
        }
    }
}

fn directive(tokens: &mut Tokens<'_>, name: String, line: usize, depth: usize) -> Result<Directive, Fault> {
    let mut arguments = Vec::new();
    loop {
        match tokens.next()? {
            Some((_, Token::Word(word))) => arguments.push(word),
            Some((end, Token::End)) => return Ok(Directive { name, arguments, line, end, block: None }),
            Some((_, Token::Open)) => {
                let block = Some(block(tokens, Some(line), depth + 1)?);
                return Ok(Directive { name, arguments, line, end: tokens.line, block });
            }
            Some((at, Token::Close)) => return Err(expected(at, &format!("; after {name}"), "}")),
            None => return Err(expected(line, &format!("; after {name}"), "the end of the file")),
        }
    }
}

struct Tokens<'t> {
    text: std::iter::Peekable<std::str::Chars<'t>>,
    line: usize,
}

impl Tokens<'_> {
    /// The next token with its line.
    fn next(&mut self) -> Result<Option<(usize, Token)>, Fault> {
        while let Some(letter) = self.text.peek().copied() {
            match letter {
                '#' => while self.text.next_if(|letter| *letter != '\n').is_some() {},
                _ if letter.is_whitespace() => _ = self.advance(),
                _ => break,
            }
        }
        let line = self.line;
        let token = match self.text.peek() {
            None => return Ok(None),
            Some(';') => Token::End,
            Some('{') => Token::Open,
            Some('}') => Token::Close,
            Some('"' | '\'') => return Ok(Some((line, Token::Word(self.quoted()?)))),
            Some(_) => return Ok(Some((line, Token::Word(self.word())))),
        };
        self.advance();
        Ok(Some((line, token)))
    }

    fn advance(&mut self) -> Option<char> {
        let letter = self.text.next();
        self.line += usize::from(letter == Some('\n'));
        letter
    }

    fn quoted(&mut self) -> Result<String, Fault> {
        let (line, quote) = (self.line, self.advance());
        let mut word = String::new();
        loop {
            match self.advance() {
                None => return Err(expected(line, "a quote that closes this text", "the end of the file")),
                letter if letter == quote => return Ok(word),
                Some('\\') => self.escaped(&mut word),
                Some(letter) => word.push(letter),
            }
        }
    }

    fn word(&mut self) -> String {
        let mut word = String::new();
        while let Some(letter) = self.text.peek().copied() {
            match letter {
                // The brace of a variable, as in ${name}, doesn't begin a block.
                '{' if word.ends_with('$') => {}
                '}' if word.rfind("${").is_some_and(|start| !word[start..].contains('}')) => {}
                ';' | '{' | '}' => break,
                _ if letter.is_whitespace() => break,
                _ => {}
            }
            self.advance();
            if letter == '\\' { self.escaped(&mut word) } else { word.push(letter) }
        }
        word
    }

    /// What follows a backslash: a quote or a backslash alone, anything else with the backslash, as in a regular
    /// expression.
    fn escaped(&mut self, word: &mut String) {
        match self.advance() {
            Some(letter @ ('"' | '\'' | '\\')) => word.push(letter),
            Some(letter) => word.extend(['\\', letter]),
            None => word.push('\\'),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_have_their_lines_and_words() {
        let text = "a b 'c d' \"e\\\"f\"; # g;\nh {\n  i ${j}k\n l;\n  m ~ ^/\\d{3}$;\n}\n";
        let all = directives(text);
        assert!(all.is_err(), "a brace of a regular expression is quoted in nginx");
        let all = directives(&text.replace("^/\\d{3}$", "\"^/\\d{3}$\"")).expect("directives");
        assert_eq!((&*all[0].arguments, all[0].line), (&["b".into(), "c d".into(), "e\"f".into()][..], 1));
        assert_eq!((all[1].line, all[1].end), (2, 6));
        let within = all[1].within();
        assert_eq!((&*within[0].arguments, within[0].end), (&["${j}k".into(), "l".into()][..], 4));
        assert_eq!(within[1].arguments[1], "^/\\d{3}$");
    }

    #[test]
    fn what_does_not_end_is_an_error_with_the_line_where_it_began() {
        for (text, line, what) in [
            ("a;\nb {\n c;\n", 2, "expected a } that closes this block, got the end of the file"),
            ("a;\nb", 2, "expected ; after b, got the end of the file"),
            ("a;\nb }", 2, "expected ; after b, got }"),
            ("a;\n}", 2, "expected a directive, got }"),
            ("a;\n;", 2, "expected a directive, got ;"),
            ("a\n'b", 2, "expected a quote that closes this text, got the end of the file"),
        ] {
            let fault = directives(text).expect_err(text);
            assert_eq!((fault.line, &*fault.what), (line, what), "{text}");
        }
    }
}
