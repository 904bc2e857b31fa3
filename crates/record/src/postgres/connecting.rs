//! Makes connections: to the first of several servers that allows one.
//!
//! tokio-postgres bounds how long a server may take to accept a connection, but not how long it is silent after that.
//! So a frozen server, or a proxy in front of one that is gone, would use up all the time. Here each server, and each
//! address of its name, has a share.

use std::net::IpAddr;

use deadpool_postgres::Connect;
use futures_util::future::BoxFuture;
use tokio::net::lookup_host;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres::{Client, Config, Connection, Error, Socket};

use super::{CONNECTED_WITHIN, Connector, Stream};

/// Runs first on a connection. Otherwise the database's owner decides which functions and operators an unqualified name
/// means, and so does any role that may create in a schema of the search path, as all may in `public` before PostgreSQL
/// 15: what it puts there would run with the rights of the role that connects.
pub(crate) const SAFE_PATH: &str = "SET search_path = pg_catalog, pg_temp";

pub(super) type Connected = (Client, Connection<Socket, Stream>);

/// Makes the connections of a pool.
pub(super) struct Connecting(pub(super) Connector);

impl Connect for Connecting {
    fn connect(&self, config: &Config) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), Error>> {
        let config = config.clone();
        Box::pin(async move {
            let (client, connection) = connect(&config, &self.0).await?;
            // Callers that wait for an answer learn of the connection's end.
            Ok((client, tokio::spawn(async move { drop(connection.await) })))
        })
    }
}

/// One of an address's servers.
struct Server {
    host: Host,
    /// In place of what its name is resolved to.
    address: Option<IpAddr>,
    port: u16,
}

/// Tries one server after the other. The caller bounds all of it, by [`CONNECTED_WITHIN`] or less.
pub(super) async fn connect(config: &Config, connector: &Connector) -> Result<Connected, Error> {
    let end = Instant::now() + CONNECTED_WITHIN;
    let mut servers = servers(config);
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        fastrand::shuffle(&mut servers);
    }
    let mut failed = None;
    for (at, server) in servers.iter().enumerate() {
        let left = servers.len() - at;
        let end = Instant::now() + end.saturating_duration_since(Instant::now()) / share_of(left);
        let resolved = timeout_at(end, addresses(server)).await.unwrap_or_else(|_| vec![server.address]);
        match first(config, connector, (server, &resolved), (end, left == 1)).await {
            Some(Ok(connected)) => return Ok(connected),
            Some(Err(error)) => failed = Some(error),
            None => {}
        }
    }
    match failed {
        Some(error) => Err(error),
        // Returns the error for an address without servers.
        None => config.connect(Connector::clone(connector)).await,
    }
}

/// Tries the addresses of a server, each for its share of the time; `None` if all of them were silent. The last address
/// of the last server has all the time that is left, since there is no other to leave it to.
async fn first(
    config: &Config,
    connector: &Connector,
    (server, addresses): (&Server, &[Option<IpAddr>]),
    (end, is_last): (Instant, bool),
) -> Option<Result<Connected, Error>> {
    let mut failed = None;
    for (at, address) in addresses.iter().enumerate() {
        let left = addresses.len() - at;
        let config = of_one(config, server, *address);
        let connecting = config.connect(Connector::clone(connector));
        let share = end.saturating_duration_since(Instant::now()) / share_of(left);
        let connected = if is_last && left == 1 { Ok(connecting.await) } else { timeout(share, connecting).await };
        match connected {
            Ok(Ok(connected)) => return Some(Ok(connected)),
            Ok(Err(error)) => failed = Some(Err(error)),
            Err(_) => {}
        }
    }
    failed
}

fn share_of(left: usize) -> u32 {
    u32::try_from(left).unwrap_or(u32::MAX).max(1)
}

