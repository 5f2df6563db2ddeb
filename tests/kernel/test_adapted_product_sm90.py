"""Products that multiply by the rows' adapters; the reference is `linear`, then `lora_expand`, rounded once."""

from dataclasses import replace

import numpy as np
import pytest

from model.adapter_slots import adapter_rows
from model.ops.adapter_interface import AdapterMatrix
from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Fp8Rows
from model.ops.weight import Weight
from tests.support.fp8_checks import as_weight, assert_product, in_float64, random_rows, upload
from tests.support.kernel_checks import assert_close, normal
from tests.support.lora_cases import PARTS, LoraCase, adapted_product, expected_product, lora_case

pytestmark = pytest.mark.gpu


def slots_of(case: LoraCase) -> np.ndarray:
    slots = np.full(len(case.x), -1, np.int32)
    for slot, first, count in case.rows.tiles:
        slots[case.rows.rows[first : first + count]] = slot
    return slots


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [8, 17, 32, 33, 64, 96])
@pytest.mark.parametrize("num_inputs", [264, 4096])
def test_rows_of_mixed_ranks(open_hopper_ops, rng, dtype, parts, num_rows, num_inputs):
    """B of the adapter of rank 0 is NaN: a slot's matrix is not written where its adapter has none."""
    case = lora_case(rng, dtype, parts, num_rows, num_inputs)
    case.matrix.b[list(case.matrix.ranks).index(0)] = np.nan
    weight = normal(rng, (PARTS[parts][-1], num_inputs), dtype, num_inputs**-0.5)
    bias = normal(rng, weight.shape[:1], dtype) if num_rows in (32, 64) else None
    out = adapted_product(open_hopper_ops(dtype), case, weight, bias)
    assert_close(out, expected_product(case, weight, bias, dtype), dtype)


