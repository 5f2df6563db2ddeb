"""The tiled layout of 4-bit weights, against its definition in cuda/common/int4.cuh."""

import numpy as np
import pytest

from model.ops.int4 import can_tile, tile
from model.ops.weight import WeightFormat
from tests.support.int4_checks import random_int4


def test_every_weight_is_where_the_tensor_cores_take_it():
    weight = random_int4(np.random.default_rng(3), (48, 256), 64, has_zeros=True)
    tiled = tile(weight)
    codes = np.stack([weight.data & 15, weight.data >> 4], axis=2).reshape(48, 256)
    words = tiled.data.view(np.uint32).reshape(2, 3, 2, 8, 4, 4)
    for span, block, half, g, t, step in np.ndindex(words.shape):
        for register in range(4):
            for high in range(2):
                row = 16 * block + g + 8 * (register % 2)
                column = 128 * span + 64 * half + 16 * step + 2 * t + 8 * (register // 2) + high
                word = int(words[span, block, half, g, t, step])
                assert word >> (4 * register + 16 * high) & 15 == codes[row, column]


def test_rows_g_and_g_plus_8_share_a_word_of_scales():
    weight = random_int4(np.random.default_rng(4), (32, 256), 32, has_zeros=True)
    tiled = tile(weight)
    for row in range(32):
        place = (slice(None), row // 16, row % 8 * 2 + row % 16 // 8)
        np.testing.assert_array_equal(tiled.scale[place], weight.scale[row])
        np.testing.assert_array_equal(tiled.zero_point[place], weight.zero_point[row])


def test_shape_and_bytes_stay():
    weight = random_int4(np.random.default_rng(5), (32, 384), 128)
    tiled = tile(weight)
    assert tiled.format is WeightFormat.INT4_TILED
    assert (tiled.shape, tiled.nbytes) == (weight.shape, weight.nbytes)


@pytest.mark.parametrize(
    ("shape", "group_size", "fits"),
    [
        ((32, 256), 32, True),
        ((32, 384), 384, True),
        ((24, 256), 32, False),
        ((32, 192), 64, False),
        ((32, 256), 16, False),
    ],
)
def test_which_weights_have_tiles(shape, group_size, fits):
    assert can_tile(random_int4(np.random.default_rng(6), shape, group_size)) is fits
