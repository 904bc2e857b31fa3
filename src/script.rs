//! A script, its digest, and how it is called.

use std::sync::OnceLock;

/// The text of one algorithm, as it stands in `lua/`.
#[derive(Debug)]
pub struct Script {
    name: &'static str,
    text: &'static str,
    digest: OnceLock<String>,
}

/// What a script is asked to do. Each is the text of its `mode` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Acquire,
    Peek,
    Reset,
    Inspect,
}

/// One run of a script: all that an engine needs to know.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) script: &'static Script,
    pub(crate) key: &'a [u8],
    /// The script's own arguments, as decimal text.
    pub(crate) arguments: &'a [String],
    /// An argument that depends on the key: its index, and its value.
    pub(crate) replaced: Option<(usize, u64)>,
    pub(crate) cost: u64,
    pub(crate) mode: Mode,
    /// Microseconds since the epoch; the server's time if none.
    pub(crate) now_us: Option<u64>,
}

/// A script's answer: the five integers of every reply, and what some modes append.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) decision: [i64; 5],
    pub(crate) appended: Vec<i64>,
}

impl Script {
    pub(crate) const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text, digest: OnceLock::new() }
    }

    /// The file's name in `lua/`, without its ending.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The text that is sent and hashed.
    #[must_use]
    pub fn text(&self) -> &'static str {
        self.text
    }

    /// The SHA-1 digest that EVALSHA calls it by, in hexadecimal; computed once.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| sha1_smol::Sha1::from(self.text).digest().to_string())
    }
}

impl Mode {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Peek => "peek",
            Self::Reset => "reset",
            Self::Inspect => "inspect",
        }
    }

    /// Whether it may run where writes are refused.
    pub(crate) fn reads_only(self) -> bool {
        matches!(self, Self::Peek | Self::Inspect)
    }
}

impl Call<'_> {
    /// Hands over ARGV in order: the script's own arguments, then cost, mode and now.
    pub(crate) fn each_argument(&self, mut give: impl FnMut(&[u8])) {
        for (index, argument) in self.arguments.iter().enumerate() {
            match self.replaced {
                Some((at, value)) if at == index => give(value.to_string().as_bytes()),
                _ => give(argument.as_bytes()),
            }
        }
        give(self.cost.to_string().as_bytes());
        give(self.mode.text().as_bytes());
        match self.now_us {
            Some(now_us) => give(now_us.to_string().as_bytes()),
            None => give(b"-1"),
        }
    }

    /// How many arguments `each_argument` hands over.
    pub(crate) fn argument_count(&self) -> usize {
        self.arguments.len() + 3
    }
}

impl Reply {
    /// The reply made of these integers; none if there are fewer than five.
    pub(crate) fn from_integers(integers: impl IntoIterator<Item = Option<i64>>) -> Option<Self> {
        let mut integers = integers.into_iter();
        let mut decision = [0; 5];
        for slot in &mut decision {
            *slot = integers.next()??;
        }
        let appended = integers.collect::<Option<Vec<_>>>()?;
        Some(Self { decision, appended })
    }
}
