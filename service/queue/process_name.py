from __future__ import annotations

import os
import secrets
import socket


def own_name() -> str:
    """Return a name for this process, unique on the queue."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