@pytest.mark.parametrize("num_rows", [64, 96])
def test_tiles_in_rounds(open_hopper_ops, rng, num_rows):
    """More tiles than blocks, whose second has another part."""
    case = lora_case(rng, "bfloat16", "two", num_rows)
    b = normal(rng, (5, 17400, 64), "bfloat16")
    b[case.matrix.ranks == 3, :, 3:], b[case.matrix.ranks == 8, :, 8:], b[case.matrix.ranks == 20, :, 20:] = 0, 0, 0
    case = replace(case, matrix=replace(case.matrix, b=b, part_ends=(8800, 17400)))
    weight = normal(rng, (17400, 264), "bfloat16", 264**-0.5)
    out = adapted_product(open_hopper_ops("bfloat16"), case, weight, None)
    assert_close(out, expected_product(case, weight, None, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("num_inputs", [8, 64, 520, 14336])
def test_inputs_of_any_number_of_splits(open_hopper_ops, rng, num_inputs):
    case = lora_case(rng, "bfloat16", "two", 40, num_inputs)
    weight = normal(rng, (PARTS["two"][-1], num_inputs), "bfloat16", num_inputs**-0.5)
    out = adapted_product(open_hopper_ops("bfloat16"), case, weight, None)
    assert_close(out, expected_product(case, weight, None, "bfloat16"), "bfloat16")


def test_an_adapter_for_each_row(open_hopper_ops, rng):
    """More units of x @ A than blocks, and the same bits in launches that follow one another."""
    ops, num_slots, num_rows = open_hopper_ops("bfloat16"), 64, 64
    a, b = normal(rng, (num_slots, 2, 32, 520), "bfloat16", 520**-0.5), normal(rng, (num_slots, 1280, 32), "bfloat16")
    x, slots = normal(rng, (num_rows, 520), "bfloat16"), rng.permutation(num_slots).astype(np.int32)
    matrix = AdapterMatrix(a, b, np.full(num_slots, 32, np.int32), (640, 1280))
    case = LoraCase(x, matrix, adapter_rows(slots, NumpyOps()), np.empty(0))
    weight = normal(rng, (1280, 520), "bfloat16", 520**-0.5)
    out = adapted_product(ops, case, weight, None)
    assert_close(out, expected_product(case, weight, None, "bfloat16"), "bfloat16")
    for _ in range(3):
        np.testing.assert_array_equal(adapted_product(ops, case, weight, None).view(np.uint16), out.view(np.uint16))


def test_tags_begin_again(open_hopper_ops, rng):
    """The sums of a launch long ago are not taken for this one's."""
    product = pytest.importorskip("model.ops.gpu.adapters.product", reason="needs the packages of the cuda extra")
    ops, case = open_hopper_ops("bfloat16"), lora_case(rng, "bfloat16", "two", 64)
    weight = normal(rng, (PARTS["two"][-1], 264), "bfloat16", 264**-0.5)
    first = adapted_product(ops, case, weight, None)
    left = ops.zeros((product.NUM_ROOMS, 2), np.uint32)
    left.set(np.tile(np.array([0, 2**32 - 3], np.uint32), (product.NUM_ROOMS, 1)), stream=ops.stream)
    for _ in range(4 * product.NUM_ROOMS):
        np.testing.assert_array_equal(adapted_product(ops, case, weight, None).view(np.uint16), first.view(np.uint16))
    np.testing.assert_array_equal(ops.download(left), [[0, 2]] * product.NUM_ROOMS)


def test_a_row_has_its_bits_in_any_batch(open_hopper_ops, rng):
    ops, case = open_hopper_ops("bfloat16"), lora_case(rng, "bfloat16", "three", 96)
    weight = normal(rng, (PARTS["three"][-1], 264), "bfloat16", 264**-0.5)
    slots, whole = slots_of(case), adapted_product(ops, case, weight, None)
    for count in (96, 80, 64, 40, 32, 8):
        some = rng.permutation(96)[:count]
        part = replace(case, x=case.x[some], rows=adapter_rows(slots[some], NumpyOps()))
        np.testing.assert_array_equal(
            adapted_product(ops, part, weight, None).view(np.uint16), whole[some].view(np.uint16)
        )


def fp8_product(ops, case: LoraCase, x: Fp8Rows, weight: Fp8Rows, bias: np.ndarray | None) -> np.ndarray:
    with ops.scratch():
        bias = None if bias is None else ops.upload(bias)
        out = ops.lora_linear(upload(ops, x), as_weight(upload(ops, weight)), bias, *case.on(ops, 16))
        assert out is not None
        return ops.download(out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("num_rows", [8, 33, 64, 96])
@pytest.mark.parametrize("num_inputs", [272, 4096])
def test_e4m3_rows_and_weights(open_hopper_ops, rng, dtype, parts, num_rows, num_inputs):
    case = lora_case(rng, dtype, parts, num_rows, num_inputs)
    x, weight = random_rows(rng, num_rows, num_inputs), random_rows(rng, PARTS[parts][-1], num_inputs)
    bias = normal(rng, weight.scale.shape, dtype) if num_rows in (33, 64) else None
    added, reference = np.zeros((num_rows, len(weight.data)), np.float32), NumpyOps()
    shrunk = reference.lora_shrink(in_float64(x).astype(np.float32), case.matrix, case.rows)
    reference.lora_expand(shrunk, case.matrix, case.rows, added)
    out = fp8_product(open_hopper_ops(dtype), case, x, weight, bias)
    assert_product(out, x, weight, added if bias is None else added + bias.astype(np.float32))


def test_a_row_in_e4m3_has_its_bits_in_any_batch(open_hopper_ops, rng):
    ops, case = open_hopper_ops("bfloat16"), lora_case(rng, "bfloat16", "three", 96, 528)
    x, weight = random_rows(rng, 96, 528), random_rows(rng, PARTS["three"][-1], 528)
    whole, slots = fp8_product(ops, case, x, weight, None), slots_of(case)
    for count in (96, 64, 40, 8):
        some = rng.permutation(96)[:count]
        part = replace(case, x=case.x[some], rows=adapter_rows(slots[some], NumpyOps()))
        out = fp8_product(ops, part, Fp8Rows(x.data[some], x.scale[some]), weight, None)
        np.testing.assert_array_equal(out.view(np.uint16), whole[some].view(np.uint16))


def test_other_products_take_two_kernels(open_hopper_ops, rng):
    """Few rows, many rows, and rows with the bits of a batch of one."""
    ops = open_hopper_ops("bfloat16")
    for num_rows in (7, 64, 97):
        case = lora_case(rng, "bfloat16", "one", num_rows)
        operands = ops.upload(case.x), Weight(ops.upload(normal(rng, (512, 264), "bfloat16"))), None
        with ops.scratch(), ops.exact_rows():
            assert ops.lora_linear(*operands, *case.on(ops, 16)) is None
        with ops.scratch():
            assert (ops.lora_linear(*operands, *case.on(ops, 16)) is None) == (num_rows != 64)
