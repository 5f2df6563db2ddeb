"""A fleet per module, shared goldens, and the figures at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from tests.support.figures import noted
from tests.support.fleet import Fleet
from tests.support.history import Goldens


@pytest.fixture(scope="session")
def goldens() -> Goldens:
    return Goldens()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the figures, and write them as JSON to the file that CHAOS_OUT names."""
    if figures := noted():
        terminalreporter.section("figures of the chaos suite")
        for name, value in figures.items():
            terminalreporter.write_line(f"{name}: {value}")
        if out := os.environ.get("CHAOS_OUT"):
            Path(out).write_text(json.dumps({"date": date.today().isoformat(), "figures": figures}, indent=2) + "\n")
