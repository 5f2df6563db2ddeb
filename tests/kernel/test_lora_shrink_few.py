import pytest

from model.ops.cpu.ops import NumpyOps
from tests.support.kernel_checks import NUMPY_DTYPES, assert_close
from tests.support.lora_cases import PARTS, lora_case

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def fused():
    """The module that launches the kernel; it imports CUDA's packages."""
    return pytest.importorskip("model.ops.gpu.adapters.fused", reason="needs the packages of the cuda extra")


def check(fused, ops, case, dtype: str) -> None:
    expected = case.known(NumpyOps(NUMPY_DTYPES[dtype]).lora_shrink(case.x, case.matrix, case.rows))
    with ops.scratch():
        shrunk = ops.download(fused.shrink(ops, ops.upload(case.x), *case.on(ops, 16)))
    assert_close(case.known(shrunk), expected, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [1, 15, 17, 64, 128])
def test_rows_of_mixed_ranks(fused, open_hopper_ops, rng, dtype, parts, num_rows):
    check(fused, open_hopper_ops(dtype), lora_case(rng, dtype, parts, num_rows), dtype)


@pytest.mark.parametrize("num_inputs", [8, 64, 256, 520, 4096, 14336])
def test_inputs_of_any_number_of_splits(fused, open_hopper_ops, rng, num_inputs):
    check(fused, open_hopper_ops("bfloat16"), lora_case(rng, "bfloat16", "two", 40, num_inputs), "bfloat16")
