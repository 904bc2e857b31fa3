//! Finds the rules that may apply to a request without checking each: every rule is in one list, for the one of its
//! conditions that the fewest rules share.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, Equivalent, HashMap};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;
use smallvec::SmallVec;

use super::attributes::{Attributes, OTHER_METHOD};
use super::condition::{Condition, EVERY_NET, Values};
use super::names::{IP, PATH};
use super::path::{self, Segment};

/// Rules by their index in the set, ascending.
type Places = SmallVec<[u32; 2]>;

/// Short ones are stored inline.
type Text = SmallVec<[u8; 24]>;

type ByText = HashMap<Text, Places>;

/// Up to this many attributes, comparing their names is faster than hashing them.
const FEW: usize = 8;

/// The lists that can contain the rules of one request.
pub(super) type Lists<'i> = SmallVec<[&'i [u32]; 8]>;

#[derive(Debug, Default)]
pub(super) struct Index {
    paths: PathTree,
    v4: PrefixMap<Ipv4Net, Places>,
    v6: PrefixMap<Ipv6Net, Places>,
    /// By attribute.
    texts: Vec<(Box<str>, ByText)>,
    /// Each attribute's index in `texts`.
    names: HashMap<String, usize>,
    /// Rules without a condition that can be looked up.
    any: Places,
}

/// Path patterns as a tree of segments. A router finds the one best pattern; this finds all that match, since priority
/// decides between rules.
#[derive(Debug)]
struct PathTree {
    nodes: Vec<Node>,
    /// The node below a node, by a literal segment. One map for all: most nodes have at most one below.
    literals: HashMap<(u32, Text), u32>,
}

#[derive(Debug, Default)]
struct Node {
    /// Whether `literals` has one below it.
    has_literals: bool,
    any: Option<u32>,
    /// Rules whose pattern ends here.
    here: Places,
    /// Rules whose pattern matches any rest, or none.
    rest: Places,
}

/// A node's number and a literal segment below it.
#[derive(Hash)]
struct Edge<'e>(u32, &'e [u8]);

impl Equivalent<(u32, Text)> for Edge<'_> {
    fn equivalent(&self, (node, literal): &(u32, Text)) -> bool {
        self.0 == *node && self.1 == literal.as_slice()
    }
}

/// What a lookup is by: a request's values, or the first values in a rule's conditions.
pub(super) struct Lookup<'a, 'r> {
    path: Option<SmallVec<[Segment<'a>; 8]>>,
    net: Option<IpNet>,
    texts: Texts<'a, 'r>,
}

enum Texts<'a, 'r> {
    Request(&'a Attributes<'r>),
    Rule(&'a [Condition]),
}

impl Index {
    /// From each rule's conditions, in the rules' order. Also returns the condition by which each is found.
    pub(super) fn new<'c>(rules: impl Iterator<Item = &'c [Condition]> + Clone) -> (Self, Vec<Option<usize>>) {
        // By hashes: a few values that collide do no harm.
        let (mut shared, hasher) = (HashMap::<u64, u32>::new(), DefaultHashBuilder::default());
        let hash = |condition: &Condition, value: &str| hasher.hash_one((condition.attribute(), value));
        for conditions in rules.clone() {
            for condition in conditions {
                condition.each_value(|value| *shared.entry(hash(condition, value)).or_default() += 1);
            }
        }
        let (mut index, mut found_by) = (Self::default(), Vec::new());
        for (place, conditions) in (0..).zip(rules) {
            // A condition on several values puts the rule in the list of each.
            let cost = |(_, condition): &(usize, &Condition)| {
                let mut cost = 0;
                condition.each_value(|value| cost += shared.get(&hash(condition, value)).unwrap_or(&0));
                cost
            };
            let lookup = conditions.iter().enumerate().filter(|(_, condition)| condition.can_be_looked_up());
            let rarest = lookup.min_by_key(cost);
            match rarest {
                Some((_, condition)) => index.insert(condition, place),
                None => index.any.push(place),
            }
            found_by.push(rarest.map(|(at, _)| at));
        }
        (index, found_by)
    }

    fn insert(&mut self, condition: &Condition, place: u32) {
        match &condition.values {
            Values::Present => self.any.push(place),
            Values::Paths(patterns) => {
                patterns.iter().for_each(|pattern| self.paths.insert(pattern.segments(), place));
            }
            Values::Nets(nets) => {
                for net in nets {
                    let list = match net {
                        IpNet::V4(net) => self.v4.entry(*net).or_default(),
                        IpNet::V6(net) => self.v6.entry(*net).or_default(),
                    };
                    add(list, place);
                }
            }
            Values::Texts(values) => {
                let lists = self.of_attribute(condition.attribute());
                for value in values {
                    add(lists.entry((&**value).into()).or_default(), place);
                }
            }
        }
    }

    fn of_attribute(&mut self, attribute: &str) -> &mut ByText {
        let at = *self.names.entry_ref(attribute).or_insert_with(|| {
            self.texts.push((attribute.into(), ByText::default()));
            self.texts.len() - 1
        });
        &mut self.texts[at].1
    }

