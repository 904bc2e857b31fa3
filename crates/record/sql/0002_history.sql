-- History: what was decided, and what it comes to. Written in batches, never on the path of a decision.
--
-- Partitioned by month, in UTC, so that old months leave as a whole. There is no default partition: with one, PostgreSQL
-- refuses to detach others while the table is in use.

-- One row for each decision. What is asked of it: why was this user denied, then?
CREATE TABLE tollgate.rate_limit_audit_logs (
    -- When it was decided, by the clock of the service.
    at timestamptz NOT NULL,
    user_id text,
    -- The key's id.
    api_key text,
    ip inet,
    -- The route that matched or, where that isn't known, the path.
    endpoint text,
    method text,
    rule text,
    -- blocked: by a rule, of a user, of a key for a time, or for want of an attribute that its rule counts by.
    decision text NOT NULL CHECK (decision IN ('allowed', 'throttled', 'blocked')),
    -- Which of these: no-rule, allowed, blocked, user-blocked, missing or limits.
    reason text NOT NULL,
    -- The limit that denied or, of what was allowed, the one with the least left: its name or its text.
    limited_by text,
    -- Units of it that are taken after this decision, and the most that can be.
    used bigint,
    capacity bigint,
    -- The HTTP status, where the middleware has answered.
    status smallint,
    -- Microseconds until it would be allowed; -1: never.
    retry_after_us bigint,
    region text,
    server text,
    -- Microseconds that the decision took.
    latency_us bigint NOT NULL,
    -- All rules that applied, in their order, separated by commas, if several did: `rule` is that of `limited_by`.
    rules text,
    -- As services cut them off: a row of any size would have to be sorted, and archived.
    CONSTRAINT texts_are_bounded CHECK (
        octet_length(user_id) <= 512 AND octet_length(api_key) <= 512 AND octet_length(endpoint) <= 512
        AND octet_length(method) <= 32 AND octet_length(rule) <= 512 AND octet_length(reason) <= 64
        AND octet_length(limited_by) <= 512 AND octet_length(region) <= 256 AND octet_length(server) <= 256
        AND octet_length(rules) <= 512)
) PARTITION BY RANGE (at);

-- Locked by whoever archives, so that two don't at once: nobody but its owner can. It has no rows.
CREATE TABLE tollgate.archive_lock ();

-- `tollgate audit --user U --at T`, and the archive's order.
CREATE INDEX rate_limit_audit_logs_by_user ON tollgate.rate_limit_audit_logs (user_id, at);

-- How long decisions took, as counts by bucket, which can be added up: a percentile of many rows is that of their sum. Bucket
-- n holds what took more than 2^((n-1)/16) and at most 2^(n/16) microseconds, bucket 0 what took up to one: those of
-- Prometheus's native histograms of schema 4. A bucket may appear more than once, and its count is the sum: histograms are
-- merged by appending, which is cheap, and compacted once they exceed 128 entries.
CREATE TYPE tollgate.histogram AS (buckets smallint[], counts bigint[]);

-- What decisions come to, by the minute, the hour and the day.
CREATE TABLE tollgate.rate_limit_metrics (
    width text NOT NULL CHECK (width IN ('minute', 'hour', 'day')),
    -- When the minute, hour or day began, in UTC.
    began timestamptz NOT NULL,
    -- Empty: where that isn't known, or there were too many to tell them apart.
    user_id text NOT NULL CHECK (octet_length(user_id) <= 512),
    endpoint text NOT NULL CHECK (octet_length(endpoint) <= 512),
    region text NOT NULL CHECK (octet_length(region) <= 256),
    -- Counts that would be larger than their type holds stay at the largest number.
    allowed bigint NOT NULL CHECK (allowed >= 0),
    throttled bigint NOT NULL CHECK (throttled >= 0),
    blocked bigint NOT NULL CHECK (blocked >= 0),
    -- Decisions that the process made from denials that it remembers or units that it leased, and those that Redis made.
    cache_hits bigint NOT NULL CHECK (cache_hits >= 0),
    cache_misses bigint NOT NULL CHECK (cache_misses >= 0),
    -- Others could not be added to. A check of NULL passes, so none is left of it.
    latency tollgate.histogram NOT NULL CONSTRAINT latency_is_a_histogram CHECK ((
        array_ndims((latency).buckets) = 1 AND array_ndims((latency).counts) = 1
        AND cardinality((latency).buckets) = cardinality((latency).counts) AND cardinality((latency).buckets) <= 2048
        AND 0 <= ALL ((latency).buckets) AND 1024 >= ALL ((latency).buckets) AND 0 <= ALL ((latency).counts)) IS TRUE),
    -- Also the index by which a time is read.
    PRIMARY KEY (width, began, user_id, endpoint, region)
) PARTITION BY LIST (width);

