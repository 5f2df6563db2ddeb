import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.expert_checks import REFERENCE, routed_ids, upload_groups
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 2048])
def test_sums(open_ops, rng, dtype, width):
    ops, ids = open_ops(dtype), routed_ids(rng, 37, 11, 3)
    groups, weights = REFERENCE.group_by_expert(ids, 11), rng.random((37, 3), np.float32)
    x = normal(rng, (37 * 3, width), dtype)
    with ops.scratch():
        out = ops.download(ops.combine_experts(ops.upload(x), upload_groups(ops, groups), ops.upload(weights)))
    assert_close(out, NumpyOps(NUMPY_DTYPES[dtype]).combine_experts(x, groups, weights), dtype)


@pytest.mark.parametrize("width", [100, 2048])
def test_padding_gives_zeros(open_ops, rng, width):
    ops, ids = open_ops("bfloat16"), routed_ids(rng, 9, 11, 3)
    ids[4:6] = -1
    groups, weights = REFERENCE.group_by_expert(ids, 11), rng.random((9, 3), np.float32)
    x = normal(rng, (27, width), "bfloat16")
    x[groups.offsets[-1] :] = np.nan
    with ops.scratch():
        out = ops.download(ops.combine_experts(ops.upload(x), upload_groups(ops, groups), ops.upload(weights)))
    assert not out[4:6].any()
    x[groups.offsets[-1] :] = 0
    assert_close(out, NumpyOps(NUMPY_DTYPES["bfloat16"]).combine_experts(x, groups, weights), "bfloat16")
