//! The recipes of the README and the guide, to the letter: `documented_recipes_are_those_that_are_tested` compares
//! them.

mod tests;

use std::error::Error;
use std::num::NonZeroU32;
use std::time::Duration;

use tollgate::{Charged, DecidedBy, Decision, DenialCache, Limit, Limiter, OnError, Redis, Request, Rule};

async fn upload(limiter: &Limiter, user: &str, megabytes: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("uploads", "token-bucket 100/1m")?;
    limiter.acquire(&rule, Request::new(user).cost(megabytes)).await?.into_result()?;
    println!("uploading {megabytes} MB");
    Ok(())
}

async fn call(limiter: &Limiter, user: &str, org: &str) -> Result<bool, Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("api", "token-bucket 10/1s, fixed-window 250/1d")?;
    let rule = rule.and_by("org", "token-bucket 1000/1m".parse()?)?;

    let decision = limiter.acquire(&rule, Request::new(user).parts(&[("org", org.as_bytes())])).await?;
    // The wait is the longest of all limits that deny; each of them is in `limits`.
    for limit in decision.limits.iter().filter(|limit| !limit.allowed) {
        println!("denied by {}: retry after {:?}", limit.name(), limit.retry_after.duration());
    }
    Ok(decision.allowed)
}

async fn report(limiter: &Limiter, customer: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("reports", "concurrency 8 ttl 30s")?;
    let permit = limiter.hold(&rule, customer).await?.into_result()?.renewed();
    println!("working");
    // Given back in the background, and repeatedly while Redis is away: work that is done doesn't fail for it.
    drop(permit);
    Ok(())
}

async fn report_in_turn(limiter: &Limiter, customer: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("reports", "concurrency 8 ttl 30s")?;
    // Waits for at most 5 s; renewed for as long as it is held.
    let held = limiter.hold_wait(&rule, customer, Duration::from_secs(5)).await?;
    let permit = held.into_result()?.renewed();
    println!("working");
    drop(permit);
    Ok(())
}

async fn ask_maps(
    limiter: &Limiter,
    maps: impl Future<Output = Result<String, Duration>>,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("maps", "concurrency 3 ttl 30s, token-bucket 10/1s burst 1")?;
    // Waits for its turn for at most 5 s. The permit is given back when it is dropped, whatever happens.
    let _permit = limiter.hold_wait(&rule, "maps", Duration::from_secs(5)).await?.into_result()?.renewed();
    match maps.await {
        Ok(answer) => Ok(answer),
        Err(pause) => {
            // Of several calls that are refused at once, the last one's pause counts.
            limiter.block(&rule, "maps", pause).await?;
            Err(format!("maps wants no calls for {pause:?}").into())
        }
    }
}

async fn batch(redis: Redis, keys: &[String]) -> Result<usize, Box<dyn Error + Send + Sync>> {
    let limiter = Limiter::builder(redis).denial_cache(DenialCache::new(50_000)).build();
    let rule = Rule::new("api", "token-bucket 100/1s burst 20")?;
    let mut allowed = 0;
    for (key, decision) in keys.iter().zip(limiter.acquire_many(&rule, keys).await) {
        let decision = decision?;
        println!("{key}: {} by {}", decision.allowed, decision.by);
        allowed += usize::from(decision.allowed);
    }
    Ok(allowed)
}

async fn login(
    limiter: &Limiter,
    account: &str,
    password_is_right: impl Future<Output = bool>,
) -> Result<bool, Box<dyn Error + Send + Sync>> {
    // While Redis is unreachable nobody guesses, whatever the limiter's policy. All spellings count as one account.
    let rule = Rule::new("logins", "sliding-log 5/15m")?.on_error(OnError::Closed)?;
    let account = &account.trim().to_lowercase();
    // Taken before the password is looked at: of guesses made at once, five get past this line.
    let attempt = limiter.acquire(&rule, account).await?.into_result()?;
    let right = password_is_right.await;
    if right && let Err(error) = limiter.reset(&rule, Request::new(account).after(&attempt)).await {
        eprintln!("the attempts of {account} stay counted: {error}");
    }
    Ok(right)
}

async fn complete(
    limiter: &Limiter,
    id: &str,
    estimate: u64,
    model: impl Future<Output = Result<(String, u64), Box<dyn Error + Send + Sync>>>,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let requests: Limit = "token-bucket 600/1m".parse()?;
    let tokens: Limit = "token-bucket 100000/1m max-debt 20000".parse()?;
    let rule = Rule::new("model", requests.named("requests")?)?.and(tokens.named("tokens")?)?;
    // A completion counts as one request, however many tokens it takes.
    let rule = rule.cost_of("requests", 1)?;
    let completion = Request::new("acme").id(id);
    let reserved = limiter.reserve(&rule, completion.cost(estimate)).await?.into_result()?;
    tokio::time::sleep(reserved.retry_after.duration().unwrap_or_default()).await;
    let answer = model.await;
    let settled = match &answer {
        Ok((_, used)) => limiter.settle(&rule, completion.cost(*used).after(&reserved)).await,
        Err(_) => limiter.cancel(&rule, completion.after(&reserved)).await,
    };
    if let Err(error) = settled {
        eprintln!("completion {id} stays charged at its estimate: {error}");
    }
    answer.map(|(text, _)| text)
}

async fn send_mail(limiter: &Limiter) -> Result<(), Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("mails", "token-bucket 10/1s burst 0 max-debt 100")?;
    limiter.acquire_wait(&rule, "mailer", Duration::from_secs(5)).await?.into_result()?;
    println!("sending");
    Ok(())
}

async fn pay(limiter: &Limiter, user: &str, payment: &str) -> Result<Decision, Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("payments", "token-bucket 10/1s")?;
    let request = Request::new(user).id(payment);
    Ok(match limiter.acquire(&rule, request).await {
        Err(error) if error.charged() == Charged::Unknown => limiter.acquire(&rule, request).await?,
        decided => decided?,
    })
}

async fn guess(limiter: &Limiter, account: &str) -> Result<Decision, Box<dyn Error + Send + Sync>> {
    // Five guesses in fifteen minutes; the sixth shuts the account for an hour.
    let rule = Rule::new("guesses", "sliding-log 5/15m")?.on_error(OnError::Closed)?;
    let rule = rule.block_for(Duration::from_secs(3600))?;
    Ok(limiter.acquire(&rule, &account.trim().to_lowercase()).await?)
}

async fn crawl(limiter: &Limiter, client: &str) -> Result<Decision, Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("crawlers", "token-bucket 1/1h")?.count_overage(true);
    let decision = limiter.acquire(&rule, client).await?;
    if decision.overage >= Some(10) {
        limiter.block(&rule, client, Duration::from_secs(600)).await?;
    }
    Ok(decision)
}

async fn export(limiter: &Limiter, processes: NonZeroU32, rows: u64) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let rule = Rule::new("exports", "fixed-window 100000/1d")?;
    let lease = limiter.lease(&rule, "everybody", processes)?;
    let mut without_a_call = 0;
    for _ in 0..rows {
        let decision = lease.acquire(1).await?.into_result()?;
        without_a_call += u64::from(decision.by == DecidedBy::Lease);
    }
    // Before the process ends, so that others have it at once.
    lease.give_back().await?;
    Ok(without_a_call)
}
