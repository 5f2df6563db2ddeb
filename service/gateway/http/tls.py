"""HTTPS with a certificate that is reread when it changes."""

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

RELOAD_INTERVAL_S = 10.0


@asynccontextmanager
async def open_tls(certfile: Path | None, keyfile: Path | None) -> AsyncIterator[ssl.SSLContext | None]:
    """Yield a context for TLS 1.2 or newer; None without a certificate.

    New connections use the certificate on disk. If it becomes unusable, that is logged and the old one kept. Raises
    StartupError.
    """
    if certfile is None:
        if keyfile is not None:
            raise StartupError("--ssl-keyfile: needs --ssl-certfile")
        yield None
        return
    files = (certfile, keyfile or certfile)
    context = _read(files)
    following = asyncio.create_task(_reload_changed_files(context, files))
    try:
        yield context
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _reload_changed_files(context: ssl.SSLContext, files: tuple[Path, Path]) -> None:
    seen = _state(files)
    while True:
        await asyncio.sleep(RELOAD_INTERVAL_S)
        state = _state(files)
        if state == seen:
            continue
        seen = state
        try:
            _read(files)  # test first: a key that does not match would break the context in use
            context.load_cert_chain(*files, password=_no_password)
        except (StartupError, OSError) as error:
            log.error("certificate not reloaded: %s", error)
        else:
            log.info("certificate read %s", fields(path=files[0]))


def _read(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(*files, password=_no_password)
    except (OSError, ValueError) as error:  # includes SSLError
        raise StartupError(f"--ssl-certfile: {files[0]} and its key cannot be used: {_reason(error)}") from None
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _state(files: tuple[Path, Path]) -> tuple[tuple[int, int, int] | None, ...]:
    states: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            found = path.stat()
            states.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            states.append(None)
    return tuple(states)


def _no_password() -> str:
    """Refuse an encrypted key: a service cannot prompt for the password."""
    raise ValueError("the key is encrypted")
