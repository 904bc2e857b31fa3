//! The limits in force at each place: a level inherits those of the surrounding one unless it has its own.

use super::super::account::Account;
use super::super::fault::{Fault, expected, fault, quoted};
use super::directive::Directive;
use super::zone::{self, Asks, Use, Zone};

const NOT_OF_LIMITS: &str = "limits nothing";
const LOGGING: &str = "is about logging";

/// Limits in force, with how they deny.
#[derive(Clone, Debug, Default)]
struct Settings {
    requests: Vec<Use>,
    connections: Vec<Use>,
    of_requests: How,
    of_connections: How,
}

#[derive(Clone, Copy, Debug)]
struct How {
    status: u16,
    dry_run: bool,
}

impl Default for How {
    fn default() -> Self {
        Self { status: 503, dry_run: false }
    }
}

impl How {
    fn of(self, uses: &[Use]) -> impl Iterator<Item = Use> {
        uses.iter().map(move |one| Use { status: self.status, dry_run: self.dry_run, ..one.clone() })
    }
}

impl Settings {
    /// The limits in their order.
    fn uses(&self) -> Vec<Use> {
        self.of_requests.of(&self.requests).chain(self.of_connections.of(&self.connections)).collect()
    }
}

/// Requests that have the same limits.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) place: Place,
    pub(super) line: usize,
    pub(super) uses: Vec<Use>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Exactly(String),
    Under(String),
    Everywhere,
}

impl Place {
    /// The pattern of its paths, or none for all.
    pub(super) fn pattern(&self) -> Option<String> {
        let literal = |path: &str| path.replace('%', "%25").replace('*', "%2A");
        match self {
            Self::Exactly(path) => Some(literal(path)),
            Self::Under(path) => Some(format!("{}/*", literal(path.trim_end_matches('/')))),
            Self::Everywhere => None,
        }
    }

    /// Whether the pattern matches all of the other's paths.
    pub(super) fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Everywhere, _) => true,
            (Self::Under(around), Self::Exactly(path) | Self::Under(path)) => {
                let around = around.trim_end_matches('/');
                path.strip_prefix(around).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
            (one, other) => one == other,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) line: usize,
    pub(super) hosts: Vec<String>,
    /// Names with patterns, which matter only if there are other servers.
    pub(super) patterns: Vec<(usize, String)>,
    pub(super) is_default: bool,
    pub(super) groups: Vec<Group>,
}

#[derive(Debug, Default)]
pub(super) struct Levels {
    pub(super) account: Account,
    pub(super) zones: Vec<Zone>,
    pub(super) servers: Vec<Server>,
    /// The limits outside of any server.
    pub(super) outside: Vec<Use>,
    defined: Vec<String>,
}

impl Levels {
    pub(super) fn read(&mut self, all: &[Directive]) -> Result<(), Fault> {
        self.define(all);
        self.find_zones(all)?;
        let settings = self.http(all, &Settings::default())?;
        self.outside = settings.uses();
        Ok(())
    }

    /// Variables that the file sets.
    fn define(&mut self, all: &[Directive]) {
        for one in all {
            let name = match &*one.name {
                "map" | "geo" | "split_clients" => one.arguments.last(),
                "set" | "auth_request_set" | "perl_set" | "js_set" | "js_var" => one.arguments.first(),
                _ => None,
            };
            self.defined.extend(name.and_then(|name| name.strip_prefix('$')).map(str::to_owned));
            if one.name == "location" && one.arguments.iter().any(|word| word.contains("(?<")) {
                let names = one.arguments.iter().flat_map(|word| word.split("(?<").skip(1));
                self.defined.extend(names.filter_map(|rest| rest.split('>').next()).map(str::to_owned));
            }
            self.define(one.within());
        }
    }

    /// Zones may be defined after their uses.
    fn find_zones(&mut self, all: &[Directive]) -> Result<(), Fault> {
        for one in all {
            if one.name == "stream" {
                continue;
            }
            if ["limit_req_zone", "limit_conn_zone"].contains(&&*one.name) {
                let zone = zone::zone(one, &self.defined)?;
                let kind = std::mem::discriminant(&zone.counts);
                let is_same = |other: &&Zone| other.name == zone.name && std::mem::discriminant(&other.counts) == kind;
                if let Some(other) = self.zones.iter().find(is_same) {
                    let (name, first) = (quoted(&zone.name), other.line);
                    return Err(fault(one.line, format!("zone {name} is already defined by line {first}")));
                }
                self.account.take(one.line..=one.end);
                self.zones.push(zone);
            }
            self.find_zones(one.within())?;
        }
        Ok(())
    }

    /// The level outside of servers; the pieces that nginx -T prints are one level.
    fn http(&mut self, all: &[Directive], around: &Settings) -> Result<Settings, Fault> {
        let mut settings = self.settings(all, around)?;
        for one in all {
            match &*one.name {
                "http" => {
                    self.account.take(one.line..=one.line);
                    settings = self.http(one.within(), &settings)?;
                }
                "server" => self.server(one, &settings)?,
                "location" => return Err(fault(one.line, "location: outside of a server")),
                "stream" => self.leave_stream(one),
                _ => self.leave(one),
            }
        }
        Ok(settings)
    }

    fn server(&mut self, server: &Directive, around: &Settings) -> Result<(), Fault> {
        let settings = self.settings(server.within(), around)?;
        let mut this = Server { line: server.line, ..Server::default() };
        for one in server.within() {
            match &*one.name {
                "server_name" => self.names(one, &mut this),
                "listen" => {
                    this.is_default |= one.arguments.iter().any(|word| word == "default_server");
                    self.leave(one);
                }
                "location" => self.location(one, &settings, &mut this.groups)?,
                _ => self.leave(one),
            }
        }
        this.groups.push(Group { place: Place::Everywhere, line: server.line, uses: settings.uses() });
        self.account.take(server.line..=server.line);
        self.servers.push(this);
        Ok(())
    }

