//! Throughput and latency of what isn't a plain acquire of one limit, compared with that: several limits, ids, blocks,
//! counted denials and permits, on one Redis, and several limits on a cluster of three primaries.

use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Cluster, Engine, Limit, Limiter, Operation, Redis, Request, Rule};
use tollgate_benches::callers::{Slice, callers, in_turn};
use tollgate_benches::options::Options;
use tollgate_benches::report::{Targets, header, median, row, short};
use tollgate_benches::{rule, server};

const KEYS: usize = 10_000;
const PLAIN: &str = "token-bucket 1000000/1s";
const TWO: &str = "token-bucket 1000000/1s, fixed-window 1000000000/1d";
/// A part of every request, which has one value: what counts by it counts all callers.
const EVERYBODY: &str = "everybody";
/// A part of every request that has as many values as there are keys.
const OTHER: &str = "other";
/// After a key's first unit.
const NONE: &str = "token-bucket 1/1h";

/// Of which all apply to each request.
const RULES: &str = r#"
    [[rule]]
    name = "everybody"
    key = "global"
    limits = ["fixed-window 1000000000/1d"]
    continue = true

    [[rule]]
    name = "addresses"
    key = "ip"
    limits = ["token-bucket 1000000/1s"]
    continue = true

    [[rule]]
    name = "users"
    key = "user"
    limits = ["token-bucket 1000000/1s", "fixed-window 1000000000/1d"]
"#;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    OneLimit,
    Owned,
    TwoLimits,
    OneShared,
    OwnCosts,
    TwoCalls,
    ByRule,
    TwoByRules,
    ThreeRules,
    WithId,
    GivenBack,
    BlockFor,
    CountedDenials,
    Denied,
    Permit,
    ThreeNodes,
    ThreeNodesTwoLimits,
    SeveralNodes,
    SeveralNodesDenied,
    InTurn,
    InTurnDenied,
}

use Variant::*;

/// The variants in the order of their turns, with their names in the table.
const VARIANTS: [(Variant, &str); 21] = [
    (OneLimit, "one limit"),
    (Owned, "one limit, by `acquire_owned`"),
    (TwoLimits, "two limits"),
    (OneShared, "two limits, of which all callers share one"),
    (OwnCosts, "two limits, each at its own cost"),
    (TwoCalls, "two calls as one, by `acquire_all`"),
    (ByRule, "one limit of a file's rule, by `call_by`"),
    (TwoByRules, "two requests to a file's rules as one, by `acquire_all_by`"),
    (ThreeRules, "three rules of a file, of four limits"),
    (WithId, "an acquire with an id"),
    (GivenBack, "the same, given back by its id"),
    (BlockFor, "`block_for`, allowed"),
    (CountedDenials, "counted denials, allowed"),
    (Denied, "counted denials, denied"),
    (Permit, "a permit, taken and given back"),
    (ThreeNodes, "three primaries: one limit"),
    (ThreeNodesTwoLimits, "three primaries: two limits"),
    (SeveralNodes, "three primaries: two limits, each by a key of its own"),
    (SeveralNodesDenied, "the same, of which one denies"),
    (InTurn, "three primaries: two calls, the second once the first is allowed"),
    (InTurnDenied, "the same, of which the first denies"),
];

impl Variant {
    /// What it is compared with.
    fn plain(self) -> Self {
        match self {
            ThreeNodes | ThreeNodesTwoLimits | SeveralNodes | SeveralNodesDenied | InTurn | InTurnDenied => ThreeNodes,
            _ => OneLimit,
        }
    }

    /// The throughput of 64 callers that is promised and wanted, as a part of the plain call's.
    fn promised(self) -> Option<(f64, f64)> {
        match self {
            OneLimit | Denied | ThreeNodes | SeveralNodesDenied | InTurn | InTurnDenied => None,
            SeveralNodes => Some((0.2, 0.3)),
            Owned => Some((0.8, 0.9)),
            Permit => Some((0.28, 0.35)),
            ByRule => Some((0.6, 0.8)),
            TwoCalls | TwoByRules | ThreeRules => Some((0.25, 0.35)),
            GivenBack => Some((0.16, 0.25)),
            WithId => Some((0.35, 0.5)),
            _ => Some((0.45, 0.5)),
        }
    }
}

