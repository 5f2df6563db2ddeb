"""Where Redis is: the URL as it is written, and the Sentinels that know who the primary is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.sentinel import Sentinel

from service.errors import StartupError

FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://..., unix:///path/to/socket[?db=n] or "
    "redis+sentinel://[user:password@]sentinel[:port][,sentinel...]/primary's name[/db]"
)
NO_CLUSTER = (
    "Redis Cluster is not served, since a worker's step is one atomic act on many jobs; one server carries it, "
    "or one with replicas that Sentinels watch"
)
SENTINEL_PORT = 26379
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

    def __init__(self, options: dict[str, Any], sentinel: Sentinel | None = None):
        self.options = options
        self._sentinel = sentinel

    async def close(self) -> None:
        """Let go of the Sentinels."""
        for client in self._sentinel.sentinels if self._sentinel is not None else ():
            await client.aclose()


def read_address(url: str, timeout_s: float) -> Address:
    """Raises StartupError for a URL that is none, or of a kind that is not served."""
    try:
        parts = urlsplit(url)
        if parts.scheme.endswith("+cluster"):
            raise StartupError(NO_CLUSTER)
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
    sentinel = Sentinel([_host(host) for host in hosts.split(",")], sentinel_kwargs=sentinel_kwargs)
    options["connection_class"] = _PrimaryTLSConnection if scheme == "rediss" else _PrimaryConnection
    options["find_primary"] = lambda: sentinel.discover_master(unquote(name))
    return Address(options, sentinel)


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise StartupError(f"the Redis URL names no Sentinel; it looks like {FORMS}")
    return parts.hostname, parts.port or SENTINEL_PORT


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """What redis-py makes of the URL, less what would change how answers look."""
    odd = sorted(set(options) - URL_OPTIONS - {"host", "port", "path", "username", "password", "connection_class"})
    if odd:
        raise StartupError(f"the Redis URL has an option that is not supported: {odd[0]}")
    return options
