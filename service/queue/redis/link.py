from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha1
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from service.errors import StartupError
from service.observability.logs import fields
from service.queue.interface import (
    MAX_DEATHS,
    MAX_DEATHS_IN_ALL,
    PROGRESS_EVENTS,
    SUSPECT_AFTER_DEATHS,
    OutcomeUnknown,
    QueueUnavailable,
)
from service.queue.keys import FEED_MAX_ENTRIES, FEED_TTL_S, LOG_ENDED_TTL_S, LOG_RUNNING_TTL_S, QUEUE
from service.queue.redis.address import PLAIN, read_address, was_sent

log = logging.getLogger("quire.redis")

MAX_CONNECTIONS = 32
MAX_BLOCKING_CONNECTIONS = 16
BLOCK_MARGIN_S = 3.0
"""A blocking read this late has lost its connection."""
Client = Any
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
CLOCK_REFRESH_S = 10.0
STREAM_START = "0-0"
OLDEST_VERSION = (6, 2)
COMMON_SCRIPTS = ("fair", "common", "ledger")
BOUNDS = (
    *(FEED_MAX_ENTRIES, FEED_TTL_S, LOG_RUNNING_TTL_S, LOG_ENDED_TTL_S),
    *(SUSPECT_AFTER_DEATHS, MAX_DEATHS, MAX_DEATHS_IN_ALL, PROGRESS_EVENTS),
)
REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
NOT_PRIMARY = (ReadOnlyError, MovedError, ClusterDownError, MasterDownError)
NOT_PRIMARY_WORDS = ("READONLY", "NOREPLICAS", "UNBLOCKED")
"""Errors without a class, or in scripts on Redis 6.2."""


class GroupMissing(QueueUnavailable):
    """Redis is new, was emptied, or has become a replica."""


class DataLost(QueueUnavailable):
    """Redis answers, but has lost the data."""


