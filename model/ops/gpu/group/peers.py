"""Peer access between the GPUs of a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import cupy
from cupy.cuda import runtime

from model.errors import ModelError

FLAG = "--tensor-parallel-size"
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


def check_count(num_ranks: int) -> None:
    """Raise ModelError if fewer than `num_ranks` GPUs are visible."""
    num_visible = runtime.getDeviceCount()
    if num_ranks > num_visible:
        raise ModelError(f"{FLAG}: {num_ranks} GPUs are needed, {num_visible} are visible")


def connect(device_ids: Sequence[int]) -> None:
    """Let each GPU read and write the memory of the others. Raises ModelError if GPUs differ or lack peer access."""
    _check_equal(device_ids)
    for own, peer in permutations(dict.fromkeys(device_ids), 2):
        if not runtime.deviceCanAccessPeer(own, peer):
            raise ModelError(f"{FLAG}: cuda:{own} has no peer access to cuda:{peer} (GPUs with NVLink between them)")
        cupy.cuda.Device(own).use()
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            if error.status != _ALREADY_ENABLED:
                raise ModelError(f"{FLAG}: cuda:{own} has no peer access to cuda:{peer}: {error}") from error


def _check_equal(device_ids: Sequence[int]) -> None:
    first = _description(device_ids[0])
    for device_id in device_ids[1:]:
        if (other := _description(device_id)) != first:
            raise ModelError(f"{FLAG}: cuda:{device_ids[0]} is {first}, cuda:{device_id} is {other} (equal GPUs)")


def _description(device_id: int) -> str:
    properties = runtime.getDeviceProperties(device_id)
    name, num_bytes = properties["name"].decode(), properties["totalGlobalMem"]
    return f"{name} with {num_bytes / (1 << 30):.0f} GiB"
