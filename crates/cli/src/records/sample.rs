//! Detects a log whose clients are behind a balancer: most requests have one address or a few, and another field has
//! many.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::clients;
use super::place::Place;
use super::places::Line;
use crate::output::counted;

/// How many requests are sampled.
const MOST: usize = 1000;
/// Fewer requests than this prove nothing.
const LEAST: usize = 8;
/// The least number of addresses in another field, for each of the balancer's, to take them for clients.
const CLIENTS: usize = 3;
/// The most addresses of a balancer, one in each of its zones.
const NODES: usize = 8;

/// The first requests: their peers, and the addresses in other fields.
#[derive(Default)]
pub(super) struct Sample {
    lines: usize,
    requests: Vec<(IpAddr, Vec<(Place, IpAddr)>)>,
}

impl Sample {
    pub(super) fn is_full(&self) -> bool {
        self.lines >= MOST
    }

    pub(super) fn note(&mut self, peer: &[u8], line: &dyn Line) {
        self.lines += 1;
        let Some(peer) = clients::read(peer) else { return };
        let others = line.forwarded().into_iter().filter_map(|(place, text)| {
            let last = text.rsplit(|byte| *byte == b',').next().unwrap_or_default().trim_ascii();
            // Proxies write no port, unlike logs for the servers behind them.
            let address = str::from_utf8(last).ok()?.parse::<IpAddr>().ok()?.to_canonical();
            Some((place, address))
        });
        let others = others.filter(|(_, address)| *address != peer).collect();
        self.requests.push((peer, others));
    }

    /// What the requests so far suggest.
    pub(super) fn finding(&self) -> Option<String> {
        let mut peers: HashMap<IpAddr, usize> = HashMap::new();
        self.requests.iter().for_each(|(peer, _)| *peers.entry(*peer).or_default() += 1);
        let mut peers: Vec<_> = peers.into_iter().collect();
        peers.sort_unstable_by_key(|(peer, count)| (Reverse(*count), *peer));
        let (balancer, most) = *peers.first()?;
        let nodes: HashSet<IpAddr> =
            peers.iter().take(NODES).filter(|(_, count)| count * 2 >= most).map(|(peer, _)| *peer).collect();
        let count = self.requests.iter().filter(|(peer, _)| nodes.contains(peer)).count();
        if count < LEAST || count * 2 <= self.requests.len() {
            return None;
        }
        let mut fields: HashMap<&Place, (usize, HashSet<IpAddr>)> = HashMap::new();
        for (place, address) in self.requests.iter().filter(|(peer, _)| nodes.contains(peer)).flat_map(|(_, all)| all) {
            let (lines, addresses) = fields.entry(place).or_default();
            *lines += 1;
            addresses.insert(*address);
        }
        let least = CLIENTS * nodes.len();
        let clients =
            fields.into_iter().filter(|(_, (lines, addresses))| lines * 2 >= count && addresses.len() >= least);
        let (place, (_, addresses)) = clients.max_by_key(|(place, (_, all))| (all.len(), place.to_string()))?;
        let (who, what) = match nodes.len() - 1 {
            0 => (format!("{balancer} has"), "it is a balancer or a proxy, count its"),
            others => (
                format!("{balancer} and {} have", counted(others as u64, "other")),
                "they are balancers or proxies, count their",
            ),
        };
        Some(format!(
            "{who} {} % of the first {} requests, and the field {place} has {} other addresses: if {what} clients with \
             --client-address {place}",
            count * 100 / self.requests.len(),
            self.requests.len(),
            addresses.len(),
        ))
    }
}
