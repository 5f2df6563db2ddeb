"""One line per event, for any content."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from service.observability.logs import fields, setup_logs


@contextmanager
def logs(level: str) -> Iterator[list[str]]:
    """Logs as the commands do; once it is over, the list holds the lines that were written."""
    root, access = logging.getLogger(), logging.getLogger("aiohttp.access")
    before = (root.handlers, root.level, access.level)
    root.handlers, lines, stderr = [], [], io.StringIO()
    try:
        with redirect_stderr(stderr):
            setup_logs(level)
            yield lines
    finally:
        root.handlers, root.level, access.level = before
    lines += stderr.getvalue().splitlines()


def test_a_line_has_time_level_name_and_fields():
    with logs("info") as lines:
        logging.getLogger("quire.engine").info("step %s", fields(num_tokens=7, took_s=0.123456, why="no blocks"))
    (line,) = lines
    assert re.fullmatch(r'\d\d:\d\d:\d\d info    quire\.engine step num_tokens=7 took_s=0\.1235 why="no blocks"', line)


@pytest.mark.parametrize(
    "evil", ["a\nb", "a\r\nb", "\x1b[31mred", "bell\x07", "line\u2028feed", "back\u202ewards", "nul\x00", "lone\udc80"]
)
def test_control_characters_never_reach_the_terminal(evil):
    with logs("info") as lines:
        logging.getLogger("quire").warning("text %s", evil)
        logging.getLogger("quire").warning("text %s", fields(text=evil))
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_a_traceback_is_one_line_too():
    with logs("info") as lines:
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            logging.getLogger("quire").exception("it failed")
    (line,) = lines
    assert "Traceback" in line
    assert "ValueError: first" in line


@pytest.mark.parametrize(("level", "expected"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_levels_below_the_chosen_one_are_silent(level, expected):
    with logs(level) as lines:
        logging.getLogger("quire").debug("details")
        logging.getLogger("quire").info("news")
        logging.getLogger("quire").warning("hm")
        logging.getLogger("aiohttp.access").info("GET /")
    assert len(lines) == expected


def test_fields_quote_what_would_split():
    assert fields(a="x y", b="", c=1.0, d=None, e="plain") == 'a="x y" b="" c=1 d=None e=plain'