    /// The lists of the rules whose indexed condition holds.
    pub(super) fn lists(&self, lookup: &Lookup<'_, '_>) -> Lists<'_> {
        let mut lists = Lists::new();
        if !self.any.is_empty() {
            lists.push(&self.any);
        }
        if let Some(path) = &lookup.path {
            self.paths.lists(path, &mut lists);
        }
        match lookup.net {
            Some(IpNet::V4(net)) if !self.v4.is_empty() => {
                self.v4.cover_values(&net).for_each(|places| lists.push(places));
            }
            Some(IpNet::V6(net)) if !self.v6.is_empty() => {
                self.v6.cover_values(&net).for_each(|places| lists.push(places));
            }
            _ => {}
        }
        self.text_lists(&lookup.texts, &mut lists);
        lists
    }

    fn text_lists<'i>(&'i self, texts: &Texts<'_, '_>, lists: &mut Lists<'i>) {
        match texts {
            Texts::Request(request) if self.texts.len() <= FEW => {
                for (name, values) in &self.texts {
                    let places = request.values(name).filter_map(|value| values.get(value));
                    lists.extend(places.map(SmallVec::as_slice));
                }
            }
            Texts::Request(request) => {
                let places = |(name, value)| self.texts[*self.names.get(name)?].1.get::<[u8]>(value);
                lists.extend(request.texts().filter_map(places).map(SmallVec::as_slice));
            }
            Texts::Rule(conditions) => {
                for condition in *conditions {
                    if let (Values::Texts(values), Some(at)) =
                        (&condition.values, self.names.get(condition.attribute()))
                    {
                        let places = |value: &[u8]| self.texts[*at].1.get(value).map_or(&[][..], SmallVec::as_slice);
                        if values.iter().any(|value| condition.names_another_method(value)) {
                            // The other rule may name it, or all of them.
                            let values = values.iter().map(|value| &**value).chain([OTHER_METHOD.as_bytes()]);
                            lists.extend(values.map(places));
                            continue;
                        }
                        // A rule that hides this one is in the list of each of its values.
                        lists.extend(values.iter().map(|value| places(value)).min_by_key(|places| places.len()));
                    }
                }
            }
        }
    }
}

impl<'a, 'r> Lookup<'a, 'r> {
    pub(super) fn of_request(request: &'a Attributes<'r>) -> Self {
        Self {
            path: request.matched_path().map(|path| path::segments(path).collect()),
            net: request.ip.map(IpNet::from),
            texts: Texts::Request(request),
        }
    }

    pub(super) fn of_rule(conditions: &'a [Condition]) -> Self {
        let of = |attribute| conditions.iter().find(|condition| condition.attribute() == attribute);
        let path = of(PATH).and_then(|condition| match &condition.values {
            Values::Paths(patterns) => patterns.first().map(|pattern| pattern.segments().collect()),
            // What covers every path covers the root's.
            _ => Some(SmallVec::new()),
        });
        let net = of(IP).and_then(|condition| match &condition.values {
            Values::Nets(nets) => nets.first().copied(),
            _ => EVERY_NET.first().copied(),
        });
        Self { path, net, texts: Texts::Rule(conditions) }
    }
}

/// Keeps order and adds a rule once: it may name a value twice.
fn add(list: &mut Places, place: u32) {
    if list.last() != Some(&place) {
        list.push(place);
    }
}

impl Default for PathTree {
    fn default() -> Self {
        Self { nodes: vec![Node::default()], literals: HashMap::new() }
    }
}

impl PathTree {
    fn insert<'p>(&mut self, segments: impl Iterator<Item = Segment<'p>>, place: u32) {
        let mut at = 0_u32;
        for segment in segments {
            let next = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
            let node = &mut self.nodes[at as usize];
            let found = match segment {
                Segment::Literal(literal) => {
                    node.has_literals = true;
                    *self.literals.entry((at, literal.as_bytes().into())).or_insert(next)
                }
                Segment::Any => *node.any.get_or_insert(next),
                Segment::Rest => return add(&mut node.rest, place),
            };
            if found == next {
                self.nodes.push(Node::default());
            }
            at = found;
        }
        add(&mut self.nodes[at as usize].here, place);
    }

    fn lists<'i>(&'i self, path: &[Segment<'_>], lists: &mut Lists<'i>) {
        let mut open: SmallVec<[(u32, usize); 8]> = SmallVec::new();
        open.push((0, 0));
        while let Some((at, depth)) = open.pop() {
            let node = &self.nodes[at as usize];
            if !node.rest.is_empty() {
                lists.push(&node.rest);
            }
            let Some(segment) = path.get(depth) else {
                if !node.here.is_empty() {
                    lists.push(&node.here);
                }
                continue;
            };
            if let Some(any) = node.any
                && *segment != Segment::Rest
            {
                open.push((any, depth + 1));
            }
            if let Segment::Literal(literal) = segment
                && node.has_literals
                && let Some(found) = self.literals.get(&Edge(at, literal.as_bytes()))
            {
                open.push((*found, depth + 1));
            }
        }
    }
}
