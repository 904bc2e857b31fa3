//! The rate limit service beside the library in a process: throughput by Envoy's protocol and by HTTP with JSON, and
//! latency at half of the throughput that is promised. Service, Redis and callers share the machine's cores.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use h2::client::SendRequest;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Limiter, Redis};
use tollgate_benches::callers::{Slice, callers, in_turn, paced};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::server::Server;
use tollgate_serve::Service;
use tollgate_serve::listen::{Bounds, Port};

/// As the service's binary has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const KEYS: usize = 10_000;
/// Connections of gRPC, and requests at once on each.
const CONNECTIONS: usize = 8;
const STREAMS: usize = 64;
/// Half of the throughput that is promised.
const PACE: u64 = 20_000;

const RULES: &str = r#"
    [[rule]]
    name = "users"
    match = { user = "*" }
    key = "user"
    limits = ["token-bucket 1000000/1s"]
"#;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    Library,
    Envoy,
    Json,
    LibraryPaced,
    EnvoyPaced,
}

use Variant::*;

const VARIANTS: [(Variant, &str); 5] = [
    (Library, "the library, 512 callers"),
    (Envoy, "Envoy's protocol, 8 connections of 64 streams"),
    (Json, "HTTP with JSON, 64 connections"),
    (LibraryPaced, "the library, 20,000 calls a second"),
    (EnvoyPaced, "Envoy's protocol, 20,000 calls a second"),
];

struct Bench {
    limiter: Limiter,
    rules: RuleSet,
    users: Vec<String>,
    channels: Vec<SendRequest<Bytes>>,
    http: String,
    connections: Vec<Mutex<TcpStream>>,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let (options, redis) = (Options::read(), Server::start());
    let rules: RuleSet = RULES.parse().expect("rules");
    let limiter = || {
        let redis = Redis::open(&redis.url()).expect("a good address");
        Limiter::builder(redis).deadline(Duration::from_secs(5)).build()
    };
    let [grpc, http] = serve(Service::new(limiter(), rules.clone()));
    // Another server of the protocol, for a comparison by hand.
    let grpc = std::env::var("TOLLGATE_BENCH_GRPC").unwrap_or(grpc);
    let mut channels = Vec::new();
    // As much room as gateways have: h2 ends a connection with many small answers that nobody has read yet.
    let mut client = h2::client::Builder::new();
    client.initial_connection_window_size(1 << 20);
    for _ in 0..CONNECTIONS {
        let (channel, connection) = client.handshake(connected(&grpc).await).await.expect("HTTP/2");
        tokio::spawn(connection);
        channels.push(channel);
    }
    let mut connections = Vec::new();
    for _ in 0..64 {
        connections.push(Mutex::new(connected(&http).await));
    }
    let users = (0..KEYS).map(|user| user.to_string()).collect();
    // Leaked, so that callers share it at no measurable cost.
    let bench: &Bench = Box::leak(Box::new(Bench { limiter: limiter(), rules, users, channels, http, connections }));

    let variants = VARIANTS.iter().map(|(variant, _)| *variant);
    let slice = async |variant, time| bench.slice(variant, time).await;
    let slices = in_turn(variants, options.rounds, options.slice, slice).await;
    let of = |variant: Variant, what: fn(&Slice) -> f64| {
        let at = VARIANTS.iter().position(|(one, _)| *one == variant).expect("a variant of the list");
        median(slices[at].iter().map(what))
    };
    let decided_together = bench.decided_together(&redis).await;

    println!("## The service\n\nDecisions a second and the 99th percentile of their latency.\n");
    println!("{}", header(&["", "a second", "p99, µs"]));
    for (variant, name) in VARIANTS {
        let (per_second, p99) = (of(variant, |slice| slice.per_second), of(variant, |slice| slice.p99_us));
        println!("{}", row([name.to_owned(), format!("{per_second:.0}"), short(p99)]));
    }
    println!("\nBy Envoy's protocol at full speed, {} decisions share a script call.\n", short(decided_together));
    let mut targets = Targets::default();
    let per_second = |variant| of(variant, |slice| slice.per_second);
    let p99 = |variant| of(variant, |slice| slice.p99_us);
    targets.at_least("the service, by Envoy's protocol: decisions a second", 40_000.0, per_second(Envoy));
    targets.at_least("the service, by HTTP with JSON: decisions a second", 25_000.0, per_second(Json));
    let later = (p99(EnvoyPaced) - p99(LibraryPaced)) / 1000.0;
    targets.at_most("the service, at 20,000 a second: p99 beyond the library's, ms", 2.0, later);
    println!("{targets}");
}

/// Serves both protocols from a runtime of their own; returns their addresses.
fn serve(service: Service) -> [String; 2] {
    let (told, hear) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("service").enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let open = async || Port::open(&"127.0.0.1:0".parse().expect("an address")).await.expect("a port");
            let (grpc, http) = (open().await, open().await);
            told.send([grpc.address(), http.address()]).expect("somebody listens");
            let never = std::future::pending::<()>;
            tokio::join!(
                grpc.serve(service.grpc(), Bounds::default(), never()),
                http.serve(service.http(), Bounds::default(), never())
            )
        })
    });
    hear.recv().expect("the service runs")
}

