//! From the options to a running service, and to its end.

use std::io::IsTerminal;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;
use tollgate::rules::{RuleSet, RuleSource, WatchedRules};
use tollgate::{Embedded, Engine, Limiter, OnError, Redis};
use tollgate_serve::listen::{self, Bounds};
use tollgate_serve::{Service, Tokens};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::options::{OnErrorArgument, Options, Port};
#[cfg(feature = "otlp")]
use crate::trace::{self, Traces};

/// Serves until SIGTERM or Ctrl-C, and answers what has begun.
pub(crate) async fn run(options: Options) -> Result<()> {
    if let (true, Some(path)) = (options.check, &options.rules) {
        return check(path);
    }
    #[cfg(feature = "otlp")]
    let traces = options.otlp.as_deref().map(Traces::open).transpose()?;
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = text.with_ansi(std::io::stderr().is_terminal()).with_filter(LevelFilter::INFO);
    let subscriber = tracing_subscriber::registry().with(log);
    #[cfg(feature = "otlp")]
    let subscriber = subscriber.with(traces.as_ref().map(Traces::layer));
    subscriber.init();
    // From here on, so that no signal ends it half started.
    let [mut hangup, mut terminate, mut interrupt] =
        [signal(SignalKind::hangup())?, signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let metrics = metrics_of_process()?;
    let limiter = limiter(&options)?;
    let rules = rules(&options, &limiter).await?;
    let tokens = match &options.tokens {
        None => Tokens::default(),
        Some(path) => {
            let read = std::fs::read_to_string(path).with_context(|| format!("--tokens {}", path.display()))?;
            let lines: Vec<_> = read.lines().map(str::trim).filter(|line| !line.starts_with('#')).collect();
            if let Some(at) = lines.iter().position(|line| line.contains(char::is_whitespace)) {
                let place = format!("--tokens {}, token {}", path.display(), at + 1);
                anyhow::bail!("{place}: expected one on each line, without blanks, got several words");
            }
            let tokens = Tokens::new(lines);
            anyhow::ensure!(!tokens.is_empty(), "--tokens {}: expected a token on each line, got none", path.display());
            tokens
        }
    };
    let service = Service::builder(limiter.clone(), rules)
        .unmatched(options.unmatched.into())
        .header_style(options.headers)
        .descriptors(options.descriptors.map(Into::into))
        .tokens(tokens)
        .build();

    let (end, ended) = watch::channel(false);
    let files = open_files();
    let mut serving = Vec::new();
    #[cfg(feature = "tls")]
    let certificate = match (&options.cert, &options.key) {
        (Some(cert), Some(key)) => Some(tollgate_serve::tls::Certificate::read(cert, key).context("--cert, --key")?),
        _ => None,
    };
    let ports = [
        ("grpc", &options.grpc, service.grpc()),
        ("http", &options.http, service.http()),
        ("metrics", &options.metrics, service.health().merge(metrics_route(metrics))),
    ];
    for (name, Port(address), routes) in ports {
        let Some(address) = address else { continue };
        let port = listen::Port::open(address).await.with_context(|| format!("--{name} {address}"))?;
        #[cfg(feature = "tls")]
        let port = match &certificate {
            Some(certificate) if name != "metrics" => port.with_certificate(certificate.clone()),
            _ => port,
        };
        #[cfg(feature = "otlp")]
        let routes = match &traces {
            Some(_) if name != "metrics" => routes.layer(axum::middleware::from_fn(trace::traced)),
            _ => routes,
        };
        println!("{name} {}", port.address());
        let (mut ended, bounds) = (ended.clone(), bounds(&options, name, files));
        serving.push(tokio::spawn(port.serve(routes, bounds, async move {
            let _gone = ended.wait_for(|ended| *ended).await;
        })));
    }
    anyhow::ensure!(!serving.is_empty(), "--grpc, --http, --metrics: all are off, so there is nothing to serve");

    let asked = service.clone();
    tokio::spawn(async move {
        if let Err(error) = asked.redis().await {
            tracing::warn!(%error, "redis doesn't answer yet: the rules' policies decide until it does");
        }
    });
    let mut drained = pin!(tokio::time::sleep(Duration::MAX));
    let mut is_draining = false;
    loop {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = &mut drained, if is_draining => {}
            _ = hangup.recv() => {
                #[cfg(feature = "tls")]
                match certificate.as_ref().map(tollgate_serve::tls::Certificate::reload) {
                    Some(Ok(())) => tracing::info!("the certificate was read again"),
                    Some(Err(error)) => tracing::error!(%error, "the new certificate was refused: the old one stays in use"),
                    None => {}
                }
                tracing::info!(rules = service.rules().len(), "rules need no SIGHUP: changes are in force within a second");
                continue;
            }
        }
        if is_draining || options.drain.is_zero() {
            break;
        }
        is_draining = true;
        service.fail_health().await;
        drained.as_mut().reset(Instant::now() + options.drain);
        tracing::info!(drain = ?options.drain, "draining: /readyz and gRPC's health checks fail, and requests are still served");
    }
    service.end_health().await;
    end.send_replace(true);
    for port in serving {
        port.await?;
    }
    // What was given back without a caller to wait for it.
    limiter.finish().await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        traces.end().await;
    }
    Ok(())
}

