//! nginx's limits of requests and of connections.
//!
//! nginx chooses one location for a request, the most specific, and applies the limits that are in force there. Rules
//! apply in order: those of the more specific places come first, followed by a rule that allows, so that those of the
//! surrounding places don't apply as well. A limit in force in several places is one rule, since its counts are shared.

mod directive;
mod level;
mod order;
mod zone;

use super::Imported;
use super::account::Account;
use super::draft::{Does, Names, Rule};
use super::fault::{Fault, quoted};
use level::{Group, Levels, Place, Server};
use order::{Step, steps};
use zone::{Asks, Counts, Use, Zone};

pub(super) fn translated(text: &str) -> Result<Imported, Fault> {
    let mut levels = Levels::default();
    levels.read(&directive::directives(text)?)?;
    let servers = std::mem::take(&mut levels.servers);
    let mut translation =
        Translation { zones: levels.zones, account: levels.account, names: Names::default(), rules: Vec::new() };
    translation.all(servers, levels.outside);
    Ok(Imported { rules: translation.rules, account: translation.account, about: Vec::new() })
}

struct Translation {
    zones: Vec<Zone>,
    account: Account,
    names: Names,
    rules: Vec<Rule>,
}

/// A limit, with the places where it is in force.
struct Shared {
    limit: Use,
    /// The lines where it is set.
    lines: Vec<usize>,
    /// The indexes of its groups.
    groups: Vec<usize>,
}

impl Translation {
    fn all(&mut self, servers: Vec<Server>, outside: Vec<Use>) {
        let mut servers: Vec<_> = servers.into_iter().map(sorted).collect();
        // Such as one that only redirects to the same hosts with TLS.
        let is_limited = |server: &Server| server.groups.iter().any(|group| !group.uses.is_empty());
        let limited: Vec<_> =
            servers.iter().filter(|server| is_limited(server)).flat_map(|one| one.hosts.clone()).collect();
        servers.retain(|server| {
            is_limited(server) || server.hosts.is_empty() || !server.hosts.iter().all(|host| limited.contains(host))
        });
        let mut groups = servers.iter().flat_map(|server| &server.groups);
        let first = groups.next().map_or(&outside, |group| &group.uses).clone();
        if groups.all(|group| is_same(&group.uses, &first)) {
            self.server(&[Group { place: Place::Everywhere, line: 0, uses: first }], &[]);
        } else {
            self.hosts(servers);
        }
        for zone in self.zones.iter().filter(|zone| !zone.used) {
            self.account.leave(zone.line..=zone.line, &format!("zone {}: no limit uses it", zone.name));
        }
        self.tell_zones();
    }

    /// Adds each server by its hosts, and last the one for all other hosts.
    fn hosts(&mut self, mut servers: Vec<Server>) {
        for (line, how) in servers.iter().filter(|_| servers.len() > 1).flat_map(|server| &server.patterns) {
            self.account.differ(*line, how);
        }
        let explicit = servers.iter().position(|server| server.is_default).unwrap_or(0);
        let default = servers.remove(explicit);
        let mut seen: Vec<(String, usize)> = Vec::new();
        for server in &servers {
            let known = server.hosts.iter().find_map(|host| seen.iter().find(|(other, _)| other == host));
            if let Some((host, line)) = known {
                let why = "and rules can't tell ports apart";
                let how = format!("server: {host} is also a name of the server in line {line}, {why}");
                self.account.differ(server.line, &how);
            }
            seen.extend(server.hosts.iter().map(|host| (host.clone(), server.line)));
            if server.hosts.is_empty() {
                let how = "server: left out, since it has no host name to tell it from others";
                self.account.differ(server.line, how);
            } else {
                self.server(&server.groups, &server.hosts);
                self.end(&server.hosts, None, &format!("server of line {}", server.line));
            }
        }
        self.server(&default.groups, &[]);
        self.tell_shared_servers(&servers, &default);
    }

