"""One-line logs: time, level, process, event, then key=value pairs. Control characters never reach the terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_about: ContextVar[dict[str, Any] | None] = ContextVar("about", default=None)
"""What the task at work is about. It stands in each of its log lines."""


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.name} {record.getMessage()}"
        )
        known = {key: value for key, value in (_about.get() or {}).items() if f" {key}=" not in line}
        if known:
            line += " " + fields(**known)
        if record.exc_info:
            line += " " + json.dumps(self.formatException(record.exc_info))
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def setup_logs(level: str) -> None:
    """Send all logs to stderr in one-line form. Called once, by the command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for talker in ("aiohttp.access", "urllib3"):
        logging.getLogger(talker).setLevel(logging.WARNING)


def fields(**values: Any) -> str:
    """`key=value` pairs for a log line; strings with spaces are quoted."""
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if any(c.isspace() for c in text) or not text else text


@contextmanager
def about(**values: Any) -> Iterator[None]:
    """Inside, log lines of this task and of those that it starts say these too; None says nothing."""
    token = _about.set({})
    also_about(**values)
    try:
        yield
    finally:
        _about.reset(token)


def also_about(**values: Any) -> None:
    """From here on, inside `about`, log lines say these too."""
    known = _about.get()
    if known is not None:
        known |= {key: value for key, value in values.items() if value is not None}
