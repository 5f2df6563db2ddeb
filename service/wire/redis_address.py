"""Where Redis is: the URL as it is written, and the Sentinels or nodes of a Cluster that know who the primary is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.sentinel import Sentinel
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from service.errors import StartupError
from service.wire.keys import JOBS

FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://..., unix:///path/to/socket[?db=n] or "
    "redis+sentinel://[user:password@]sentinel[:port][,sentinel...]/primary's name[/db] or "
    "redis+cluster://[user:password@]node[:port][,node...]"
)
SENTINEL_PORT = 26379
CLUSTER_PORT = 6379
MAX_NODES = 64
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


class Address:
    """A parsed URL. `options` are for a pool of redis-py."""

    def __init__(self, options: dict[str, Any], sentinel: Sentinel | None = None, *, is_cluster: bool = False):
        self.options = options
        self.is_cluster = is_cluster
        self._sentinel = sentinel

    async def close(self) -> None:
        """Let go of the Sentinels."""
        for client in self._sentinel.sentinels if self._sentinel is not None else ():
            await client.aclose()


def read_address(url: str, timeout_s: float) -> Address:
    """Raises StartupError for a URL that is none, or of a kind that is not served."""
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


class _PrimaryConnection(Connection):
    """Asks who the primary is each time it connects."""

    def __init__(self, *, find_primary: Callable[[], Awaitable[tuple[str, int]]], **options: Any):
        super().__init__(**options)
        self._find_primary = find_primary

    async def _connect(self) -> None:
        self.host, self.port = await self._find_primary()
        await super()._connect()


class _PrimaryTLSConnection(_PrimaryConnection, SSLConnection):
    pass


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
    common = {"protocol": 2, "driver_info": None, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    tls = {key: value for key, value in options.items() if key.startswith("ssl_")}
    sentinel_kwargs = {**common, **sentinel_options, **({"ssl": True, **tls} if scheme == "rediss" else {})}
    sentinel = Sentinel([_host(host, SENTINEL_PORT) for host in hosts.split(",")], sentinel_kwargs=sentinel_kwargs)
    options["connection_class"] = _PrimaryTLSConnection if scheme == "rediss" else _PrimaryConnection
    options["find_primary"] = lambda: sentinel.discover_master(unquote(name))
    return Address(options, sentinel)


class _Cluster:
    """Of its nodes one has the slot of all our keys: it is the only one that we speak to."""

    def __init__(self, nodes: list[tuple[str, int]], options: dict[str, Any]):
        self._nodes = nodes
        self._options = options

    async def find_primary(self) -> tuple[str, int]:
        """Host and port of the node that has our slot, from the first node that answers. Raises RedisError."""
        slot, error = key_slot(JOBS.encode()), RedisConnectionError("no node of the cluster answers")
        for host, port in list(self._nodes):
            async with Redis(host=host, port=port, **self._options) as redis:
                try:
                    ranges = await redis.execute_command("CLUSTER SLOTS")
                except (RedisError, OSError) as failure:
                    error = failure
                    continue
            self._learn(host, ranges)
            owner = next((primary for first, last, primary, *_ in ranges if first <= slot <= last), None)
            if owner is not None:
                return _text(owner[0]) or host, owner[1]
            error = RedisConnectionError("no node of the cluster has our slot")
        raise error

    def _learn(self, host: str, ranges: list[Any]) -> None:
        """Nodes that the URL does not name may be asked too, once those it names are gone. `ranges`: as CLUSTER SLOTS
        tells them, first and last slot, primary, replicas."""
        found = [(_text(node[0]) or host, node[1]) for _, _, *nodes in ranges for node in nodes]
        self._nodes = list(dict.fromkeys([*self._nodes, *found]))[:MAX_NODES]


def _text(host: bytes | str | None) -> str:
    """Empty where a node does not know its own name."""
    found = host.decode() if isinstance(host, bytes) else host or ""
    return "" if found == "?" else found


def _by_cluster(url: str, timeout_s: float) -> Address:
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    if parts.path.strip("/"):
        raise StartupError(f"the Redis URL names a database, and a Cluster has none; it looks like {FORMS}")
    scheme = parts.scheme.partition("+")[0]
    options = _checked(parse_url(f"{scheme}://{user}{'@' if user else ''}primary?{parts.query}"))
    common = {"protocol": 2, "driver_info": None, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    own = {key: value for key, value in options.items() if key not in ("host", "port", "connection_class")}
    if scheme == "rediss":
        own["ssl"] = True
    cluster = _Cluster([_host(host, CLUSTER_PORT) for host in hosts.split(",")], {**common, **own})
    options["connection_class"] = _PrimaryTLSConnection if scheme == "rediss" else _PrimaryConnection
    options["find_primary"] = cluster.find_primary
    return Address(options, is_cluster=True)


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        what = "Sentinel" if port == SENTINEL_PORT else "node"
        raise StartupError(f"the Redis URL names no {what}; it looks like {FORMS}")
    return parts.hostname, parts.port or port


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """What redis-py makes of the URL, less what would change how answers look."""
    odd = sorted(set(options) - URL_OPTIONS - {"host", "port", "path", "username", "password", "connection_class"})
    if odd:
        raise StartupError(f"the Redis URL has an option that is not supported: {odd[0]}")
    return options
