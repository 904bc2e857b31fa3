-- Configuration: rules, users and API keys. Read into every process, never on the path of a decision.
--
-- `tollgate db migrate` runs this file in the schema `tollgate`. What changes here reaches every process by NOTIFY on the
-- channel `tollgate`, whose payload is the new version of the configuration.
--
-- Triggers run with the rights of whoever changes a row. What a session can set (settings, search_path, temporary tables)
-- decides neither who may change what, which is grants alone, nor whether a change is a new version.

-- One row: which version this is, and what all rules share.
CREATE TABLE tollgate.configuration (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- Grows by one with each transaction that changes rules, users or keys. Such transactions commit one after the other,
    -- so a reader of version N sees every change up to N.
    version bigint NOT NULL DEFAULT 1,
    -- The version in which rules last changed.
    rules_version bigint NOT NULL DEFAULT 1,
    -- What was deleted up to this version isn't in `deletions`, or not any more: processes with an older one read all users
    -- and keys anew.
    truncated_version bigint NOT NULL DEFAULT 1,
    -- The transaction that made this version, known by its number and, since numbers come round again after a restore, by
    -- its time: what else it changes is of the same version.
    changed_in xid8,
    -- Which history this is. After a restore to an earlier moment another one begins, since versions come round again.
    history uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Authenticates what processes cache in Redis: whoever has this secret and may write there can be any user. To make
    -- another one: UPDATE tollgate.configuration SET cache_secret = DEFAULT.
    cache_secret bytea NOT NULL DEFAULT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
        CHECK (octet_length(cache_secret) BETWEEN 16 AND 1024),
    -- Checksums of API keys are made with it. With another one, no key that was made before is valid.
    key_secret bytea NOT NULL DEFAULT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
        CHECK (octet_length(key_secret) BETWEEN 16 AND 1024),
    -- What a file of rules says beside rules, such as `paths`, as JSON.
    settings jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(settings) = 'object'),
    changed_at timestamptz NOT NULL DEFAULT now()
);

INSERT INTO tollgate.configuration DEFAULT VALUES;

-- The versions of the last day and the one before them, each with a mark that no other has: a process that knows a version
-- finds out whether it is in the past of this database, or of one that was restored to an earlier moment.
CREATE TABLE tollgate.versions (
    version bigint PRIMARY KEY,
    mark uuid NOT NULL DEFAULT gen_random_uuid(),
    made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

INSERT INTO tollgate.versions (version) SELECT version FROM tollgate.configuration;

-- Those of the day before.
CREATE INDEX versions_by_time ON tollgate.versions (made_at);

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
    burst bigint CHECK (burst IS NULL OR (burst BETWEEN 1 AND 9007199254740992 AND per_hour IS NOT NULL)),
    blocked boolean NOT NULL DEFAULT false,
    blocked_reason text CHECK (octet_length(blocked_reason) <= 1024),
    -- None: until it is lifted.
    blocked_until timestamptz,
    -- Totals, added in batches. Those of another day or month than now's count as none.
    today date CHECK (isfinite(today)),
    total_today bigint NOT NULL DEFAULT 0 CHECK (total_today >= 0),
    this_month date CHECK (extract(day FROM this_month) = 1),
    total_this_month bigint NOT NULL DEFAULT 0 CHECK (total_this_month >= 0),
    times_exceeded bigint NOT NULL DEFAULT 0 CHECK (times_exceeded >= 0),
    last_request_at timestamptz CHECK (isfinite(last_request_at)),
    -- In which anything but the totals last changed; none if nothing but them was ever set.
    version bigint,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    updated_by text NOT NULL DEFAULT current_user CHECK (octet_length(updated_by) <= 256),
    CHECK (blocked OR (blocked_reason IS NULL AND blocked_until IS NULL))
);

-- What has changed since a version, and the users that need an entry in each process.
CREATE INDEX user_quotas_by_version ON tollgate.user_quotas (version) WHERE version IS NOT NULL;

