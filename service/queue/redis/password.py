"""Password of a Redis URL, from a file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit

from service.errors import StartupError

MAX_PASSWORD_BYTES = 4096


def with_password(url: str, path: Path | None) -> str:
    """Insert the password from a file into the URL. Raises StartupError."""
    if path is None:
        return url
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PASSWORD_BYTES + 1)
        password = data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise StartupError(f"--redis-password-file: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"--redis-password-file: {path} is not plain text") from None
    if not password or "\n" in password or len(data) > MAX_PASSWORD_BYTES:
        raise StartupError(f"--redis-password-file: {path} must hold one line, the password")
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if ":" in user:
        raise StartupError("--redis-password-file: the Redis URL has a password of its own")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()
