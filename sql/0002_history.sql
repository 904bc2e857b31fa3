-- History: what was decided, and what it comes to. Written in batches, never on the path of a decision.
--
-- Both tables are partitioned by month, in UTC, so that old months leave as a whole. There is no default partition: with one,
-- PostgreSQL refuses to detach others while the table is in use.

-- One row for each decision. What is asked of it: why was this user denied, then?
CREATE TABLE tollgate.rate_limit_audit_logs (
    at timestamptz NOT NULL,
    user_id text,
    -- The key's id.
    api_key text,
    ip inet,
    -- The route that matched or, where that isn't known, the path.
    endpoint text,
    method text,
    rule text,
    decision text NOT NULL CHECK (decision IN ('allowed', 'throttled', 'blocked')),
    -- Units that were taken by the limit that decided, after this decision, and the most that it admits at once.
    used bigint,
    capacity bigint,
    -- The HTTP status, where the middleware has answered.
    status smallint,
    -- Microseconds until it would have been allowed; -1: never.
    retry_after_us bigint,
    region text,
    server text,
    -- Microseconds that the decision took.
    latency_us bigint
) PARTITION BY RANGE (at);

-- `tollgate audit --user U --at T`.
CREATE INDEX rate_limit_audit_logs_by_user ON tollgate.rate_limit_audit_logs (user_id, at);

-- What decisions come to, by the minute, the hour and the day.
CREATE TABLE tollgate.rate_limit_metrics (
    width text NOT NULL CHECK (width IN ('minute', 'hour', 'day')),
    -- When the minute, hour or day began.
    began timestamptz NOT NULL,
    -- Empty: where that isn't known.
    user_id text NOT NULL DEFAULT '',
    endpoint text NOT NULL DEFAULT '',
    region text NOT NULL DEFAULT '',
    allowed bigint NOT NULL DEFAULT 0,
    throttled bigint NOT NULL DEFAULT 0,
    blocked bigint NOT NULL DEFAULT 0,
    -- Decisions that this process made without asking Redis, and those that it asked for.
    cache_hits bigint NOT NULL DEFAULT 0,
    cache_misses bigint NOT NULL DEFAULT 0,
    -- A histogram of how long decisions took, from which every percentile can be had, also of several rows together.
    latency bytea,
    -- Also the index by which a time is read.
    PRIMARY KEY (width, began, user_id, endpoint, region)
) PARTITION BY RANGE (began);

-- Makes the partitions of this month and of so many after it, where they are missing; answers how many that were.
CREATE FUNCTION tollgate.make_partitions(months_ahead integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    this_month timestamp = date_trunc('month', now() AT TIME ZONE 'UTC');
    month timestamp;
    partition_name text;
    parent text;
    made integer = 0;
BEGIN
    FOR month IN SELECT generate_series(this_month, this_month + months_ahead * interval '1 month', interval '1 month') LOOP
        FOREACH parent IN ARRAY ARRAY['rate_limit_audit_logs', 'rate_limit_metrics'] LOOP
            partition_name = parent || to_char(month, '_YYYY_MM');
            IF to_regclass('tollgate.' || partition_name) IS NULL THEN
                EXECUTE format('CREATE TABLE tollgate.%I PARTITION OF tollgate.%I FOR VALUES FROM (%L) TO (%L)',
                    partition_name, parent, month AT TIME ZONE 'UTC', (month + interval '1 month') AT TIME ZONE 'UTC');
                made = made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;

SELECT tollgate.make_partitions(2);
