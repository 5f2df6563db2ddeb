"""`quire worker` with faults ordered by a file: python faulty_worker.py FILE worker --redis-url ...

While FILE holds `hang`, a step never ends; `hold` also holds the GIL, as a driver's call may.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from service.cli.main import main
from service.engine.execution.executor import ModelExecutor

FOR_EVER_S = 3600


def make_faulty(orders: Path) -> None:
    launch = ModelExecutor.launch

    def faulty(executor: ModelExecutor, plan):
        order = orders.read_text() if orders.exists() else ""
        if order == "hang":
            time.sleep(FOR_EVER_S)
        if order == "hold":
            ctypes.PyDLL(None).sleep(FOR_EVER_S)
        return launch(executor, plan)

    ModelExecutor.launch = faulty


if __name__ == "__main__":
    make_faulty(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
