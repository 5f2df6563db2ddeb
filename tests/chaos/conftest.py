"""One fleet for a module, ended with it; goldens for all; the figures at the end."""

from __future__ import annotations

from collections.abc import Iterator

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
    if figures := noted():
        terminalreporter.section("figures of the chaos suite")
        for name, value in figures.items():
            terminalreporter.write_line(f"{name}: {value}")
