"""One-line logs: time, level, process, event, key=value pairs. Control characters are escaped."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_context: ContextVar[dict[str, Any] | None] = ContextVar("log_context", default=None)
"""Fields appended to the task's log lines."""


PROCESS_NAME = "QUIRE_PROCESS_NAME"
"""Variable with a process's name, which its log lines show if there are several of its kind."""


class _OneLine(logging.Formatter):
    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"{process} " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {self._process}{record.name} "
            f"{record.getMessage()}"
        )
        known = {key: value for key, value in (_context.get() or {}).items() if f" {key}=" not in line}
        if known:
            line += " " + fields(**known)
        if record.exc_info:
            line += " " + json.dumps(self.formatException(record.exc_info))
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def setup_logs(level: str, process: str = "") -> None:
    """Log to stderr, one line per event; called once per process. `process`: a name for each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("aiohttp.access", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def fields(**values: Any) -> str:
    """Format `key=value` pairs, quoting strings with spaces."""
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if any(c.isspace() for c in text) or not text else text


@contextmanager
def log_context(**values: Any) -> Iterator[None]:
    """Add fields to log lines of this task and of tasks started inside. None values are dropped."""
    token = _context.set({})
    add_log_context(**values)
    try:
        yield
    finally:
        _context.reset(token)


def add_log_context(**values: Any) -> None:
    """Add fields to the enclosing `log_context`, if any."""
    known = _context.get()
    if known is not None:
        known |= {key: value for key, value in values.items() if value is not None}
