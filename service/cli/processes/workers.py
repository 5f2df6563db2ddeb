"""The workers of `quire serve`, each a process with its own devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from service.cli.processes.children import ChildGroup, RestartingChild
from service.config.settings import WORKER, Settings
from service.errors import StartupError
from service.observability.logs import PROCESS_NAME

log = logging.getLogger("quire.serve")

VISIBLE = "CUDA_VISIBLE_DEVICES"


def make_workers(
    settings: Settings, name: str, devices: Sequence[Mapping[str, str]], environ: Mapping[str, str]
) -> ChildGroup:
    """Return the workers, not yet started. `devices`: their variables. Several workers append a number to `name`."""
    threads = _blas_threads(environ, len(devices))
    if len(devices) == 1:
        only = replace(settings, worker_name=name)
        return ChildGroup([RestartingChild(WORKER, only, {**threads, **devices[0]})])
    return ChildGroup(
        [
            _member(replace(settings, worker_name=f"{name}-{number}"), number, {**threads, **own_devices})
            for number, own_devices in enumerate(devices)
        ]
    )


def _member(settings: Settings, number: int, environ: Mapping[str, str]) -> RestartingChild:
    async def on_end(_: int) -> None:
        from service.cli.processes.hand_over import hand_over_jobs

        await hand_over_jobs(settings)

    return RestartingChild(WORKER, settings, {**environ, PROCESS_NAME: f"{WORKER}-{number}"}, on_end=on_end)


def devices_of_workers(
    settings: Settings, environ: Mapping[str, str], visible: Sequence[str]
) -> Sequence[Mapping[str, str]]:
    """Return the variables that assign `--tensor-parallel-size` of the `visible` devices to each worker.

    On a CPU and for a single worker they are empty. Raises StartupError if there are too few devices.
    """
    num, num_each = settings.data_parallel_size, settings.tensor_parallel_size
    if (
        num == 1
        or settings.device == "cpu"
        or (settings.device == "auto" and (not visible or find_spec("cupy") is None))
    ):
        return [{}] * num
    if num * num_each > len(visible):
        shown = VISIBLE if VISIBLE in environ else "nvidia-smi -L"
        raise StartupError(
            f"--data-parallel-size: {num} workers of {num_each} GPU{'s' * (num_each > 1)} need {num * num_each}, "
            f"{len(visible)} {'is' if len(visible) == 1 else 'are'} visible ({shown})"
        )
    return [{VISIBLE: ",".join(visible[i * num_each : (i + 1) * num_each])} for i in range(num)]


def visible_devices(environ: Mapping[str, str], devices: Path = Path("/dev")) -> Sequence[str]:
    """Return the names of the GPUs visible to CUDA, without loading CUDA."""
    if VISIBLE not in environ:
        return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]
    names = []
    for name in map(str.strip, environ[VISIBLE].split(",")):
        if not name or name.startswith("-"):
            break  # CUDA ignores this entry and all later ones
        names.append(name)
    return names


def _blas_threads(environ: Mapping[str, str], num_workers: int) -> Mapping[str, str]:
    """Leave one core to gateway and Redis, because BLAS threads spin."""
    given = environ.get("OPENBLAS_NUM_THREADS")
    return {"OPENBLAS_NUM_THREADS": given or str(max(1, ((os.cpu_count() or 1) - 1) // num_workers))}
