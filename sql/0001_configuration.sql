-- Configuration: rules, users and API keys. Read into every process, never on the path of a decision.
--
-- `tollgate db migrate` runs this file in the schema `tollgate`. What changes here reaches every process by NOTIFY on the
-- channel `tollgate`, whose payload is the new version of the configuration.

-- One row: which version this is, and what all rules share.
CREATE TABLE tollgate.configuration (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- Grows with each change: a process that lost its connection compares it with what it has.
    version bigint NOT NULL DEFAULT 1,
    -- What a file of rules says beside rules, such as `paths`, as JSON.
    settings jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(settings) = 'object'),
    changed_at timestamptz NOT NULL DEFAULT now()
);

INSERT INTO tollgate.configuration DEFAULT VALUES;

-- Rules as a file has them, field by field. What a rule says is one value, so that nothing is lost between a file and here:
-- definition ->> 'priority', definition -> 'match' ->> 'tier'.
CREATE TABLE tollgate.rate_limit_rules (
    name text PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9._-]{1,64}$'),
    -- In its file: of rules of one priority, the first applies.
    place integer NOT NULL,
    definition jsonb NOT NULL CHECK (jsonb_typeof(definition) = 'object' AND definition ->> 'name' = name),
    enabled boolean NOT NULL DEFAULT true,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    updated_by text NOT NULL DEFAULT current_user CHECK (octet_length(updated_by) <= 256)
);

-- What single users may, in place of their tier's limits; whether they are blocked; and what they have used.
CREATE TABLE tollgate.user_quotas (
    user_id text PRIMARY KEY CHECK (octet_length(user_id) BETWEEN 1 AND 512),
    tier text CHECK (octet_length(tier) <= 64),
    -- Units; none: as the tier says.
    per_hour bigint CHECK (per_hour BETWEEN 1 AND 9007199254740992),
    per_day bigint CHECK (per_day BETWEEN 1 AND 9007199254740992),
    burst bigint CHECK (burst BETWEEN 1 AND 9007199254740992),
    blocked boolean NOT NULL DEFAULT false,
    blocked_reason text CHECK (octet_length(blocked_reason) <= 1024),
    -- None: until it is lifted.
    blocked_until timestamptz,
    -- Totals, added in batches. Those of another day or month than now's count as none.
    today date,
    total_today bigint NOT NULL DEFAULT 0,
    this_month date CHECK (extract(day FROM this_month) = 1),
    total_this_month bigint NOT NULL DEFAULT 0,
    times_exceeded bigint NOT NULL DEFAULT 0,
    last_request_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    updated_by text NOT NULL DEFAULT current_user CHECK (octet_length(updated_by) <= 256),
    CHECK (blocked OR (blocked_reason IS NULL AND blocked_until IS NULL))
);

-- Those whom a process must know of: the others are as their tier says.
CREATE INDEX user_quotas_special ON tollgate.user_quotas (user_id)
    WHERE blocked OR tier IS NOT NULL OR per_hour IS NOT NULL OR per_day IS NOT NULL OR burst IS NOT NULL;

-- API keys, by the SHA-256 of the whole key: who reads this table can't use them.
CREATE TABLE tollgate.api_keys (
    -- What stands in the key before its secret, and may be shown.
    key_id text PRIMARY KEY CHECK (octet_length(key_id) BETWEEN 1 AND 64),
    hash bytea NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    user_id text NOT NULL CHECK (octet_length(user_id) BETWEEN 1 AND 512),
    name text NOT NULL DEFAULT '' CHECK (octet_length(name) <= 256),
    tier text CHECK (octet_length(tier) <= 64),
    per_second bigint CHECK (per_second BETWEEN 1 AND 9007199254740992),
    per_hour bigint CHECK (per_hour BETWEEN 1 AND 9007199254740992),
    per_day bigint CHECK (per_day BETWEEN 1 AND 9007199254740992),
    burst bigint CHECK (burst BETWEEN 1 AND 9007199254740992),
    total bigint NOT NULL DEFAULT 0,
    last_used_at timestamptz,
    expires_at timestamptz,
    revoked_at timestamptz,
    revoked_by text CHECK (octet_length(revoked_by) <= 256),
    -- The key that it was made to replace.
    replaces text REFERENCES tollgate.api_keys (key_id),
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text NOT NULL DEFAULT current_user CHECK (octet_length(created_by) <= 256),
    CHECK (revoked_at IS NOT NULL OR revoked_by IS NULL)
);

-- `tollgate keys list --user U`.
CREATE INDEX api_keys_by_user ON tollgate.api_keys (user_id, created_at);

-- A change of the configuration is a new version, and is told to all who listen. Batches of totals are no change.
CREATE FUNCTION tollgate.changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    now_version bigint;
BEGIN
    UPDATE tollgate.configuration SET version = version + 1, changed_at = now() RETURNING version INTO now_version;
    PERFORM pg_notify('tollgate', now_version::text);
    RETURN NULL;
END
$$;

CREATE TRIGGER changed AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE ON tollgate.rate_limit_rules
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.changed();
CREATE TRIGGER changed AFTER INSERT OR DELETE OR TRUNCATE
    OR UPDATE OF user_id, tier, per_hour, per_day, burst, blocked, blocked_reason, blocked_until ON tollgate.user_quotas
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.changed();
CREATE TRIGGER changed AFTER INSERT OR DELETE OR TRUNCATE
    OR UPDATE OF key_id, hash, user_id, name, tier, per_second, per_hour, per_day, burst, expires_at, revoked_at
    ON tollgate.api_keys
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.changed();
