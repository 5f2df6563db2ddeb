import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import DTYPES, NUMPY_DTYPES, assert_close, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_width", "k_width"), [(64, 32), (4096, 4096), (5120, 1024), (36, 12)])
@pytest.mark.parametrize("rows", [1, 300])
def test_q_and_k_are_normed_and_v_is_not(open_ops, rng, dtype, q_width, k_width, rows):
    """36 and 12 take the path of single elements."""
    ops, reference = open_ops(dtype), NumpyOps(NUMPY_DTYPES[dtype])
    qkv = normal(rng, (rows, q_width + 2 * k_width), dtype, scale=3.0)
    norms = normal(rng, (q_width,), dtype), normal(rng, (k_width,), dtype)
    on_device = ops.upload(qkv)
    with ops.scratch():
        ops.normalise_qk(on_device, *map(ops.upload, norms), 1e-6)
        found = ops.download(on_device)
    reference.normalise_qk(qkv, *norms, 1e-6)
    assert_close(found, qkv, dtype)