struct Bench {
    keys: Vec<String>,
    /// How many ids were given to calls.
    ids: AtomicU64,
    of_one: Limiter,
    of_three: Limiter,
    plain: Rule,
    two: Rule,
    shared: Rule,
    own_costs: Rule,
    rules: RuleSet,
    /// One rule of one limit.
    by_user: RuleSet,
    blocking: Rule,
    counting: Rule,
    denying: Rule,
    permits: Rule,
    several: Rule,
    several_denying: Rule,
    other: Rule,
    other_denying: Rule,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let options = Options::read();
    let (one, three) = (server::Server::start(), server::Cluster::start(3));
    // Leaked, so that callers share it at no measurable cost.
    let bench: &Bench = Box::leak(Box::new(Bench::on(&one, &three)));
    let mut cells: Vec<Vec<String>> = VARIANTS.iter().map(|(_, name)| vec![(*name).to_owned()]).collect();
    let counts: Vec<_> = options.callers.iter().copied().filter(|count| *count != 16).collect();
    let mut targets = Targets::default();
    for count in &counts {
        eprintln!("other calls, callers: {count}");
        let variants = VARIANTS.iter().map(|(variant, _)| *variant);
        let slice = async |variant, time| bench.slice(variant, *count, time).await;
        let slices = in_turn(variants, options.rounds, options.slice, slice).await;
        let of = |variant: Variant, what: fn(&Slice) -> f64| {
            let at = VARIANTS.iter().position(|(one, _)| *one == variant).expect("a variant of the list");
            median(slices[at].iter().map(what))
        };
        for (cells, (variant, name)) in cells.iter_mut().zip(VARIANTS) {
            let (per_second, p99_us) = (of(variant, |slice| slice.per_second), of(variant, |slice| slice.p99_us));
            let rate = per_second / of(variant.plain(), |slice| slice.per_second);
            let p99 = p99_us / of(variant.plain(), |slice| slice.p99_us);
            if let (64, Some((promised, wanted))) = (*count, variant.promised()) {
                let what = format!("64 callers, {name}: throughput, x one limit there");
                targets.at_least(what, promised, rate).wanted(wanted);
            }
            cells.push(if variant == variant.plain() {
                format!("{per_second:.0} a second, p99 {} µs", short(p99_us))
            } else {
                format!("{} ({per_second:.0} a second), p99 {}", short(rate), short(p99))
            });
        }
    }
    let counts: Vec<_> = counts.iter().map(|count| format!("callers: {count}")).collect();
    let titles: Vec<_> = std::iter::once("").chain(counts.iter().map(String::as_str)).collect();
    println!(
        "## Other calls\n\n\
         Calls a second and the 99th percentile of their latency, as multiples of those of one limit on as many nodes.\n"
    );
    println!("{}", header(&titles));
    cells.iter().for_each(|cells| println!("{}", row(cells)));
    println!("\n{targets}");
}