class RedisLink:
    def __init__(self, url: str, timeout_s: float) -> None:
        self._address = read_address(url, timeout_s)
        options = self._address.options
        common = {**options, **PLAIN}
        self._client: Client = Redis.from_pool(
            BlockingConnectionPool(max_connections=MAX_CONNECTIONS, timeout=timeout_s, **common)
        )
        self._blocking: Client = Redis.from_pool(ConnectionPool(max_connections=MAX_BLOCKING_CONNECTIONS, **common))
        self._timeout_s = timeout_s
        self._clock_offset_s = 0.0
        self._clock_read_at_s = float("-inf")
        self._spoke_at_s: float | None = None  # time of the last answered script

    async def check(self) -> None:
        """Check the server. Raises QueueUnavailable without an answer, StartupError if unusable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                server = await self._client.info("server")
                memory = await self._client.info("memory")
                cluster = await self._client.info("cluster")
        except (RedisError, OSError) as error:
            # The pool hides a refused password.
            if isinstance(error, REFUSALS) or isinstance(error.__cause__, REFUSALS):
                raise StartupError(f"Redis refuses us: {_cause(error)}") from error
            raise QueueUnavailable(f"Redis does not answer: {_cause(error)}") from error
        version = server.get("redis_version", "0")
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
            raise StartupError(f"Redis 6.2 or newer is needed, this is {version}")
        if cluster.get("cluster_enabled") and not self._address.is_cluster:
            raise StartupError("this Redis is a node of a Cluster: its URL begins with redis+cluster://")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            log.warning("redis may drop accepted jobs %s", fields(maxmemory_policy=policy, wanted="noeviction"))

    @asynccontextmanager
    async def commands(self) -> AsyncIterator[Client]:
        """Yield the client for commands within the timeout. Raises QueueUnavailable, as OutcomeUnknown if Redis may
        have run them."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield self._client
        except (RedisError, OSError) as error:
            await self._drop_connections(error)
            if str(error).startswith("EPOCH"):
                raise DataLost(str(error)) from error
            if isinstance(error, ResponseError) or not was_sent(error):
                raise QueueUnavailable(_cause(error)) from error
            raise OutcomeUnknown(_cause(error)) from error

    async def block(self, read: Callable[[Client, int | None], Awaitable[Any]], wait_s: float) -> Any:
        """Return `read(client, block_ms)`; `block_ms` is None if `wait_s` is 0. Raises GroupMissing or
        QueueUnavailable."""
        block_ms = max(1, int(wait_s * 1000)) if wait_s > 0 else None
        try:
            async with asyncio.timeout(max(wait_s, 0.0) + BLOCK_MARGIN_S):
                return await read(self._blocking, block_ms)
        except (RedisError, OSError) as error:
            await self._drop_connections(error)
            if isinstance(error, ResponseError) and str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise GroupMissing(str(error)) from error
            raise QueueUnavailable(_cause(error)) from error

    async def _drop_connections(self, error: Exception) -> None:
        """Drop all connections, as each would cost its user the timeout."""
        if isinstance(error, ResponseError) and not _says_not_primary(error):
            return
        self._address.doubt()
        self._clock_read_at_s = float("-inf")
        if isinstance(error, RedisConnectionError):
            return  # the pool checks the others before use
        for client in (self._client, self._blocking):
            await client.connection_pool.update_active_connections_for_reconnect()
            await client.connection_pool.disconnect(inuse_connections=False)

    async def is_past_end(self, stream: str, entry_id: str) -> bool:
        """Return True if the stream ends before the entry: it was replaced."""
        if entry_id == STREAM_START:
            return False
        async with self.commands() as redis:
            last = await redis.xrevrange(stream, count=1)
        return not last or order(last[0][0].decode()) < order(entry_id)

    async def begins_after(self, stream: str, entry_id: str) -> bool:
        """Return True if the stream was trimmed past the entry."""
        async with self.commands() as redis:
            first = await redis.xrange(stream, count=1)
        return not first or order(first[0][0].decode()) > order(entry_id)

    async def make_group(self, stream: str, group: str) -> None:
        async with self.commands() as redis:
            try:
                await redis.xgroup_create(stream, group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run `<name>.lua` after COMMON_SCRIPTS. Raises QueueUnavailable, or DataLost for another epoch."""
        source, digest = script_of(name)
        sent_s = time.monotonic()
        elapsed = "" if self._spoke_at_s is None else sent_s - self._spoke_at_s
        keys, args = (*QUEUE, *keys), (*BOUNDS, *args, elapsed)
        async with self.commands() as redis:
            try:
                answer = await redis.evalsha(digest, len(keys), *keys, *args)
            except NoScriptError:
                answer = await redis.eval(source, len(keys), *keys, *args)
        self._spoke_at_s = max(sent_s, self._spoke_at_s or sent_s)
        return answer

    async def script_until_known(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Repeat an idempotent script. Raises OutcomeUnknown after two timeouts."""
        give_up_s = time.monotonic() + 2 * self._timeout_s
        lost = Outage(name)
        while True:
            try:
                return await self.script(name, keys, args)
            except QueueUnavailable as error:
                # A refusal says nothing about a first try with unknown outcome.
                if not isinstance(error, OutcomeUnknown) and not lost.is_on:
                    raise
                wait_s = lost.failed(error)
                if time.monotonic() + wait_s > give_up_s:
                    raise OutcomeUnknown(str(error)) from error
                await asyncio.sleep(wait_s)

    async def now_s(self) -> float:
        """Return queue time, Unix seconds: Redis' clock without jumps, read every CLOCK_REFRESH_S."""
        before_s = time.monotonic()
        if before_s - self._clock_read_at_s > CLOCK_REFRESH_S:
            queue_s = float(await self.script("clock", [], []))
            after_s = time.monotonic()
            self._clock_offset_s = queue_s - (before_s + after_s) / 2
            self._clock_read_at_s = after_s
        return time.monotonic() + self._clock_offset_s

    async def close(self) -> None:
        for client in (self._client, self._blocking):
            await client.connection_pool.disconnect()
        await self._address.close()


async def open_link(url: str, timeout_s: float) -> RedisLink:
    link = RedisLink(url, timeout_s)
    try:
        await link.check()
    except BaseException:
        await link.close()
        raise
    return link


class Outage:
    def __init__(self, reader: str) -> None:
        self._reader = reader
        self._num_failures = 0

    @property
    def is_on(self) -> bool:
        return self._num_failures > 0

    def failed(self, error: Exception) -> float:
        if self._num_failures == 0:
            log.warning("redis is away %s", fields(reader=self._reader, error=error))
        self._num_failures += 1
        return RETRY_S[min(self._num_failures, len(RETRY_S)) - 1]

    def over(self) -> bool:
        """Return True if an outage ended."""
        if self._num_failures == 0:
            return False
        log.info("redis is back %s", fields(reader=self._reader, num_failures=self._num_failures))
        self._num_failures = 0
        return True


@cache
def script_paths() -> dict[str, Traversable]:
    """Return every script by name; names are unique across folders."""
    folders = (files(__package__) / "scripts").iterdir()
    return {path.name.removesuffix(".lua"): path for folder in folders if folder.is_dir() for path in folder.iterdir()}


@cache
def script_of(name: str) -> tuple[str, str]:
    """Return the source of scripts/*/<name>.lua after COMMON_SCRIPTS, and its SHA-1."""
    paths = script_paths()
    source = "".join(paths[part].read_text(encoding="utf-8") for part in (*COMMON_SCRIPTS, name))
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()


def order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


def _says_not_primary(error: ResponseError) -> bool:
    return isinstance(error, NOT_PRIMARY) or any(word in str(error) for word in NOT_PRIMARY_WORDS)


def _cause(error: Exception) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
