"""`quire worker` that dies at a point chosen by a test: python chaos_worker.py FOLDER worker --redis-url ...

A file in FOLDER is an order that the first worker to take it carries out once: `claim`, `prefill`, `token-7` and
`settle` name the point of its SIGKILL. Every step takes STEP_S longer, to leave time for faults. A prompt that begins
with POISON kills the worker in any step that computes it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from model.ops import backend
from service.cli.main import main
from service.engine.execution.executor import ModelExecutor
from service.queue.redis.claims import ClaimedJobs
from service.queue.redis.worker import RedisWorkerQueue
from tests.support.fleet import IS_FP8
from tests.support.rowwise_ops import RowwiseOps

POISON = (13, 13, 13, 13)
STEP_S = float(os.environ.get("CHAOS_STEP_S", "0.01"))


class Orders:
    def __init__(self, folder: Path):
        self._folder = folder

    def die(self, name: str) -> None:
        """Send SIGKILL to this process if this order exists and no other worker has taken it."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def token(self) -> int | None:
        """Return the event after which a worker should die."""
        return next((int(order.name.partition("-")[2]) for order in self._folder.glob("token-*")), None)


def obey(orders: Orders) -> None:
    fetch, publish, launch = RedisWorkerQueue.fetch, ClaimedJobs.publish, ModelExecutor.launch

    async def fetch_and_die(worker, *args):
        claims = await fetch(worker, *args)
        if claims:
            orders.die("claim")
        return claims

    async def publish_and_die(held, events):
        if any(event.end is not None for event in events):
            orders.die("settle")
        lost = await publish(held, events)
        token = orders.token()
        if token is not None and any(event.number >= token for event in events):
            orders.die(f"token-{token}")
        return lost

    def launch_and_die(executor, plan):
        time.sleep(STEP_S)
        if any(chunk.sequence.request.prompt[: len(POISON)] == POISON for chunk in plan.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        launched = launch(executor, plan)
        if any(chunk.start < chunk.sequence.num_prompt_tokens for chunk in plan.chunks):
            orders.die("prefill")
        return launched

    RedisWorkerQueue.fetch, ClaimedJobs.publish, ModelExecutor.launch = fetch_and_die, publish_and_die, launch_and_die


if __name__ == "__main__":
    if IS_FP8:
        backend.NumpyOps = RowwiseOps
    obey(Orders(Path(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