impl Bench {
    fn on(one: &server::Server, three: &server::Cluster) -> Self {
        let limiter = |engine: Engine| Limiter::builder(engine).deadline(Duration::from_secs(5)).build();
        let tokens =
            "token-bucket 1000000000/1h".parse::<Limit>().and_then(|limit| limit.named("tokens")).expect("a limit");
        let everybody = "fixed-window 1000000000/1d".parse().expect("a limit");
        Self {
            keys: (0..KEYS).map(|key| format!("user:{key}")).collect(),
            ids: AtomicU64::new(0),
            of_one: limiter(Redis::open(&one.url()).expect("a good address").into()),
            of_three: limiter(Cluster::open(&three.url()).expect("a good address").into()),
            plain: rule(PLAIN),
            two: rule(TWO),
            shared: rule(PLAIN).and_by(EVERYBODY, everybody).expect("two limits"),
            own_costs: rule(PLAIN).and(tokens).expect("two limits"),
            rules: RULES.parse().expect("rules"),
            by_user: RuleSet::single(&rule(PLAIN).named("users").expect("a name"), "user").expect("rules"),
            blocking: rule(PLAIN).block_for(Duration::from_secs(60)).expect("a time"),
            counting: rule(PLAIN).count_overage(true),
            denying: rule("token-bucket 1/1h").count_overage(true),
            permits: rule("concurrency 10000 ttl 1m"),
            several: rule(PLAIN).and_by(OTHER, PLAIN.parse().expect("a limit")).expect("two limits"),
            several_denying: rule(PLAIN).and_by(OTHER, NONE.parse().expect("a limit")).expect("two limits"),
            other: rule(PLAIN).named("other").expect("a name"),
            other_denying: rule(NONE).named("denying").expect("a name"),
        }
    }

    /// One turn of a variant. Nobody may be denied, but by the rule that denies: its keys' first calls aside,
    /// everybody.
    async fn slice(&'static self, variant: Variant, count: usize, time: Duration) -> Slice {
        let key = |random: u64| self.keys[random as usize % KEYS].as_str();
        let slice = match variant {
            OneLimit => callers(count, time, move |random| acquire(&self.of_one, &self.plain, key(random))).await,
            Owned => callers(count, time, move |random| self.owned(key(random))).await,
            TwoLimits => callers(count, time, move |random| acquire(&self.of_one, &self.two, key(random))).await,
            OneShared => callers(count, time, move |random| self.shared(key(random))).await,
            OwnCosts => callers(count, time, move |random| self.at_own_costs(key(random), random)).await,
            TwoCalls => callers(count, time, move |random| self.two_calls(random)).await,
            ByRule => callers(count, time, move |random| self.by_rule(key(random))).await,
            TwoByRules => callers(count, time, move |random| self.two_by_rules(random)).await,
            ThreeRules => callers(count, time, move |random| self.by_rules(key(random), random)).await,
            WithId => callers(count, time, move |random| self.with_id(key(random))).await,
            GivenBack => callers(count, time, move |random| self.given_back(key(random))).await,
            BlockFor => callers(count, time, move |random| acquire(&self.of_one, &self.blocking, key(random))).await,
            CountedDenials => {
                callers(count, time, move |random| acquire(&self.of_one, &self.counting, key(random))).await
            }
            Denied => callers(count, time, move |random| acquire(&self.of_one, &self.denying, key(random))).await,
            Permit => callers(count, time, move |random| self.held(key(random))).await,
            ThreeNodes => callers(count, time, move |random| acquire(&self.of_three, &self.plain, key(random))).await,
            ThreeNodesTwoLimits => {
                callers(count, time, move |random| acquire(&self.of_three, &self.two, key(random))).await
            }
            SeveralNodes => callers(count, time, move |random| self.by_two_keys(&self.several, random)).await,
            SeveralNodesDenied => {
                callers(count, time, move |random| self.by_two_keys(&self.several_denying, random)).await
            }
            InTurn => callers(count, time, move |random| self.in_turn(&self.other, random)).await,
            InTurnDenied => callers(count, time, move |random| self.in_turn(&self.other_denying, random)).await,
        };
        let denied = slice.calls - slice.allowed;
        match variant {
            Denied | SeveralNodesDenied | InTurnDenied => {
                assert!(slice.allowed <= KEYS as u64, "{count} callers: {} were allowed", slice.allowed)
            }
            _ => assert_eq!(denied, 0, "{variant:?} denied some of {count} callers"),
        }
        slice
    }

