import numpy as np
import pytest

from model.kv_cache import allocate_with_draft, block_bytes
from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import on_rank
from model.presets import PRESETS
from tests.support.group import group_of

DRAFT_SHAPE = (1, 2, 2, 16, 32)


@pytest.mark.parametrize("kv_dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_copy_of_blocks_moves_both_caches(kv_dtype, num_ranks):
    kv_dtype = np.dtype(kv_dtype)
    ops = NumpyOps(kv_dtype=kv_dtype) if num_ranks == 1 else group_of(num_ranks, kv_dtype=kv_dtype)
    config = next(iter(PRESETS.values()))
    blocks, whole, draft = allocate_with_draft(ops, config, 3, 16, DRAFT_SHAPE)
    assert blocks.nbytes == 3 * block_bytes(config, 16, ops.kv_dtype, num_ranks) + draft.nbytes
    assert draft.shape == (3, *DRAFT_SHAPE)
    whole[1], draft[1] = 5, 7
    ops.copy_blocks(blocks, *ops.upload_all([np.array([1]), np.array([2])]))
    for rank in range(num_ranks):
        kv, own = on_rank((whole, draft), rank)
        assert (kv[2] == 5).all()
        assert (own[2] == 7).all()
        assert not kv[0].any()
        assert not own[0].any()