/// As many as there are hosts; one port is that of all of them.
fn servers(config: &Config) -> Vec<Server> {
    let (addresses, ports) = (config.get_hostaddrs(), config.get_ports());
    let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
    let server =
        |(at, host): (usize, &Host)| Server { host: host.clone(), address: addresses.get(at).copied(), port: port(at) };
    config.get_hosts().iter().enumerate().map(server).collect()
}

/// What a server's name is resolved to. One that can't be resolved is left to tokio-postgres, which says why.
async fn addresses(server: &Server) -> Vec<Option<IpAddr>> {
    let (Host::Tcp(name), None) = (&server.host, server.address) else { return vec![server.address] };
    let Ok(found) = lookup_host((&**name, server.port)).await else { return vec![None] };
    let mut addresses: Vec<_> = found.map(|found| Some(found.ip())).collect();
    addresses.dedup();
    if addresses.is_empty() { vec![None] } else { addresses }
}

/// The same address with this server alone. Its certificate is for the host's name.
fn of_one(config: &Config, server: &Server, address: Option<IpAddr>) -> Config {
    let mut one = Config::new();
    match &server.host {
        Host::Tcp(name) => one.host(name),
        #[cfg(unix)]
        Host::Unix(path) => one.host_path(path),
    };
    address.map(|address| one.hostaddr(address));
    one.port(server.port);
    config.get_user().map(|user| one.user(user));
    config.get_password().map(|password| one.password(password));
    config.get_dbname().map(|name| one.dbname(name));
    config.get_options().map(|options| one.options(options));
    config.get_application_name().map(|name| one.application_name(name));
    config.get_connect_timeout().map(|within| one.connect_timeout(*within));
    config.get_tcp_user_timeout().map(|within| one.tcp_user_timeout(*within));
    config.get_keepalives_interval().map(|interval| one.keepalives_interval(interval));
    config.get_keepalives_retries().map(|retries| one.keepalives_retries(retries));
    one.keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .channel_binding(config.get_channel_binding())
        .target_session_attrs(config.get_target_session_attrs());
    one
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// In virtual time: the share of one that says nothing passes at once.
    #[tokio::test(start_paused = true)]
    async fn an_address_that_says_nothing_leaves_time_for_the_next() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = silent.local_addr().expect("an address").port();
        let other = TcpListener::bind(("127.0.0.2", port)).await.expect("a port");
        tokio::spawn(async move {
            while let Ok((stream, _)) = other.accept().await {
                drop(stream);
            }
        });
        let config = "host=server user=limits application_name=x".parse().expect("an address");
        let server = Server { host: Host::Tcp("server".to_owned()), address: None, port };
        let addresses = ["127.0.0.1", "127.0.0.2"].map(|address| Some(address.parse().expect("an address")));
        let began = Instant::now();
        let times = (began + CONNECTED_WITHIN, true);
        let refused = first(&config, &Connector::default(), (&server, &addresses), times).await;
        // The second one has closed the connection.
        assert!(refused.expect("an error").is_err());
        assert!(began.elapsed() >= CONNECTED_WITHIN / 2, "the first one's share has passed");
        assert!(
            first(&config, &Connector::default(), (&server, &addresses[..1]), (Instant::now(), false)).await.is_none()
        );
    }

    #[test]
    fn nothing_of_an_address_is_lost() {
        let text = "host=a,b hostaddr=1.1.1.1,2.2.2.2 port=1,2 user=u password=p dbname=d options='-c x=y'
            application_name=n sslmode=require sslnegotiation=direct connect_timeout=3 tcp_user_timeout=4 keepalives=1
            keepalives_idle=5 keepalives_interval=6 keepalives_retries=7 target_session_attrs=read-write
            channel_binding=require";
        let config: Config = text.replace('\n', " ").parse().expect("an address");
        let one = "host=b hostaddr=2.2.2.2 port=2 ".to_owned() + text.split_once("1,2 ").expect("its ports").1;
        let expected: Config = one.replace('\n', " ").parse().expect("an address");
        let servers = servers(&config);
        assert_eq!(of_one(&config, &servers[1], servers[1].address), expected);
    }
}