-- API keys, with the SHA-256 of each instead of the key: a reader of this table cannot use the keys.
CREATE TABLE tollgate.api_keys (
    -- What stands in the key before its secret, and may be shown.
    key_id text PRIMARY KEY CHECK (octet_length(key_id) BETWEEN 1 AND 64),
    -- SHA-256 of the whole key.
    hash bytea NOT NULL CHECK (octet_length(hash) = 32),
    user_id text NOT NULL CHECK (octet_length(user_id) BETWEEN 1 AND 512),
    name text NOT NULL DEFAULT '' CHECK (octet_length(name) <= 256),
    tier text CHECK (octet_length(tier) <= 64),
    per_second bigint CHECK (per_second BETWEEN 1 AND 9007199254740992),
    per_hour bigint CHECK (per_hour BETWEEN 1 AND 9007199254740992),
    per_day bigint CHECK (per_day BETWEEN 1 AND 9007199254740992),
    burst bigint CHECK (
        burst IS NULL OR (burst BETWEEN 1 AND 9007199254740992 AND coalesce(per_second, per_hour) IS NOT NULL)),
    -- Requests that were allowed, and when the last one came, added in batches.
    total bigint NOT NULL DEFAULT 0 CHECK (total >= 0),
    last_used_at timestamptz CHECK (isfinite(last_used_at)),
    expires_at timestamptz,
    revoked_at timestamptz,
    revoked_by text CHECK (octet_length(revoked_by) <= 256),
    -- The key that it was made to replace.
    replaces text REFERENCES tollgate.api_keys (key_id),
    -- In which anything but total and last_used_at last changed.
    version bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text NOT NULL DEFAULT current_user CHECK (octet_length(created_by) <= 256),
    CHECK (revoked_at IS NOT NULL OR revoked_by IS NULL)
);

-- `tollgate keys list --user U`.
CREATE INDEX api_keys_by_user ON tollgate.api_keys (user_id, created_at);

-- A key's successor, and whether a key may be deleted.
CREATE INDEX api_keys_by_replaces ON tollgate.api_keys (replaces) WHERE replaces IS NOT NULL;

-- What has changed since a version.
CREATE INDEX api_keys_by_version ON tollgate.api_keys (version);

-- Users and keys that were deleted, for processes that know them. They are kept for as long as the version before them is in
-- tollgate.versions: a process that knows an older one reads everything anew.
CREATE TABLE tollgate.deletions (
    version bigint NOT NULL,
    user_id text,
    key_id text
);

-- What has changed since a version.
CREATE INDEX deletions_by_version ON tollgate.deletions (version);

-- The services that write totals or history: a batch that is tried again after a lost connection isn't added twice, and one
-- that ended without writing its last batch is known by its name.
CREATE TABLE tollgate.writers (
    writer text PRIMARY KEY CHECK (octet_length(writer) BETWEEN 1 AND 256),
    writes text NOT NULL CHECK (writes IN ('totals', 'history')),
    -- Where it connects from.
    client inet DEFAULT inet_client_addr(),
    -- Number of the last batch that was written, and its mark: drawn for each batch, so that nobody can know it before.
    -- A service that finds others here than it has written or sent goes on under another name.
    batch bigint NOT NULL DEFAULT 0 CHECK (batch >= 0),
    mark bigint NOT NULL DEFAULT 0,
    requests bigint NOT NULL DEFAULT 0 CHECK (requests >= 0),
    -- Requests that this service knows it has lost.
    lost bigint NOT NULL DEFAULT 0 CHECK (lost >= 0),
    started_at timestamptz NOT NULL DEFAULT now(),
    written_at timestamptz NOT NULL DEFAULT now() CHECK (isfinite(written_at)),
    -- When it had written everything and stopped, or, of one that was killed, when it was last heard of.
    ended_at timestamptz CHECK (isfinite(ended_at)),
    -- Whether it was not heard of any more before it had written everything: its last batch is lost.
    killed boolean NOT NULL DEFAULT false
);

-- The version of this transaction: one more than before it, and everybody who listens hears of it on commit.
CREATE FUNCTION tollgate.next_version() RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_version bigint;
BEGIN
    SELECT version INTO now_version FROM tollgate.configuration
        WHERE changed_in = pg_current_xact_id() AND changed_at = now();
    IF NOT FOUND THEN
        UPDATE tollgate.configuration
            SET version = version + 1, changed_in = pg_current_xact_id(), changed_at = now()
            RETURNING version INTO now_version;
        INSERT INTO tollgate.versions (version) VALUES (now_version)
            ON CONFLICT (version) DO UPDATE SET mark = gen_random_uuid(), made_at = clock_timestamp();
        -- A version is superseded when the next one is made, so the newest of the old ones stays.
        DELETE FROM tollgate.versions WHERE version < (
            SELECT version FROM tollgate.versions WHERE made_at < now() - interval '1 day'
            ORDER BY made_at DESC LIMIT 1);
        DELETE FROM tollgate.deletions WHERE version <= (SELECT min(version) FROM tollgate.versions);
        PERFORM pg_notify('tollgate', now_version::text);
    END IF;
    RETURN now_version;
END
$$;

CREATE FUNCTION tollgate.rules_changed() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_version bigint = tollgate.next_version();
BEGIN
    UPDATE tollgate.configuration SET rules_version = now_version;
    RETURN NULL;