    async fn owned(&self, key: &str) -> bool {
        self.of_one.acquire_owned(&self.plain, key).await.expect("a decision").allowed
    }

    async fn shared(&self, key: &str) -> bool {
        let request = Request::new(key).parts(&[(EVERYBODY, b"all")]);
        self.of_one.acquire(&self.shared, request).await.expect("a decision").allowed
    }

    async fn at_own_costs(&self, key: &str, random: u64) -> bool {
        let costs = [("tokens", random % 1000)];
        self.of_one.acquire(&self.own_costs, Request::new(key).costs(&costs)).await.expect("a decision").allowed
    }

    /// All or nothing.
    async fn two_calls(&self, random: u64) -> bool {
        let [key, other] = self.two_keys(random);
        let decisions = self.of_one.acquire_all([(&self.plain, key), (&self.other, other)]).await.expect("decisions");
        decisions.iter().all(|decision| decision.allowed)
    }

    async fn by_rule(&self, user: &str) -> bool {
        let request = Attributes::new().user(user);
        self.of_one.call_by(Operation::Acquire, &self.by_user, &request).await.expect("a verdict").allowed
    }

    /// All or nothing.
    async fn two_by_rules(&self, random: u64) -> bool {
        let requests = self.two_keys(random).map(|user| Attributes::new().user(user));
        let verdicts = self.of_one.acquire_all_by(&self.by_user, &requests).await.expect("verdicts");
        verdicts.iter().all(|verdict| verdict.allowed)
    }

    async fn by_rules(&self, user: &str, random: u64) -> bool {
        let address = IpAddr::from([10, 0, (random >> 8) as u8, random as u8]);
        let request = Attributes::new().user(user).ip(address);
        self.of_one.acquire_by(&self.rules, &request).await.expect("a verdict").allowed
    }

    async fn by_two_keys(&self, rule: &Rule, random: u64) -> bool {
        let [key, other] = self.two_keys(random);
        let parts = [(OTHER, other.as_bytes())];
        self.of_three.acquire(rule, Request::new(key).parts(&parts)).await.expect("a decision").allowed
    }

    /// What asking first the limit that denies would gain and cost at best: no ids, and nothing given back where the
    /// second denies.
    async fn in_turn(&self, first: &Rule, random: u64) -> bool {
        let [key, other] = self.two_keys(random);
        acquire(&self.of_three, first, other).await && acquire(&self.of_three, &self.plain, key).await
    }

    fn two_keys(&self, random: u64) -> [&str; 2] {
        [random, random >> 20].map(|random| self.keys[random as usize % KEYS].as_str())
    }

    /// By an id of its own, which is remembered for a second.
    async fn with_id(&self, key: &str) -> bool {
        let id = self.new_id();
        let request = Request::new(key).id(&id).id_ttl(Duration::from_secs(1));
        self.of_one.acquire(&self.plain, request).await.expect("a decision").allowed
    }

    /// As a rule that counts by the response does for a response that doesn't count.
    async fn given_back(&self, key: &str) -> bool {
        let id = self.new_id();
        let request = Request::new(key).id(&id).id_ttl(Duration::from_secs(3600));
        let allowed = self.of_one.acquire(&self.plain, request).await.expect("a decision").allowed;
        allowed && self.of_one.settle(&self.plain, request.cost(0)).await.is_ok()
    }

    /// Callers draw the same numbers in every turn, so these would be ids of calls that Redis remembers.
    fn new_id(&self) -> [u8; 8] {
        self.ids.fetch_add(1, Relaxed).to_le_bytes()
    }

    async fn held(&self, key: &str) -> bool {
        let held = self.of_one.hold(&self.permits, key).await.expect("a decision");
        match held.into_result() {
            Ok(permit) => permit.release().await.is_ok(),
            Err(_) => false,
        }
    }
}

async fn acquire(limiter: &Limiter, rule: &Rule, key: &str) -> bool {
    limiter.acquire(rule, key).await.expect("a decision").allowed
}
