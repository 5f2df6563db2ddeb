"""The second tier of a group: each rank copies its part of a block."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.cpu.ops import FLOAT32
from model.ops.group.arrays import Section, Split, divided
from model.ops.group.host_blocks import GroupHostBlocks, GroupTransfer
from tests.support.group import group_of


class Copy:
    def __init__(self, done: bool, seconds: float):
        self.done, self.copy_s = done, seconds

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True

    def seconds(self) -> float:
        return self.copy_s


class Memory:
    def __init__(self, num_ready: int, failure: Exception | None = None):
        self.num_ready, self.failure = num_ready, failure


def test_blocks_go_out_and_come_back():
    ops = group_of(2)
    kv = divided(ops.empty((3, 1, 2, 1, 4, 8), FLOAT32), Split(3, (Section(2),)))
    kv.parts[0][1], kv.parts[1][1] = 5, 7
    host = ops.host_blocks(kv, 2)
    host.copy_out([1], [0]).wait()
    host.copy_in([0], [2]).wait()
    np.testing.assert_array_equal(ops.download(kv)[2], ops.download(kv)[1])
    host.close()
    assert host.num_ready == 0


def test_a_transfer_is_done_when_every_rank_s_is():
    copies = [Copy(True, 1.0), Copy(False, 3.0)]
    transfer = GroupTransfer(copies)
    assert not transfer.is_done()
    transfer.wait()
    assert transfer.is_done()
    assert transfer.seconds() == 3.0


@pytest.mark.parametrize("failure", [None, OSError("full")])
def test_a_group_has_the_blocks_that_all_ranks_have(failure):
    host = GroupHostBlocks(group_of(2).ranks, [Memory(5), Memory(3, failure)])
    assert (host.num_ready, host.failure) == (3, failure)
