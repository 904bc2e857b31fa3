"""Decides by tollgate's script token_bucket, for the rule `api`, which is `token-bucket 100/1m burst 20`.

    python3 token_bucket.py USER COST...

Needs `pip install redis`, and token_bucket.lua in the working directory. REDIS_URL names the Redis.
"""

import os
import re
import sys

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

RULE = (20, 1, 600_000, 1, 0)  # capacity, rate, period, tick, max_debt: 1 unit per 600000 us, up to 20 at once
DEADLINE = 0.5  # seconds to connect, and for each answer
ALLOWED_WITHOUT_REDIS = False
# Redis decides nothing now. Any other error is an answer to a mistake: a right that is missing, a wrong argument.
AWAY = (
    redis.ConnectionError,  # LOADING is one, too
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
AWAY_CODES = ("BUSY ", "MISCONF ", "NOREPLICAS ")  # redis-py has no classes for these

URL = os.environ.get("REDIS_URL", "")
FORM = r"rediss?://(([^/?#@%\s]|%[0-9a-fA-F]{2})*@)?(\[[\da-fA-F:]+\]|[\w.-]+)(:0*[1-9]\d{0,4})?(/\d*)?"
if not re.fullmatch(FORM, URL, re.ASCII):  # redis-py would take another database, or print a part of a password
    sys.exit("REDIS_URL: expected redis://[user:password@]host:port[/db]")
server = redis.Redis.from_url(
    URL,
    socket_connect_timeout=DEADLINE,
    socket_timeout=DEADLINE,
    # A call without an answer may have been charged. `redis.Redis()` would send it up to ten times more.
    retry=Retry(NoBackoff(), 0),
    # Nothing beside AUTH and SELECT on a new connection.
    driver_info=None,
    maint_notifications_config=MaintNotificationsConfig(enabled=False),
)
with open("token_bucket.lua", encoding="utf-8") as file:
    # Calls send EVALSHA; after NOSCRIPT, SCRIPT LOAD and EVALSHA once more.
    script = server.register_script(file.read())


def is_away(error):
    if isinstance(error, redis.AuthenticationError):  # a ConnectionError, but a mistake
        return False
    return isinstance(error, AWAY) or str(error).startswith(AWAY_CODES)


def decide(user, cost):
    """Whether it is allowed, how many units remain, and the microseconds to wait: 0 for none, -1 for ever."""
    # Other bytes of the user than letters, digits and -_.@:/+=,~| are escaped: see lua/sharing.md.
    key = f"tollgate:{{{user}}}:api/token-bucket-1m"
    try:
        allowed, _limit, remaining, retry_after_us, *_ = script(keys=[key], args=[*RULE, cost, "acquire", -1])
    except redis.RedisError as error:
        if not is_away(error):
            raise
        print(f"Redis doesn't decide: {error}", file=sys.stderr)
        if isinstance(error, redis.ReadOnlyError):  # The primary has become a replica.
            server.connection_pool.disconnect(inuse_connections=False)
        return ALLOWED_WITHOUT_REDIS, None, None
    return allowed == 1, remaining, retry_after_us


for cost in sys.argv[2:]:
    allowed, remaining, retry_after_us = decide(sys.argv[1], int(cost))
    verdict = "allowed" if allowed else "denied"
    if remaining is None:
        print(f"{verdict} without Redis")
    elif retry_after_us < 0:
        print(f"{verdict}: {remaining} remaining, never")
    else:
        # For Retry-After in whole seconds, round up.
        print(f"{verdict}: {remaining} remaining, retry after {retry_after_us / 1e6:.6f} s")
