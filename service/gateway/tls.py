"""HTTPS: the certificate that the gateway shows."""

from __future__ import annotations

import ssl
from pathlib import Path

from service.errors import StartupError


def open_tls(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with this certificate; None without one. Raises StartupError."""
    if certfile is None:
        if keyfile is not None:
            raise StartupError("--ssl-keyfile is a key without a certificate: add --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        reason = error.strerror or str(error)
        raise StartupError(f"--ssl-certfile: {certfile} and its key cannot be used: {reason}") from None
    return context


def _no_password() -> str:
    """Asked for only by an encrypted key; a service has nobody to type it."""
    raise ValueError("the key is encrypted")
