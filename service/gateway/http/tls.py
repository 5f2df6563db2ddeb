"""HTTPS: the certificate that the gateway shows, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from service.errors import StartupError
from service.observability.logs import fields

log = logging.getLogger("quire.gateway")

LOOK_AGAIN_S = 10.0


@asynccontextmanager
async def opened_tls(certfile: Path | None, keyfile: Path | None) -> AsyncIterator[ssl.SSLContext | None]:
    """TLS 1.2 or newer with this certificate; None without one. Connections that are made later get the certificate
    that is there then; one that cannot be used changes nothing and is logged. Raises StartupError."""
    if certfile is None:
        if keyfile is not None:
            raise StartupError("--ssl-keyfile is a key without a certificate: add --ssl-certfile")
        yield None
        return
    files = (certfile, keyfile or certfile)
    context = _read(files)
    following = asyncio.create_task(_follow(context, files))
    try:
        yield context
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(context: ssl.SSLContext, files: tuple[Path, Path]) -> None:
    seen = _state(files)
    while True:
        await asyncio.sleep(LOOK_AGAIN_S)
        state = _state(files)
        if state == seen:
            continue
        seen = state
        try:
            _read(files)  # apart first: a key that does not fit would spoil the context in use
            context.load_cert_chain(*files, password=_no_password)
        except (StartupError, OSError) as error:
            log.error("the old certificate stays: %s", error)
        else:
            log.info("certificate read %s", fields(path=files[0]))


def _read(files: tuple[Path, Path]) -> ssl.SSLContext:
    """Raises StartupError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(*files, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise StartupError(f"--ssl-certfile: {files[0]} and its key cannot be used: {_reason(error)}") from None
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _state(files: tuple[Path, Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when one of them does."""
    states = []
    for path in files:
        try:
            found = path.stat()
            states.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            states.append(None)
    return tuple(states)


def _no_password() -> str:
    """Asked for only by an encrypted key; a service has nobody to type it."""
    raise ValueError("the key is encrypted")