    fn names(&mut self, directive: &Directive, server: &mut Server) {
        for name in &directive.arguments {
            if name.starts_with('~') || name.contains('*') || name.starts_with('.') {
                server.patterns.push((directive.line, format!("server_name {}: hosts have no patterns", quoted(name))));
            } else if !name.is_empty() && name != "_" {
                server.hosts.push(name.to_ascii_lowercase().trim_end_matches('.').to_owned());
            }
        }
        self.account.take(directive.line..=directive.end);
    }

    fn location(&mut self, location: &Directive, around: &Settings, groups: &mut Vec<Group>) -> Result<(), Fault> {
        let settings = self.settings(location.within(), around)?;
        let place = match &location.arguments[..] {
            [equal, path] if equal == "=" => Some(Place::Exactly(path.clone())),
            [sign, path] if sign == "^~" => Some(Place::Under(path.clone())),
            [path] if path == "/" => Some(Place::Everywhere),
            [path] if path.starts_with('/') => Some(Place::Under(path.clone())),
            _ => None,
        };
        match place {
            Some(place) => groups.push(Group { place, line: location.line, uses: settings.uses() }),
            None => {
                let how = format!("location {}: a path has no such pattern", quoted(&location.arguments.join(" ")));
                let own = location.within().iter().find(|one| ["limit_req", "limit_conn"].contains(&&*one.name));
                match own {
                    Some(own) => self.account.lose(own.line..=own.end, &format!("{how}, so its limits are left out")),
                    None if settings.uses().is_empty() => {}
                    None => {
                        let how = format!("{how}; its requests are counted by the limits of other locations");
                        self.account.differ(location.line, &how);
                    }
                }
            }
        }
        self.account.take(location.line..=location.line);
        for one in location.within() {
            if one.name == "location" { self.location(one, &settings, groups)? } else { self.leave(one) }
        }
        Ok(())
    }

    /// The settings of a level, where its own replace the surrounding ones.
    fn settings(&mut self, all: &[Directive], around: &Settings) -> Result<Settings, Fault> {
        let mut settings = around.clone();
        let (mut requests, mut connections) = (Vec::new(), Vec::new());
        for one in all {
            let lines = one.line..=one.end;
            match &*one.name {
                "limit_req" => requests.push(self.used(zone::use_of_requests(one)?)?),
                "limit_conn" => connections.push(self.used(zone::use_of_connections(one)?)?),
                "limit_req_status" => settings.of_requests.status = status(one)?,
                "limit_conn_status" => settings.of_connections.status = status(one)?,
                "limit_req_dry_run" => settings.of_requests.dry_run = switch(one)?,
                "limit_conn_dry_run" => settings.of_connections.dry_run = switch(one)?,
                _ => continue,
            }
            self.account.take(lines);
        }
        if !requests.is_empty() {
            settings.requests = requests;
        }
        if !connections.is_empty() {
            settings.connections = connections;
        }
        Ok(settings)
    }

    /// A zone that is used must be defined.
    fn used(&mut self, one: Use) -> Result<Use, Fault> {
        let is_of_connections = matches!(one.asks, Asks::Connections(_));
        let is_its =
            |zone: &&mut Zone| zone.name == one.zone && (zone.counts == zone::Counts::Connections) == is_of_connections;
        let Some(zone) = self.zones.iter_mut().find(is_its) else {
            let directive = if is_of_connections { "limit_conn_zone" } else { "limit_req_zone" };
            let zone = quoted(&one.zone);
            let what = format!("no {directive} defines the zone {zone} (nginx -T prints all files as one)");
            return Err(Fault { line: one.line, what });
        };
        zone.used = true;
        Ok(one)
    }

    fn leave_stream(&mut self, stream: &Directive) {
        for one in stream.within() {
            if one.name == "limit_conn" {
                self.account.lose(one.line..=one.end, "stream: connections that aren't HTTP have no rules");
            }
            self.leave_stream(one);
        }
        self.leave(stream);
    }

    /// Directives without effect on limits. Only their names are printed, since their arguments may be secret.
    fn leave(&mut self, one: &Directive) {
        match &*one.name {
            "limit_req_log_level" | "limit_conn_log_level" => self.account.leave(one.line..=one.end, LOGGING),
            "limit_req" | "limit_conn" | "limit_req_zone" | "limit_conn_zone" | "limit_req_status"
            | "limit_conn_status" | "limit_req_dry_run" | "limit_conn_dry_run" => {}
            "include" => {
                let how = "include: the included text is missing; nginx -T prints all files as one";
                self.account.lose(one.line..=one.end, how);
            }
            "limit_zone" => self.account.lose(one.line..=one.end, "limit_zone: not in nginx since 1.7.6"),
            name => {
                let sets = ["map", "geo", "split_clients", "set"].contains(&name);
                let why = if sets { "sets a variable: the service gives it" } else { NOT_OF_LIMITS };
                self.account.leave(one.line..=one.end, &format!("{}: {why}", quoted(name)));
            }
        }
    }
}

fn status(directive: &Directive) -> Result<u16, Fault> {
    let word = directive.arguments.first().map_or("", String::as_str);
    let status = word.parse().ok().filter(|status| (400..=599).contains(status));
    status.ok_or_else(|| expected(directive.line, "a status from 400 to 599", word))
}

fn switch(directive: &Directive) -> Result<bool, Fault> {
    match directive.arguments.first().map_or("", String::as_str) {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(expected(directive.line, "on or off", other)),
    }
}