/// Says whether this file of rules can be used, and what is doubtful in it.
fn check(path: &Path) -> Result<()> {
    let rules = RuleSet::read(path)?;
    rules.warnings().iter().for_each(|warning| eprintln!("tollgate-serve: {warning}"));
    println!("{}: valid (rules: {})", path.display(), rules.len());
    Ok(())
}

fn limiter(options: &Options) -> Result<Limiter> {
    let engine: Engine = match &options.url {
        None => {
            eprintln!("tollgate-serve: no --url, so the engine in this process decides, for this process alone");
            Embedded::new().into()
        }
        Some(url) => {
            let builder = Redis::builder();
            #[cfg(feature = "tls")]
            let builder = match redis_tls(options)? {
                Some(tls) => builder.tls(&tls),
                None => builder,
            };
            builder.open_engine(url).context("--url")?
        }
    };
    let on_error = match options.on_error {
        OnErrorArgument::Closed => OnError::Closed,
        OnErrorArgument::Open => OnError::Open,
        OnErrorArgument::Local => OnError::Local { processes: options.processes },
    };
    let limiter = Limiter::builder(engine).deadline(options.deadline).on_error(on_error);
    Ok(limiter.prefix(&options.prefix).context("--prefix")?.build())
}

#[cfg(feature = "tls")]
fn redis_tls(options: &Options) -> Result<Option<tollgate::Tls>> {
    let read = |name: &str, path: &std::path::Path| {
        std::fs::read(path).with_context(|| format!("--tls-{name} {}", path.display()))
    };
    if options.tls_ca.is_none() && options.tls_cert.is_none() {
        return Ok(None);
    }
    let mut tls = tollgate::Tls::new();
    if let Some(path) = &options.tls_ca {
        tls = tls.authority(&read("ca", path)?).context("--tls-ca")?;
    }
    if let (Some(cert), Some(key)) = (&options.tls_cert, &options.tls_key) {
        tls = tls.certificate(&read("cert", cert)?, &read("key", key)?).context("--tls-cert, --tls-key")?;
    }
    Ok(Some(tls))
}

async fn rules(options: &Options, limiter: &Limiter) -> Result<Arc<dyn RuleSource>> {
    if let Some(path) = &options.rules {
        return Ok(Arc::new(WatchedRules::open(path)?));
    }
    let database = options.database.as_deref().unwrap_or_default();
    #[cfg(feature = "postgres")]
    {
        let postgres = tollgate_record::Postgres::open(database).context("--database")?;
        Ok(Arc::new(postgres.follow(limiter).await.context("--database")?))
    }
    #[cfg(not(feature = "postgres"))]
    {
        let _ = (database, limiter);
        anyhow::bail!("--database: this tollgate-serve was built without its feature postgres")
    }
}

/// What clients may take of the port of this name, with so many files for the whole process.
fn bounds(options: &Options, port: &str, files: Option<usize>) -> Bounds {
    let mut bounds = Bounds::default();
    bounds.connections = options.connections as usize;
    if let Some(files) = files {
        // Clients must leave some to Redis, the database and the file of rules: without them, policies decide.
        let of_metrics = files / 20;
        let of_others = (files - of_metrics).saturating_sub(RESERVED_FILES) / 2;
        let most = if port == "metrics" { of_metrics } else { of_others }.max(1);
        if most < bounds.connections {
            bounds.connections = most;
            if port != "metrics" {
                let fewer =
                    "this port takes fewer connections than --connections: raise the limit on open files (ulimit -n)";
                tracing::warn!(port, connections = most, "{fewer}");
            }
        }
    }
    bounds
}

const RESERVED_FILES: usize = 100;

/// How many files this process may have open, connections among them: as many as it may allow itself.
fn open_files() -> Option<usize> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, ..limit };
        if setrlimit(Resource::Nofile, raised).is_ok() {
            limit = raised;
        }
    }
    limit.current.and_then(|files| files.try_into().ok())
}

/// Collects what the library and the service count.
fn metrics_of_process() -> Result<PrometheusHandle> {
    const SECONDS: &[f64] =
        &[0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.05, 0.1, 0.5, 1.0];
    const KEYS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
    let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?;
    let builder = builder.set_buckets_for_metric(Matcher::Full("tollgate_batch_keys".into()), KEYS)?;
    let handle = builder.install_recorder()?;
    tollgate::describe_metrics();
    tollgate_serve::describe_metrics();
    #[cfg(feature = "postgres")]
    tollgate_record::describe_metrics();
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

fn metrics_route(handle: PrometheusHandle) -> Router {
    let text = [(http::header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    Router::new().route("/metrics", get(move || async move { (text, handle.render()) }))
}
