from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError

from service.errors import StartupError
from service.queue.keys import JOBS

FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://..., unix:///path/to/socket[?db=n] or "
    "redis+sentinel://[user:password@]sentinel[:port][,sentinel...]/primary's name[/db] or "
    "redis+cluster://[user:password@]node[:port][,node...]"
)
SENTINEL_PORT = 26379
CLUSTER_PORT = 6379
MAX_NODES = 64
PLAIN = {"protocol": 2, "driver_info": None, "socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
"""No retries, as the queue knows which commands may be repeated. Redis 7.0 refuses driver_info. With a socket_timeout,
redis-py writes in a task whose cancellation Python before 3.12 may lose."""
URL_OPTIONS = {
    "db",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_cert_reqs",
    "ssl_keyfile",
    "ssl_password",
}
SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}
ASKED_IN_TIME = 4

Asked = TypeVar("Asked")
HostAndPort = tuple[str, int]


class _Search(Generic[Asked]):
    """Search for the primary by asking nodes, useless ones last."""

    def __init__(self, asked: list[Asked], ask: Callable[[Asked], Awaitable[HostAndPort]], timeout_s: float):
        self._asked = asked
        self._ask = ask
        self._timeout_s = timeout_s
        self._believed: Asked | None = None

    async def __call__(self) -> HostAndPort:
        """Return the primary. Raises the last node's RedisError or OSError."""
        error: Exception = RedisConnectionError("there is no node to ask")
        for one in list(self._asked):
            try:
                async with asyncio.timeout(self._timeout_s / ASKED_IN_TIME):
                    primary = await self._ask(one)
            except (RedisError, OSError) as failure:
                error = failure
                self._ask_last(one)
            else:
                self._believed = one
                return primary
        raise error

    def doubt(self) -> None:
        if self._believed is not None:
            self._ask_last(self._believed)
            self._believed = None

    def _ask_last(self, one: Asked) -> None:
        self._asked.remove(one)
        self._asked.append(one)


class Address:
    def __init__(
        self,
        options: dict[str, Any],
        search: _Search[Any] | None = None,
        sentinels: Sequence[Sentinel] = (),
        *,
        is_cluster: bool = False,
    ):
        kind = OWN_CONNECTIONS[options.get("connection_class", Connection)]
        self.options = {**options, "connection_class": kind, "find_primary": search}
        self.is_cluster = is_cluster
        self._search = search
        self._sentinels = sentinels

    def doubt(self) -> None:
        if self._search is not None:
            self._search.doubt()

    async def close(self) -> None:
        for sentinel in self._sentinels:
            for client in sentinel.sentinels:
                await client.aclose()


