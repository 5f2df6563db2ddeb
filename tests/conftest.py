"""Setup of every test: hypothesis ignores slowness and draws the same cases in CI, so that a check gives the same
answer twice; logs stay apart.
"""

import gc
import logging
import os
from pathlib import Path

import pytest
from hypothesis import settings

from service.garbage import YOUNG_OBJECTS

# Each HTTP client and each gateway process reads all certificates that this names, in 30 to 50 ms.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "authority.pem")

settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

gc.disable()  # imports and collected tests are no garbage: looking for it took a quarter of the collection


WAITING = [Path(__file__).parent / name for name in ("chaos", "service")]
WAITING_ENDS_AT = 0.8


def pytest_collection_modifyitems(items):
    """Spread the files that wait for processes of their own among the others, so that no core is idle."""
    files = dict.fromkeys(item.path for item in items)
    waiting = [path for path in files if any(path.is_relative_to(folder) for folder in WAITING)]
    others = [path for path in files if path not in waiting]
    places = {path: at * WAITING_ENDS_AT / len(waiting) for at, path in enumerate(waiting)}
    places |= {path: at / len(others) for at, path in enumerate(others)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish():
    """Keep modules and 9,600 tests out of every later collection of garbage."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    gc.enable()


@pytest.fixture(autouse=True)
def logs_as_they_were():
    """A test that runs a command in this process sets up its logs; the next test must not see them."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