    fn tell_shared_servers(&mut self, servers: &[Server], default: &Server) {
        let all: Vec<_> = servers.iter().chain([default]).collect();
        for (at, server) in all.iter().enumerate() {
            let others = || all[..at].iter().flat_map(|other| &other.groups).flat_map(|group| &group.uses);
            for one in server.groups.iter().flat_map(|group| &group.uses) {
                if others().any(|other| other.shares(one)) {
                    let how = format!(
                        "zone {}: in nginx, several servers share its counts; here, each has its own",
                        one.zone
                    );
                    self.account.differ(one.line, &how);
                }
            }
        }
    }

    /// Adds the rules of one server, whose groups are in the order of their places.
    fn server(&mut self, groups: &[Group], hosts: &[String]) {
        let mut shared = Vec::<Shared>::new();
        for (at, group) in groups.iter().enumerate() {
            for one in &group.uses {
                match shared.iter_mut().find(|other| other.limit.is_like(one)) {
                    Some(other) => {
                        other.lines.extend((!other.lines.contains(&one.line)).then_some(one.line));
                        other.groups.push(at);
                    }
                    None => shared.push(Shared { limit: one.clone(), lines: vec![one.line], groups: vec![at] }),
                }
            }
        }
        self.tell_prefixes(groups);
        let places: Vec<_> = groups.iter().map(|group| &group.place).collect();
        let sets = |shared: &[Shared]| shared.iter().map(|one| one.groups.clone()).collect::<Vec<_>>();
        let steps = steps(&places, &sets(&shared)).unwrap_or_else(|| {
            shared = self.apart(&shared);
            order::apart(&places, &sets(&shared))
        });
        self.tell_shared_zones(&shared);
        for step in steps {
            match step {
                Step::Limit(at) => self.limit(&shared[at], groups, hosts),
                Step::End(at) => {
                    let group = &groups[at];
                    self.end(hosts, group.place.pattern(), &format!("location of line {}", group.line));
                }
            }
        }
    }

    /// Reports locations that differ, since nginx compares characters and a pattern whole segments.
    fn tell_prefixes(&mut self, groups: &[Group]) {
        let elsewhere = groups.last().map(|group| &*group.uses).unwrap_or_default();
        for group in groups.iter().filter(|group| !is_same(&group.uses, elsewhere)) {
            if let Place::Under(path) = &group.place
                && !path.ends_with('/')
            {
                let path = quoted(path);
                let how = format!("location {path}: takes {path} and {path}/... here, and in nginx {path}-... too");
                self.account.differ(group.line, &how);
            }
        }
    }

    /// Splits limits by place, where no order allows places to share them.
    fn apart(&mut self, shared: &[Shared]) -> Vec<Shared> {
        for one in shared.iter().filter(|one| one.groups.len() > 1) {
            let how = format!(
                "zone {}: in nginx, several locations share its counts; here, each has its own",
                one.limit.zone
            );
            self.account.differ(one.limit.line, &how);
        }
        let alone = |one: &Shared, group: usize| Shared {
            limit: one.limit.clone(),
            lines: one.lines.clone(),
            groups: vec![group],
        };
        let mut all: Vec<_> = shared.iter().flat_map(|one| one.groups.iter().map(|group| alone(one, *group))).collect();
        all.sort_by_key(|one| one.groups[0]);
        all
    }

    /// Reports zones used with different numbers, which count separately here.
    fn tell_shared_zones(&mut self, shared: &[Shared]) {
        for (at, one) in shared.iter().enumerate() {
            if let Some(other) =
                shared[..at].iter().find(|other| other.limit.shares(&one.limit) && !other.limit.is_like(&one.limit))
            {
                let how = format!(
                    "zone {}: counts by itself here, and in nginx together with the limit of line {}",
                    one.limit.zone, other.limit.line
                );
                self.account.differ(one.limit.line, &how);
            }
        }
    }

