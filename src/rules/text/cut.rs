//! A file's text, cut where its rules begin.

use std::ops::Range;

use toml_parser::lexer::TokenKind;

pub(super) struct Cut {
    /// Everything but the rules.
    pub(super) settings: String,
    /// Each from its `[[rule]]` to the next.
    pub(super) rules: Vec<Range<usize>>,
}

/// What a header in brackets begins.
enum Header {
    Rule,
    /// A table of the rule before it, such as `[rule.match]`.
    InRule,
    Setting,
    /// What isn't plain: only the whole file shows what it is.
    Other,
}

impl Cut {
    /// None if rules are written otherwise than one `[[rule]]` after the other, or not at all. A file that isn't TOML
    /// may be cut anywhere: then a piece isn't TOML either.
    pub(super) fn of(text: &str) -> Option<Self> {
        let (mut depth, mut line_begins, mut piece, mut in_rule) = (0_u32, true, 0, false);
        let mut cut = Self { settings: String::new(), rules: Vec::new() };
        for token in toml_parser::Source::new(text).lex() {
            let (kind, at) = (token.kind(), token.span().start());
            if line_begins && depth == 0 && kind == TokenKind::LeftSquareBracket {
                let header = Header::of(&text[at..]);
                match header {
                    Header::InRule if in_rule => {}
                    Header::InRule | Header::Other => return None,
                    Header::Rule | Header::Setting => {
                        cut.add(text, piece..at, in_rule);
                        (piece, in_rule) = (at, matches!(header, Header::Rule));
                    }
                }
            }
            match kind {
                TokenKind::LeftSquareBracket | TokenKind::LeftCurlyBracket => depth += 1,
                TokenKind::RightSquareBracket | TokenKind::RightCurlyBracket => depth = depth.saturating_sub(1),
                _ => {}
            }
            line_begins = kind == TokenKind::Newline || (line_begins && kind == TokenKind::Whitespace);
        }
        cut.add(text, piece..text.len(), in_rule);
        cut.rules.shrink_to_fit();
        (!cut.rules.is_empty()).then_some(cut)
    }

    fn add(&mut self, text: &str, piece: Range<usize>, is_rule: bool) {
        if is_rule {
            self.rules.push(piece);
        } else {
            self.settings.push_str(&text[piece]);
        }
    }
}

impl Header {
    /// Of the text that begins with it.
    fn of(text: &str) -> Self {
        let blank = [' ', '\t'];
        let is_list = text.starts_with("[[");
        let name = text.trim_start_matches('[').trim_start_matches(blank);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        let (name, rest) = name.split_at(name.bytes().position(|byte| !plain(byte)).unwrap_or(name.len()));
        match (name, rest.trim_start_matches(blank)) {
            ("", _) => Self::Other,
            ("rule", rest) if is_list && rest.starts_with("]]") => Self::Rule,
            ("rule", rest) if rest.starts_with('.') => Self::InRule,
            ("rule", _) => Self::Other,
            _ => Self::Setting,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::Source;

    /// Parts of files, whole and torn.
    const PARTS: [&str; 16] = [
        "ignore_case = true\n",
        "rule = []\n",
        "[defaults]\nstatus = 420\n",
        "[defaults]\n",
        "[variables]\nv = \"gcra 1/1s\"\n",
        "[[rule]]\nname = \"a\"\n",
        " [[ rule\t]] # the second\nname = \"b\"\nmessage = \"\"\"\n[[rule]]\n\"\"\"\n",
        "[[rule]]\nname = 'c'\nblock = [\n[\"x\"],\n# ]\n]\n",
        "[[rule]]\nname = 'd'\nallow = [\n'[[rule]]',\n]\nmatch = { x = '''\n[[rule]]''' }\n",
        "[rule.match]\ntier = \"free\"\n",
        "[[\"rule\"]]\nname = \"e\"\n",
        "[rule]\nname = \"f\"\n",
        "[[rules]]\nname = \"g\"\n",
        "key = \"user\" # [[rule]]\r\n",
        "priority = 1979-05-27\n",
        "tag = [\n",
    ];

    #[test]
    fn one_rule_after_the_other_is_what_the_whole_is() {
        let read = |text: &str| {
            let source = Source::new(PathBuf::from("rules"), text.to_owned());
            let Some(by_rule) = source.read_by_rule() else { return false };
            let whole = source.read_whole().unwrap_or_else(|fault| panic!("{fault}\n{text}"));
            assert_eq!((by_rule.rules, by_rule.settings), (whole.rules, whole.settings), "{text}");
            assert!(whole.faults.is_empty(), "{:?}\n{text}", whole.faults);
            true
        };
        let mut by_rule = 0;
        for first in PARTS {
            for second in PARTS {
                for third in PARTS {
                    by_rule += u32::from(read(&[first, second, third].concat()));
                    by_rule += u32::from(read(&[first, "[[rule]]\nname = \"h\"\n", second, third].concat()));
                }
            }
        }
        assert!(by_rule > 200, "{by_rule}");
    }
}
