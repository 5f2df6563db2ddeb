"""Block tables that grow, fork and copy on the first write."""

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from service.engine.kv.block_pool import OutOfBlocks
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.sequence import SequenceGroup
from service.engine.step import BlockCopy, Chunk, StepPlan
from tests.support.demo_engine import DemoEngines

SIZE = 4


def sequence(num_tokens=0):
    params = SamplingParams(max_tokens=100)
    request = EngineRequest(request_id="s", prompt=tuple(range(num_tokens)), sampling=params)
    return SequenceGroup(request, frozenset()).branches[0]


def computed(kv, num_tokens):
    made = sequence()
    kv.extend(made, num_tokens)
    made.num_computed_tokens = num_tokens
    return made


def forked(kv, parent, num_tokens=None):
    child = sequence()
    kv.fork(parent, child, parent.num_computed_tokens if num_tokens is None else num_tokens)
    return child


def write(kv, writer, num_tokens=1):
    """Return the copies that `extend` records for this many more tokens."""
    kv.extend(writer, writer.num_computed_tokens + num_tokens)
    writer.num_computed_tokens += num_tokens
    return kv.drain_copies()


def test_a_fork_takes_no_block():
    kv = KVManager(8, SIZE)
    parent = computed(kv, 10)
    children = [forked(kv, parent) for _ in range(3)]
    assert kv.pool.num_used == 3
    assert all(child.block_table == parent.block_table for child in children)
    assert [child.num_computed_tokens for child in children] == [10] * 3
    assert kv.drain_copies() == ()
    kv.check_invariants([parent, *children])


def test_the_first_write_copies_and_the_last_holder_writes_in_place():
    kv = KVManager(8, SIZE)
    parent = computed(kv, 10)
    child, other = forked(kv, parent), forked(kv, parent)
    shared = list(parent.block_table)
    assert kv.num_missing_blocks(parent, 11) == 1
    assert write(kv, parent) == (BlockCopy(shared[2], parent.block_table[2]),)
    assert write(kv, child) == (BlockCopy(shared[2], child.block_table[2]),)
    assert kv.num_missing_blocks(other, 11) == 0
    assert write(kv, other) == ()
    tables = [list(one.block_table) for one in (parent, child, other)]
    assert [table[:2] for table in tables] == [shared[:2]] * 3
    assert len({table[2] for table in tables}) == 3
    assert (kv.pool.num_used, kv.num_copies) == (5, 2)
    assert [write(kv, one) for one in (parent, child, other)] == [()] * 3
    kv.check_invariants([parent, child, other])


def test_a_fork_at_a_block_border_never_copies():
    kv = KVManager(8, SIZE)
    parent = computed(kv, 8)
    child = forked(kv, parent)
    assert write(kv, child, 5) == write(kv, parent, 5) == ()
    assert kv.pool.num_used == 2 + 2 + 2
    assert kv.num_copies == 0


def test_a_fork_behind_the_parents_last_token_takes_only_what_it_shares():
    kv = KVManager(8, SIZE)
    parent = computed(kv, 14)
    child = forked(kv, parent, 6)
    assert list(child.block_table) == list(parent.block_table)[:2]
    assert len(write(kv, child, 8)) == 1  # the parent has written into that block, and keeps it
    assert write(kv, parent) == ()
    assert kv.pool.num_used == 4 + 3


def test_every_shared_block_of_a_long_write_is_copied():
    kv = KVManager(16, SIZE)
    parent = computed(kv, 12)
    child = forked(kv, parent)
    child.num_computed_tokens = 5
    assert kv.num_missing_blocks(child, 15) == 3
    copies = write(kv, child, 10)
    assert [copy.source for copy in copies] == list(parent.block_table[1:])
    assert [copy.target for copy in copies] == list(child.block_table[1:3])
    kv.check_invariants([parent, child])


def test_without_room_for_the_copy_nothing_changes():
    kv = KVManager(3, SIZE)
    parent = computed(kv, 10)
    child = forked(kv, parent)
    with pytest.raises(OutOfBlocks):
        kv.extend(child, 11)
    assert child.block_table == parent.block_table
    assert kv.drain_copies() == ()
    kv.release(child)
    assert write(kv, parent) == ()
    kv.release(parent)
    assert kv.pool.num_free == 3


def test_copies_of_one_step_are_carried_out_in_their_order():
    """A block that is copied, then freed by a preemption, may be the target of a later copy of the same step."""
    executor = DemoEngines(NumpyOps(np.dtype(np.float32))).executor(num_blocks=6, max_num_seqs=1)
    cache = executor.kv
    for block in range(6):
        cache[block] = block
    only = sequence(1)
    only.block_table.append(5)
    copies = (BlockCopy(0, 1), BlockCopy(2, 0), BlockCopy(3, 1), BlockCopy(1, 4))
    executor.collect(executor.launch(StepPlan((Chunk(only, 0, 1, (only,)),), copies)))
    assert [float(block.flat[0]) for block in cache[:5]] == [2, 3, 2, 3, 3]