def read_address(url: str, timeout_s: float) -> Address:
    """Parse a Redis URL. Raises StartupError if it is invalid or unsupported."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("redis+cluster", "rediss+cluster"):
            return _by_cluster(url, timeout_s)
        if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
            return _by_sentinels(url, timeout_s)
        options = parse_url(url)
    except (ValueError, TypeError) as error:
        raise StartupError(f"the Redis URL is not understood; it looks like {FORMS}") from error
    path = parts.path.strip("/")
    if parts.scheme == "unix" and not path:
        raise StartupError(f"the Redis URL names no socket; it looks like {FORMS}")
    if parts.scheme != "unix" and ((path and not path.isdecimal()) or not parts.hostname):
        raise StartupError(f"the Redis URL names no host, or a database that is no number; it looks like {FORMS}")
    return Address(_checked(options))


class _ToPrimary(AbstractConnection):
    """Connection to the primary. It checks the role, as a replica would answer reads forever."""

    def __init__(self, *, find_primary: Callable[[], Awaitable[HostAndPort]] | None, **options: Any):
        super().__init__(**options)
        self._find_primary = find_primary

    async def _connect(self) -> None:
        if self._find_primary is not None:
            self.host, self.port = await self._find_primary()
        await super()._connect()  # type: ignore[no-untyped-call, safe-super]

    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[no-untyped-call]  # redis-py
        except (RedisError, OSError) as error:
            error.quire_unsent = True  # type: ignore[union-attr]  # read by was_sent
            raise

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health=check_health)
        await self.send_command("INFO", "replication", check_health=False)
        if b"role:master" not in await self.read_response(disable_decoding=True):
            raise ReadOnlyError("this is a replica")

    async def disconnect(self, nowait: bool = False, *args: Any, **why: Any) -> None:
        """Disconnect without waiting: TLS waits 30 s for a dead peer."""
        await super().disconnect(True, *args, **why)


def was_sent(error: Exception) -> bool:
    """Return True if the command may have reached Redis."""
    return not getattr(error, "quire_unsent", False)


class _ToPrimaryByTCP(_ToPrimary, Connection):
    pass


class _ToPrimaryByTLS(_ToPrimary, SSLConnection):
    pass


class _ToPrimaryBySocket(_ToPrimary, UnixDomainSocketConnection):
    pass


OWN_CONNECTIONS = {
    Connection: _ToPrimaryByTCP,
    SSLConnection: _ToPrimaryByTLS,
    UnixDomainSocketConnection: _ToPrimaryBySocket,
}


def _by_sentinels(url: str, timeout_s: float) -> Address:
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    query = dict(parse_qsl(parts.query))
    sentinel_options = {SENTINEL_OPTIONS[key]: query.pop(key) for key in SENTINEL_OPTIONS if key in query}
    scheme = parts.scheme.partition("+")[0]
    if not name or (database and not database.isdecimal()):
        raise StartupError(f"the Redis URL names no primary, or a database that is no number; it looks like {FORMS}")
    stand_in = f"{scheme}://{user}{'@' if user else ''}primary/{database}?{urlencode(query)}"
    options = _checked(parse_url(stand_in))
    tls = {key: value for key, value in options.items() if key.startswith("ssl_")}
    sentinel_kwargs = {**PLAIN, **sentinel_options, **({"ssl": True, **tls} if scheme == "rediss" else {})}
    make: Any = Sentinel
    sentinels = [make([_host(host, SENTINEL_PORT)], sentinel_kwargs=sentinel_kwargs) for host in hosts.split(",")]
    search = _Search(list(sentinels), lambda sentinel: _ask_sentinel(sentinel, unquote(name)), timeout_s)
    return Address(options, search, sentinels)


async def _ask_sentinel(sentinel: Sentinel, name: str) -> HostAndPort:
    """Return the primary known to the Sentinel. Raises RedisError or OSError."""
    try:
        host, port = await sentinel.discover_master(name)
        return host, port
    except MasterNotFoundError:  # its text has the Sentinel's connection objects
        raise RedisConnectionError(f"no Sentinel answers with a primary named {name!r}") from None


class _Cluster:
    """Cluster in which one slot has all our keys."""

    def __init__(self, nodes: list[HostAndPort], options: dict[str, Any]):
        self.nodes = nodes
        self._options = options

    async def ask(self, node: HostAndPort) -> HostAndPort:
        """Return the owner of our slot. Raises RedisError or OSError."""
        slot, (host, port) = key_slot(JOBS.encode()), node
        async with Redis(host=host, port=port, **self._options) as redis:
            ranges = await redis.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]  # redis-py
        self._learn(host, ranges)
        owner = next((primary for first, last, primary, *_ in ranges if first <= slot <= last), None)
        if owner is None:
            raise RedisConnectionError("no node of the cluster has our slot")
        return _text(owner[0]) or host, owner[1]

    def _learn(self, host: str, ranges: list[Any]) -> None:
        """Add the nodes of CLUSTER SLOTS."""
        found = [(_text(node[0]) or host, node[1]) for _, _, *nodes in ranges for node in nodes]
        self.nodes[:] = list(dict.fromkeys([*self.nodes, *found]))[:MAX_NODES]


def _text(host: bytes | str | None) -> str:
    """Return the name as text, '' if unknown."""
    found = host.decode() if isinstance(host, bytes) else host or ""
    return "" if found == "?" else found


def _by_cluster(url: str, timeout_s: float) -> Address:
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    if parts.path.strip("/"):
        raise StartupError(f"the Redis URL names a database, and a Cluster has none; it looks like {FORMS}")
    scheme = parts.scheme.partition("+")[0]
    options = _checked(parse_url(f"{scheme}://{user}{'@' if user else ''}primary?{parts.query}"))
    own = {key: value for key, value in options.items() if key not in ("host", "port", "connection_class")}
    if scheme == "rediss":
        own["ssl"] = True
    cluster = _Cluster([_host(host, CLUSTER_PORT) for host in hosts.split(",")], {**PLAIN, **own})
    return Address(options, _Search(cluster.nodes, cluster.ask, timeout_s), is_cluster=True)


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        what = "Sentinel" if port == SENTINEL_PORT else "node"
        raise StartupError(f"the Redis URL names no {what}; it looks like {FORMS}")
    return parts.hostname, parts.port or port


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    odd = sorted(set(options) - URL_OPTIONS - {"host", "port", "path", "username", "password", "connection_class"})
    if odd:
        raise StartupError(f"the Redis URL has an option that is not supported: {odd[0]}")
    return dict(options)