END
$$;

CREATE FUNCTION tollgate.row_changed() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.version = tollgate.next_version();
    RETURN NEW;
END
$$;

-- Of a statement that deletes or renames: those names that are gone.
CREATE FUNCTION tollgate.users_gone() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM before WHERE version IS NOT NULL) THEN
        INSERT INTO tollgate.deletions (version, user_id)
            SELECT tollgate.next_version(), user_id FROM before WHERE version IS NOT NULL;
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION tollgate.keys_gone() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM before) THEN
        INSERT INTO tollgate.deletions (version, key_id) SELECT tollgate.next_version(), key_id FROM before;
    END IF;
    RETURN NULL;
END
$$;

-- Of one row that gets another name.
CREATE FUNCTION tollgate.user_renamed() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tollgate.deletions (version, user_id) VALUES (tollgate.next_version(), OLD.user_id);
    RETURN NULL;
END
$$;

CREATE FUNCTION tollgate.key_renamed() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tollgate.deletions (version, key_id) VALUES (tollgate.next_version(), OLD.key_id);
    RETURN NULL;
END
$$;

CREATE FUNCTION tollgate.rows_truncated() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now_version bigint = tollgate.next_version();
BEGIN
    UPDATE tollgate.configuration SET truncated_version = now_version;
    RETURN NULL;
END
$$;

CREATE TRIGGER changed AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE ON tollgate.rate_limit_rules
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.rules_changed();
CREATE TRIGGER changed AFTER UPDATE OF settings ON tollgate.configuration
    FOR EACH ROW WHEN (OLD.settings IS DISTINCT FROM NEW.settings) EXECUTE FUNCTION tollgate.rules_changed();

-- Batches of totals change no version, also where they make a user's row. A version that a statement sets itself is
-- replaced.
CREATE TRIGGER inserted BEFORE INSERT ON tollgate.user_quotas
    FOR EACH ROW WHEN (NEW.blocked OR num_nonnulls(NEW.tier, NEW.per_hour, NEW.per_day, NEW.burst, NEW.version) > 0)
    EXECUTE FUNCTION tollgate.row_changed();
CREATE TRIGGER updated BEFORE UPDATE ON tollgate.user_quotas
    FOR EACH ROW WHEN (
        (OLD.user_id, OLD.tier, OLD.per_hour, OLD.per_day, OLD.burst, OLD.blocked, OLD.blocked_reason, OLD.blocked_until,
            OLD.version)
        IS DISTINCT FROM
        (NEW.user_id, NEW.tier, NEW.per_hour, NEW.per_day, NEW.burst, NEW.blocked, NEW.blocked_reason, NEW.blocked_until,
            NEW.version))
    EXECUTE FUNCTION tollgate.row_changed();
CREATE TRIGGER renamed AFTER UPDATE OF user_id ON tollgate.user_quotas
    FOR EACH ROW WHEN (OLD.user_id <> NEW.user_id) EXECUTE FUNCTION tollgate.user_renamed();
CREATE TRIGGER deleted AFTER DELETE ON tollgate.user_quotas REFERENCING OLD TABLE AS before
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.users_gone();
CREATE TRIGGER truncated AFTER TRUNCATE ON tollgate.user_quotas
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.rows_truncated();

CREATE TRIGGER inserted BEFORE INSERT ON tollgate.api_keys
    FOR EACH ROW EXECUTE FUNCTION tollgate.row_changed();
CREATE TRIGGER updated BEFORE UPDATE ON tollgate.api_keys
    FOR EACH ROW WHEN (
        (OLD.key_id, OLD.hash, OLD.user_id, OLD.tier, OLD.per_second, OLD.per_hour, OLD.per_day, OLD.burst,
            OLD.expires_at, OLD.revoked_at, OLD.version)
        IS DISTINCT FROM
        (NEW.key_id, NEW.hash, NEW.user_id, NEW.tier, NEW.per_second, NEW.per_hour, NEW.per_day, NEW.burst,
            NEW.expires_at, NEW.revoked_at, NEW.version))
    EXECUTE FUNCTION tollgate.row_changed();
CREATE TRIGGER renamed AFTER UPDATE OF key_id ON tollgate.api_keys
    FOR EACH ROW WHEN (OLD.key_id <> NEW.key_id) EXECUTE FUNCTION tollgate.key_renamed();
CREATE TRIGGER deleted AFTER DELETE ON tollgate.api_keys REFERENCING OLD TABLE AS before
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.keys_gone();
CREATE TRIGGER truncated AFTER TRUNCATE ON tollgate.api_keys
    FOR EACH STATEMENT EXECUTE FUNCTION tollgate.rows_truncated();
