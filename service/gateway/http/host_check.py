"""Checks Host and Origin headers against DNS rebinding and cross-origin requests."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from service.config.settings import Settings
from service.errors import RequestError

_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://((?:{_HOST.pattern})?)")
MAX_PORT = 65535
OPAQUE_ORIGIN = "null"
"""Origin of sandboxed frames and local files."""


class HostCheck:
    """Allows the hosts in `--allowed-hosts`.

    By default: IP addresses, localhost, the listening host and the machine's name; with keys any name, since no foreign
    page knows a key.
    """

    def __init__(self, settings: Settings, *, keys_required: bool) -> None:
        self._is_listed = bool(settings.allowed_hosts)
        names = settings.allowed_hosts or ("localhost", "*.localhost", settings.host, socket.gethostname())
        self._any = "*" in settings.allowed_hosts or (keys_required and not self._is_listed)
        self._names = {_bare(name) for name in names if not name.startswith("*")}
        self._domains = tuple(name[1:].lower() for name in names if name.startswith("*."))

    def require_form(self, hosts: Sequence[str], target: str, *, needs_host: bool) -> None:
        """Validate the Host headers and the request target. Raises RequestError (400)."""
        if len(hosts) > 1 or not all(map(_is_host, hosts)) or (needs_host and not hosts):
            raise RequestError(400, "The Host header is missing or malformed.", code="bad_host")
        schemes = ("http://", "https://")
        if not target.startswith("/") and not any(target.startswith(f"{s}{h}/") for s in schemes for h in hosts):
            raise RequestError(400, "The request is for another host.", code="bad_host")

    def require_known(self, hosts: Sequence[str]) -> None:
        """Raises RequestError (400) for a host that is not allowed."""
        if not self._any and not all(self._knows(_bare(host)) for host in hosts):
            raise RequestError(400, "This host is not among --allowed-hosts.", code="unknown_host")

    def require_own_page(self, origins: Sequence[str], hosts: Sequence[str]) -> None:
        """Check the Origin headers. Raises RequestError: 403 for another origin, 400 for a malformed one."""
        for origin in origins:
            found = _ORIGIN.fullmatch(origin)
            is_malformed = found is None or (found[1] and not _is_host(found[1]))
            if is_malformed and origin != OPAQUE_ORIGIN:
                raise RequestError(400, "The Origin header is malformed.", code="bad_origin")
            place = found[1].lower() if found else ""
            is_ours = place in [host.lower() for host in hosts] or (self._is_listed and self._knows(_bare(place)))
            if not place or not is_ours:
                message = "Pages of other origins may not send requests here (a proxy must keep the Host header)."
                raise RequestError(403, message, code="cross_origin")

    def _knows(self, name: str) -> bool:
        if name in self._names or name.endswith(self._domains):
            return True
        return not self._is_listed and _is_address(name)


def _is_host(text: str) -> bool:
    found = _HOST.fullmatch(text)
    if found is None or int((found[2] or ":0")[1:]) > MAX_PORT:
        return False
    return not text.startswith("[") or _is_ipv6(text[1:].partition("]")[0])


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _bare(host: str) -> str:
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return (name if name.count(":") > 1 else name.partition(":")[0]).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