CREATE TABLE tollgate.rate_limit_metrics_minute PARTITION OF tollgate.rate_limit_metrics
    FOR VALUES IN ('minute') PARTITION BY RANGE (began);
CREATE TABLE tollgate.rate_limit_metrics_hour PARTITION OF tollgate.rate_limit_metrics
    FOR VALUES IN ('hour') PARTITION BY RANGE (began);
CREATE TABLE tollgate.rate_limit_metrics_day PARTITION OF tollgate.rate_limit_metrics
    FOR VALUES IN ('day') PARTITION BY RANGE (began);

-- These functions are for anybody's queries, so nothing in them depends on a caller's search path: what somebody else has put
-- there would run with the caller's rights.

-- The same with each bucket once, in their order.
CREATE FUNCTION tollgate.summed(latency tollgate.histogram) RETURNS tollgate.histogram
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT ROW(array_agg(bucket ORDER BY bucket), array_agg(count ORDER BY bucket))::tollgate.histogram
    FROM (
        SELECT bucket, least(sum(count), 9223372036854775807)::bigint AS count
        FROM unnest((latency).buckets, (latency).counts) AS each (bucket, count) GROUP BY bucket
    ) AS summed;
END;

-- Two histograms as one.
CREATE FUNCTION tollgate.added(a tollgate.histogram, b tollgate.histogram) RETURNS tollgate.histogram
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    joined tollgate.histogram =
        ROW(a.buckets OPERATOR(pg_catalog.||) b.buckets, a.counts OPERATOR(pg_catalog.||) b.counts);
BEGIN
    IF pg_catalog.cardinality(joined.buckets) OPERATOR(pg_catalog.<=) 128 THEN
        RETURN joined;
    END IF;
    RETURN tollgate.summed(joined);
END
$$;

-- Of many rows: `tollgate.total(latency)`.
CREATE AGGREGATE tollgate.total(tollgate.histogram) (
    SFUNC = tollgate.added, STYPE = tollgate.histogram, COMBINEFUNC = tollgate.added, PARALLEL = SAFE
);

-- What so large a share of a histogram's decisions took at most, in microseconds: the middle of its bucket, within 2.2 %.
CREATE FUNCTION tollgate.percentile(latency tollgate.histogram, share double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT CASE bucket WHEN 0 THEN 1 ELSE 2 ^ ((bucket - 0.5) / 16) END
    FROM (
        SELECT bucket, sum(sum(count)) OVER (ORDER BY bucket) AS so_far, sum(sum(count)) OVER () AS everything
        FROM unnest((latency).buckets, (latency).counts) AS each (bucket, count) GROUP BY bucket
    ) AS cumulated
    WHERE so_far >= greatest(1, ceil(everything * share))
    ORDER BY bucket LIMIT 1;
END;

-- Makes the missing partitions of last month, this month and `months_ahead` months after it (0 to 24, else an error).
-- Returns how many it made. Runs with its owner's rights, so that services need only the right to call it. Partitions are
-- made apart and then attached, so that nobody who reads or writes the others waits.
CREATE FUNCTION tollgate.make_partitions(months_ahead integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
DECLARE
    this_month timestamp = date_trunc('month', now() AT TIME ZONE 'UTC');
    last_month timestamp;
    month timestamp;
    parent text;
    partition_name text;
    made integer = 0;
BEGIN
    IF (months_ahead BETWEEN 0 AND 24) IS NOT TRUE THEN
        RAISE EXCEPTION 'make_partitions: expected 0 to 24 months ahead, got %', months_ahead
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    last_month = this_month + months_ahead * interval '1 month';
    FOR month IN SELECT generate_series(this_month - interval '1 month', last_month, interval '1 month') LOOP
        FOREACH parent IN ARRAY ARRAY['rate_limit_audit_logs', 'rate_limit_metrics_minute', 'rate_limit_metrics_hour',
            'rate_limit_metrics_day'] LOOP
            partition_name = parent || to_char(month, '_YYYY_MM');
            IF to_regclass('tollgate.' || partition_name) IS NULL THEN
                -- Whoever comes second finds it made.
                EXECUTE format('LOCK TABLE tollgate.%I IN SHARE UPDATE EXCLUSIVE MODE', parent);
                CONTINUE WHEN to_regclass('tollgate.' || partition_name) IS NOT NULL;
                EXECUTE format('CREATE TABLE tollgate.%I (LIKE tollgate.%I INCLUDING DEFAULTS INCLUDING CONSTRAINTS)',
                    partition_name, parent);
                EXECUTE format('ALTER TABLE tollgate.%I ATTACH PARTITION tollgate.%I FOR VALUES FROM (%L) TO (%L)',
                    parent, partition_name, month AT TIME ZONE 'UTC', (month + interval '1 month') AT TIME ZONE 'UTC');
                made = made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;

REVOKE EXECUTE ON FUNCTION tollgate.make_partitions(integer) FROM PUBLIC;

SELECT tollgate.make_partitions(2);