async fn connected(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).await.expect("a connection");
    stream.set_nodelay(true).expect("no delay");
    stream
}

/// A call by gRPC over plain HTTP/2, about as light as a gateway's: a client with all its layers takes as much of the two
/// cores as the service does.
async fn unary<Response: Message + Default>(channel: SendRequest<Bytes>, request: &RateLimitRequest) -> Response {
    let head = http::Request::post("http://bench/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    let head = head.header("content-type", "application/grpc").header("te", "trailers").body(()).expect("a request");
    let mut frame = BytesMut::with_capacity(5 + request.encoded_len());
    frame.put_u8(0);
    frame.put_u32(request.encoded_len() as u32);
    request.encode(&mut frame).expect("there is room");
    let mut channel = channel.ready().await.expect("a connection");
    let (response, mut body) = channel.send_request(head, false).expect("a stream");
    body.send_data(frame.freeze(), true).expect("a request");
    let mut body = response.await.expect("a response").into_body();
    let mut read = BytesMut::new();
    while let Some(part) = body.data().await {
        let part = part.expect("a part of the response");
        body.flow_control().release_capacity(part.len()).expect("what was read");
        read.extend_from_slice(&part);
    }
    let trailers = body.trailers().await.expect("an end").expect("trailers");
    assert_eq!(trailers["grpc-status"], "0", "{trailers:?}");
    Response::decode(&read[5..]).expect("a response")
}

impl Bench {
    /// One turn of a variant. Nobody may be denied.
    async fn slice(&'static self, variant: Variant, time: Duration) -> Slice {
        let count = CONNECTIONS * STREAMS;
        let slice = match variant {
            Library => callers(count, time, move |random| self.by_library(random)).await,
            Envoy => callers(count, time, move |random| self.by_envoy(random)).await,
            Json => callers(self.connections.len(), time, move |random| self.by_json(random)).await,
            LibraryPaced => paced(count, PACE, time, move |random| self.by_library(random)).await,
            EnvoyPaced => paced(count, PACE, time, move |random| self.by_envoy(random)).await,
        };
        assert_eq!(slice.allowed, slice.calls, "{variant:?} denied some");
        slice
    }

    fn user(&self, random: u64) -> &str {
        &self.users[random as usize % KEYS]
    }

    async fn by_library(&self, random: u64) -> bool {
        let request = Attributes::new().user(self.user(random));
        self.limiter.acquire_by(&self.rules, &request).await.expect("a verdict").allowed
    }

    async fn by_envoy(&self, random: u64) -> bool {
        let entries = vec![Entry { key: "user".into(), value: self.user(random).into() }];
        let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
        let request = RateLimitRequest { domain: "bench".into(), descriptors, hits_addend: 0 };
        let channel = self.channels[(random >> 32) as usize % CONNECTIONS].clone();
        let response: RateLimitResponse = unary(channel, &request).await;
        response.overall_code() == Code::Ok
    }

    /// On one of as many connections as there are callers.
    async fn by_json(&self, random: u64) -> bool {
        let body = format!("{{\"attributes\":{{\"user\":\"{}\"}}}}", self.user(random));
        let request = format!("POST /v1/decide HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let free = self.connections.iter().find_map(|connection| connection.try_lock().ok());
        let mut stream = match free {
            Some(stream) => stream,
            None => self.connections[random as usize % self.connections.len()].lock().await,
        };
        // The service closes what was idle for 10 s, as the other variants' turns may take.
        if stream.try_read(&mut [0]).is_ok() {
            *stream = connected(&self.http).await;
        }
        stream.write_all(request.as_bytes()).await.expect("a request");
        let (mut read, mut buffer) = (0, [0; 4096]);
        loop {
            let count = stream.read(&mut buffer[read..]).await.expect("a response");
            assert!(count > 0, "the service has closed a connection in use");
            read += count;
            let text = &buffer[..read];
            let Some(head) = text.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let length = std::str::from_utf8(&text[..head]).expect("a head").lines();
            let length = length.filter_map(|line| line.strip_prefix("content-length: ")).next().expect("a length");
            if read >= head + 4 + length.parse::<usize>().expect("a number") {
                return text.starts_with(b"HTTP/1.1 200");
            }
        }
    }

    /// How many script calls Redis has run.
    fn script_calls(&self, redis: &Server) -> f64 {
        tollgate_benches::pipeline::Connection::open(&redis.socket())
            .info("commandstats", &["cmdstat_evalsha:", "calls="])
    }

    /// How many decisions by Envoy's protocol share a script call.
    async fn decided_together(&'static self, redis: &Server) -> f64 {
        let before = self.script_calls(redis);
        let slice = self.slice(Envoy, Duration::from_secs(1)).await;
        slice.calls as f64 / (self.script_calls(redis) - before)
    }
}
