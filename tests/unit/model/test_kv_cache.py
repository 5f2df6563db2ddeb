import numpy as np
import pytest

from model.kv_cache import allocate_with_draft, block_bytes
from model.ops.cpu.ops import NumpyOps
from model.presets import PRESETS

DRAFT_SHAPE = (1, 2, 2, 16, 32)


@pytest.mark.parametrize("kv_dtype", [np.float32, np.uint8])
def test_a_copy_of_blocks_moves_both_caches(kv_dtype):
    config, ops = next(iter(PRESETS.values())), NumpyOps(kv_dtype=np.dtype(kv_dtype))
    blocks, kv, draft = allocate_with_draft(ops, config, 3, 16, DRAFT_SHAPE)
    assert blocks.nbytes == 3 * block_bytes(config, 16, ops.kv_dtype) + draft.nbytes
    assert draft.shape == (3, *DRAFT_SHAPE)
    kv[1], draft[1] = 5, 7
    ops.copy_blocks(blocks, np.array([1]), np.array([2]))
    assert (kv[2] == 5).all()
    assert (draft[2] == 7).all()
    assert not kv[0].any()
    assert not draft[0].any()
