"""API keys: hashes from the settings, and from a file that is reread when it changes.

Each line of the file is `name:sha256$<64 hex digits>`, optionally followed by `:tenant=NAME` and `:max_open=N`. Lines
may share a name, so that a key can be replaced without a gap. Empty lines and # comments are ignored. An unsalted hash
suffices, because `quire key` generates keys of 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.errors import RequestError, StartupError
from service.observability.logs import fields

log = logging.getLogger("quire.gateway")

ANONYMOUS = "anonymous"
KEY_PREFIX = "sk-quire-"
MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096
"""Limited because each request is compared with every key."""
RELOAD_INTERVAL_S = 1.0

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"sha256\$([0-9a-f]{64})")


@dataclass(frozen=True)
class Client:
    """Owner of a key. `tenant` determines its queue share and prefix cache."""

    name: str
    tenant: str
    max_open: int | None = None  # open requests; None: --max-open-per-key


@dataclass(frozen=True)
class HashedKey:
    digest: bytes
    client: Client


class KeyRing:
    """Authenticates requests. With neither keys nor file, every client is ANONYMOUS."""

    def __init__(self, keys: Sequence[str], path: Path | None = None, clock: Callable[[], float] = time.monotonic):
        self._fixed = [_unnamed(key) for key in keys]
        self._path = path
        self._clock = clock
        self._checked_at_s = clock()
        self._file_state: tuple[int, ...] | None = None
        self._listed: Sequence[HashedKey] = ()
        if path is not None:
            self._file_state = _state(path)
            self._listed = read_keys(path)

    @property
    def is_open(self) -> bool:
        return not self._fixed and self._path is None

    def client_of(self, authorization: Sequence[str]) -> Client:
        """Return the key's owner. Raises RequestError (401)."""
        if self.is_open:
            return Client(ANONYMOUS, ANONYMOUS)
        self._reload_changed_file()
        key = _key_in(authorization[0]) if len(authorization) == 1 else None
        # Compare bytes, because comparing non-ASCII text raises, and all keys, to take constant time.
        digest = _digest(key or b"")
        found = [known for known in (*self._fixed, *self._listed) if hmac.compare_digest(digest, known.digest)]
        if key is None or not found:
            raise RequestError(401, "A valid API key is required.", code="invalid_api_key")
        return found[0].client

    def _reload_changed_file(self) -> None:
        """Reread a changed file; keep the old keys if it is unusable."""
        now_s = self._clock()
        if self._path is None or now_s - self._checked_at_s < RELOAD_INTERVAL_S:
            return
        self._checked_at_s = now_s
        state = _state(self._path)
        if state == self._file_state:
            return
        self._file_state = state
        try:
            self._listed = read_keys(self._path)
        except StartupError as error:
            log.error("key file not reloaded: %s", error)
            return
        log.info("keys read %s", fields(num_keys=len(self._listed), path=self._path))


def read_keys(path: Path) -> Sequence[HashedKey]:
    """Read a key file. Raises StartupError with path and line number, but no content."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"--api-key-file: {path} is not plain text") from None
    except OSError as error:
        raise StartupError(f"--api-key-file: {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise StartupError(f"--api-key-file: {path} is longer than {MAX_FILE_BYTES} bytes")
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            try:
                keys.append(_parse(line.strip()))
            except ValueError as error:
                raise StartupError(f"--api-key-file: {path}, line {number}: {error}") from None
    if len({key.digest for key in keys}) < len(keys):
        raise StartupError(f"--api-key-file: {path} contains a key twice")
    if len(keys) > MAX_KEYS:
        raise StartupError(f"--api-key-file: {path} contains more than {MAX_KEYS} keys")
    return keys


def make_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def line_of(key: str, name: str, tenant: str | None, max_open: int | None) -> str:
    """Return the key-file line for `key`. Raises ValueError for an invalid name or limit."""
    _check_name("name", name)
    _check_name("tenant", name if tenant is None else tenant)
    line = f"{name}:sha256${_digest(key.encode()).hex()}"
    line += f":tenant={tenant}" if tenant is not None else ""
    line += f":max_open={max_open}" if max_open is not None else ""
    _parse(line)
    return line


def _check_name(word: str, text: str) -> None:
    if not _NAME.fullmatch(text):
        raise ValueError(f"the {word} must be 1 to 64 letters, digits, '.', '_' or '-'")


def _parse(line: str) -> HashedKey:
    name, *parts = line.split(":")
    _check_name("name", name)
    found = _HASH.fullmatch(parts[0]) if parts else None
    if found is None:
        raise ValueError("the name must be followed by ':sha256$' and 64 hex digits")
    options: dict[str, str] = {}
    for option in parts[1:]:
        word, _, value = option.partition("=")
        if word in options or word not in ("tenant", "max_open"):
            raise ValueError("only tenant=NAME and max_open=N may follow, each once")
        options[word] = value
    tenant = options.get("tenant", name)
    _check_name("tenant", tenant)
    max_open = options.get("max_open")
    if max_open is not None and not re.fullmatch(r"[1-9][0-9]{0,6}", max_open):
        raise ValueError("max_open must be a whole number above 0")
    limit = None if max_open is None else int(max_open)
    return HashedKey(bytes.fromhex(found[1]), Client(name, tenant, limit))


def _unnamed(key: str) -> HashedKey:
    digest = _digest(key.encode())
    name = "key-" + digest.hex()[:16]
    return HashedKey(digest, Client(name, name))


def _key_in(authorization: str) -> bytes | None:
    """Return the key in `Bearer KEY` or, from browsers, `Basic base64(name:KEY)`."""
    scheme, _, rest = authorization.partition(" ")
    credentials = rest.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)