    fn limit(&mut self, shared: &Shared, groups: &[Group], hosts: &[String]) {
        let limit = &shared.limit;
        let of_connections = matches!(limit.asks, Asks::Connections(_));
        let is_its = |zone: &&Zone| zone.name == limit.zone && (zone.counts == Counts::Connections) == of_connections;
        let Some(zone) = self.zones.iter().find(is_its).cloned() else { return };
        let mut rule =
            Rule { name: self.names.of(&limit.zone), key: zone.key.clone(), continues: true, ..Rule::default() };
        let lines: Vec<_> = shared.lines.iter().map(ToString::to_string).collect();
        let used = lines.join(", ");
        rule.comments.push(format!("zone {} defined in line {}, used in line {used}", zone.name, zone.line));
        self.places(&mut rule, shared, groups, hosts);
        match limit.asks {
            Asks::Connections(count) => {
                rule.limit = format!("concurrency {count} ttl 1m");
                rule.comments.push("What a crashed process held is free again after a minute.".into());
            }
            Asks::Requests { burst, delay } => self.requests(&mut rule, &zone, burst, delay, limit.line),
        }
        (rule.status, rule.shadow) = (Some(limit.status), limit.dry_run);
        self.rules.push(rule);
    }

    fn requests(&mut self, rule: &mut Rule, zone: &Zone, burst: u64, delay: Option<u64>, line: usize) {
        let Counts::Requests(rate) = zone.counts else { return };
        let unit = if rate.per_minute { "1m" } else { "1s" };
        rule.limit = format!("token-bucket {}/{unit} burst {}", rate.requests, burst + 1);
        if rate.per_minute && rate.requests % 3 != 0 {
            let thousandths = rate.requests * 1000 / 60;
            let whole = format!("nginx rounds {} r/m down to {thousandths} thousandths a second.", rate.requests);
            rule.comments.push(whole);
        }
        if let Some(delay) = delay {
            let seconds = (burst - delay) as f64 * if rate.per_minute { 60.0 } else { 1.0 } / rate.requests as f64;
            let how = format!(
                "nginx delays requests above the rate{}; here they are let through at once. To delay them, set burst \
                 {} and let the middleware wait up to {seconds:.3} s (RateLimitLayer::wait)",
                if delay > 0 { format!(" after {delay} of the burst") } else { String::new() },
                delay + 1
            );
            self.account.differ(line, &how);
        }
    }

    /// Conditions for the places where a limit is in force.
    fn places(&mut self, rule: &mut Rule, shared: &Shared, groups: &[Group], hosts: &[String]) {
        if !hosts.is_empty() {
            rule.conditions.push(("host".to_owned(), hosts.to_vec()));
        }
        let places = || shared.groups.iter().map(|at| &groups[*at].place);
        let patterns: Vec<_> = places().filter_map(Place::pattern).collect();
        if patterns.len() == shared.groups.len() {
            rule.conditions.push(("path".to_owned(), patterns));
        }
    }

    /// Ends the rules for the requests of the place before.
    fn end(&mut self, hosts: &[String], pattern: Option<String>, of: &str) {
        let mut rule = Rule { name: self.names.of("end"), does: Does::Allow, ..Rule::default() };
        rule.comments.push(format!("No other limits apply: {of}"));
        if !hosts.is_empty() {
            rule.conditions.push(("host".to_owned(), hosts.to_vec()));
        }
        rule.conditions.extend(pattern.map(|pattern| ("path".to_owned(), vec![pattern])));
        self.rules.push(rule);
    }

    fn tell_zones(&mut self) {
        for zone in self.zones.iter().filter(|zone| zone.used && zone.by_query) {
            self.account.differ(zone.line, &format!("zone {}: a path has no query, which $request_uri has", zone.name));
        }
    }
}

/// The groups from the most specific place to the least, each place once.
fn sorted(mut server: Server) -> Server {
    let length = |group: &Group| match &group.place {
        Place::Exactly(path) => (0, std::cmp::Reverse(path.len())),
        Place::Under(path) => (1, std::cmp::Reverse(path.len())),
        Place::Everywhere => (2, std::cmp::Reverse(0)),
    };
    server.groups.sort_by_key(length);
    let mut seen = Vec::new();
    server.groups.retain(|group| {
        let pattern = group.place.pattern();
        let is_new = !seen.contains(&pattern);
        seen.push(pattern);
        is_new
    });
    server
}

fn is_same(one: &[Use], other: &[Use]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.is_like(other))
}
