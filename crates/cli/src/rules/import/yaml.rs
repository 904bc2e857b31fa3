//! YAML as a tree whose nodes have their lines. Scalars are untyped: the reader of a field decides whether `10` is a
//! number.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, StrInput};

use super::fault::{Fault, expected, fault, quoted};

/// Deeper than any configuration, and far from the end of the stack.
const DEEPEST: usize = 64;

/// The most nodes of a file, including those that aliases repeat.
const MOST: usize = 200_000;

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    /// The last line.
    pub(super) end: usize,
    pub(super) value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Scalar { text: String, quoted: bool },
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key of a mapping and its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) line: usize,
    pub(super) node: Node,
}

impl Node {
    /// The description of this node in a message.
    pub(super) fn described(&self) -> String {
        match &self.value {
            Value::Scalar { .. } if self.is_null() => "nothing".to_owned(),
            Value::Scalar { text, .. } => text.clone(),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        }
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, quoted: false } if ["", "~", "null"].contains(&&**text))
    }

    pub(super) fn entries(&self, what: &str) -> Result<&[Entry], Fault> {
        match &self.value {
            Value::Map(entries) => Ok(entries),
            _ => Err(expected(self.line, what, &self.described())),
        }
    }

    /// The items of a list; none if the value is null.
    pub(super) fn items(&self, what: &str) -> Result<&[Self], Fault> {
        match &self.value {
            Value::List(items) => Ok(items),
            _ if self.is_null() => Ok(&[]),
            _ => Err(expected(self.line, what, &self.described())),
        }
    }

    pub(super) fn text(&self, what: &str) -> Result<&str, Fault> {
        match &self.value {
            Value::Scalar { text, .. } if !self.is_null() => Ok(text),
            _ => Err(expected(self.line, what, &self.described())),
        }
    }

    /// A whole number up to `most`; limits don't use YAML's other notations.
    pub(super) fn number(&self, what: &str, most: u64) -> Result<u64, Fault> {
        let digits = self.text(what)?;
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.parse().ok().filter(|number| plain && *number <= most);
        number.ok_or_else(|| expected(self.line, what, digits))
    }

    pub(super) fn switch(&self, what: &str) -> Result<bool, Fault> {
        match self.text(what)? {
            "true" | "True" | "TRUE" => Ok(true),
            "false" | "False" | "FALSE" => Ok(false),
            other => Err(expected(self.line, what, other)),
        }
    }
}

/// The documents of a file that aren't empty.
pub(super) fn documents(text: &str) -> Result<Vec<Node>, Fault> {
    let mut reader = Reader { events: Parser::new_from_str(text), anchors: HashMap::new(), nodes: 0 };
    let mut documents = Vec::new();
    loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamEnd => return Ok(documents),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            event => {
                let document = reader.node(event, span, 0)?;
                if !document.is_null() {
                    documents.push(document);
                }
            }
        }
    }
}

struct Reader<'t> {
    events: Parser<'t, StrInput<'t>>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

impl<'t> Reader<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Span), Fault> {
        match self.events.next() {
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => Err(expected(error.marker().line().max(1), "YAML", error.info())),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Node, Fault> {
        let line = span.start.line();
        self.grow(line, 1)?;
        if depth > DEEPEST {
            return Err(fault(line, format!("more than {DEEPEST} levels")));
        }
        let (anchor, node) = match event {
            Event::Scalar(text, style, anchor, _) => {
                let quoted = style != ScalarStyle::Plain;
                (anchor, Node { line, end: last_line(span), value: Value::Scalar { text: text.into_owned(), quoted } })
            }
            Event::SequenceStart(anchor, _) => (anchor, self.list(line, depth)?),
            Event::MappingStart(anchor, _) => (anchor, self.map(line, depth)?),
            Event::Alias(anchor) => return self.alias(anchor, line),
            _ => return Err(expected(line, "a value", "the end")),
        };
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, line: usize, depth: usize) -> Result<Node, Fault> {
        let (mut items, mut end) = (Vec::new(), line);
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Node { line, end, value: Value::List(items) }),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
            end = items.last().map_or(end, |item| item.end.max(end));
        }
    }

    fn map(&mut self, line: usize, depth: usize) -> Result<Node, Fault> {
        let (mut entries, mut end) = (Vec::<Entry>::new(), line);
        loop {
            let (event, span) = self.next()?;
            if event == Event::MappingEnd {
                return Ok(Node { line, end, value: Value::Map(entries) });
            }
            let key = self.node(event, span, depth + 1)?;
            let text = key.text("the name of a field")?.to_owned();
            if entries.iter().any(|entry| entry.key == text) {
                return Err(fault(key.line, format!("{} is given twice", quoted(&text))));
            }
            let (event, span) = self.next()?;
            let mut node = self.node(event, span, depth + 1)?;
            if node.is_null() {
                // The parser gives an absent value the line of the next field.
                (node.line, node.end) = (key.line, key.line);
            }
            end = end.max(node.end).max(key.line);
            entries.push(Entry { key: text, line: key.line, node });
        }
    }

    /// What an alias repeats has the line of the alias.
    fn alias(&mut self, anchor: usize, line: usize) -> Result<Node, Fault> {
        let unknown = || fault(line, "no anchor before this alias has its name");
        let mut node = self.anchors.get(&anchor).cloned().ok_or_else(unknown)?;
        self.grow(line, size(&node))?;
        move_to(&mut node, line);
        Ok(node)
    }

    fn grow(&mut self, line: usize, by: usize) -> Result<(), Fault> {
        self.nodes += by;
        if self.nodes > MOST { Err(fault(line, format!("more than {MOST} values"))) } else { Ok(()) }
    }
}

fn last_line(span: Span) -> usize {
    let (start, end) = (span.start.line(), span.end.line());
    // A text in a block ends at the beginning of the line after it.
    if span.end.col() == 0 && end > start { end - 1 } else { end.max(start) }
}

fn size(node: &Node) -> usize {
    match &node.value {
        Value::Scalar { .. } => 1,
        Value::List(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|entry| 1 + size(&entry.node)).sum::<usize>(),
    }
}

fn move_to(node: &mut Node, line: usize) {
    (node.line, node.end) = (line, line);
    match &mut node.value {
        Value::Scalar { .. } => {}
        Value::List(items) => items.iter_mut().for_each(|item| move_to(item, line)),
        Value::Map(entries) => entries.iter_mut().for_each(|entry| {
            entry.line = line;
            move_to(&mut entry.node, line);
        }),
    }
}
