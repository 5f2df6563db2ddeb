"""The choice of one kernel that rotates and attends few decodes, and its launch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from model.ops.gpu.attention.rotated_decode import can_rotate, rotate_and_decode, should_rotate
from model.ops.interface import AttentionBatch, HeadRotation

FP32, BF16 = 0, 2
HOPPER, SMALL = 227 << 10, 99 << 10  # shared memory of a block


class Launcher:
    def __init__(self, dtype_code: int = BF16, num_sms: int = 132, max_shared_bytes: int = HOPPER):
        self.dtype_code, self.num_sms, self.max_shared_bytes, self.arch = dtype_code, num_sms, max_shared_bytes, "90a"
        self.dtype, self.tensor_maps = np.dtype(np.float16), SimpleNamespace()
        self.launches: list = []

    temporary = staticmethod(np.empty)
    zeros = staticmethod(np.zeros)

    def launch(self, name, grid, args, **how):
        self.launches.append(SimpleNamespace(name=name, grid=grid, args=args, **how))


def decodes(rows: int, heads=(32, 8), head_dim: int = 128, kv_dtype=np.float16) -> tuple[np.ndarray, AttentionBatch]:
    kv = np.empty((1, 1, 2, heads[1], 16, head_dim), kv_dtype)
    tables, lens = np.zeros((rows, 256), np.int32), np.zeros(rows, np.int32)
    return np.empty((rows, (heads[0] + 2 * heads[1]) * head_dim), np.float16), AttentionBatch(kv, 0, tables, lens, 0.1)


@pytest.mark.parametrize(
    ("rows", "sizes", "device", "is_one"),
    [
        (1, {}, {}, True),
        (16, {}, {}, True),
        (16, {"kv_dtype": np.uint8}, {"max_shared_bytes": SMALL}, True),
        (17, {}, {}, False),
        (33, {"heads": (16, 4)}, {}, True),
        (16, {}, {"num_sms": 108}, False),  # blocks that wait for each other run at once
        (8, {"heads": (32, 32)}, {}, False),
        (1, {"heads": (132, 12)}, {}, False),  # blocks that combine a row each wait for the others
        (1, {"heads": (120, 12)}, {}, True),
        (1, {}, {"dtype_code": FP32}, False),
        (2, {}, {"max_shared_bytes": SMALL}, False),
        (1, {}, {"max_shared_bytes": SMALL}, True),
    ],
)
def test_one_kernel_serves_few_rows_whose_blocks_run_at_once(rows, sizes, device, is_one):
    assert can_rotate(Launcher(**device), *decodes(rows, **sizes)) == is_one


@pytest.mark.parametrize(
    ("rows", "sizes", "is_faster"),
    [
        (1, {}, True),
        (16, {}, True),
        (17, {"heads": (16, 4)}, False),
        (1, {"heads": (32, 4)}, True),
        (1, {"heads": (36, 4)}, False),
        (2, {"heads": (32, 4)}, False),
        (1, {"heads": (32, 4), "kv_dtype": np.uint8}, False),
        (1, {"kv_dtype": np.uint8}, True),
        (7, {"kv_dtype": np.uint8}, False),
        (8, {"kv_dtype": np.uint8}, True),
    ],
)
def test_one_kernel_serves_what_it_is_faster_at(rows, sizes, is_faster):
    assert should_rotate(Launcher(), *decodes(rows, **sizes)) == is_faster


def test_drafts_have_kernels_of_their_own():
    qkv, batch = decodes(4)
    for kind in ("exact", "drafted"):
        assert not can_rotate(Launcher(), qkv, replace(batch, **{kind: True}))


def test_a_launch_before_its_predecessor_ends_needs_a_plan():
    device, (qkv, batch) = Launcher(), decodes(4)
    rotation = HeadRotation(*np.zeros((2, 64, 64), np.float32))
    at = np.zeros(4, np.int32), np.zeros(4, np.int64)
    out = rotate_and_decode(device, qkv, rotation, at, batch)
    plan = device.launches[0].args[0]
    rotate_and_decode(device, qkv, rotation, at, replace(batch, plan=plan))
    assert [launch.name for launch in device.launches] == ["plan_decode", "rope_paged_decode", "rope_paged_decode"]
    assert [launch.overlaps for launch in device.launches[1:]] == [False, True]
    assert device.launches[1].grid == (8, device.launches[0].args[4])
    assert out.shape == (4, 4096)
