"""Rope tables against their formulas; the goldens hold them against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from model.config import RopeConfig
from model.rope import RopeTables, attention_factor, inverse_frequencies, query_scale, rope_tables, short_length

DEFAULT = RopeConfig(kind="default", theta=10000.0)
LLAMA3 = RopeConfig(
    kind="llama3", theta=500000.0, factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeConfig(kind="yarn", theta=10000.0, factor=4.0, original_max_position=2048)


def test_default_tables():
    cos, sin = rope_tables(DEFAULT, 64, 100)
    assert cos.shape == sin.shape == (100, 32)
    assert cos.dtype == sin.dtype == np.float32
    angle = 77 * 10000.0 ** (-2 * 5 / 64)
    assert cos[77, 5] == pytest.approx(math.cos(angle), abs=1e-5)
    assert sin[77, 5] == pytest.approx(math.sin(angle), abs=1e-5)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()


def test_linear_reads_positions_closer_together():
    cos, _ = rope_tables(RopeConfig(kind="linear", theta=10000.0, factor=4.0), 64, 100)
    plain, _ = rope_tables(DEFAULT, 64, 25)
    np.testing.assert_allclose(cos[::4], plain, atol=1e-5)


def test_dynamic_is_plain_up_to_the_original_length():
    rope = RopeConfig(kind="dynamic", theta=10000.0, factor=2.0, original_max_position=128)
    plain = inverse_frequencies(DEFAULT, 64, 0)
    for max_model_len in (1, 128):
        np.testing.assert_array_equal(inverse_frequencies(rope, 64, max_model_len), plain)
    # At twice the length, 2 * 2 - 1 = 3: the slowest frequency is that much slower, the fastest is not
    stretched = inverse_frequencies(rope, 64, 256)
    assert stretched[0] == plain[0] == 1
    assert stretched[-1] == pytest.approx(plain[-1] / 3)


def test_llama3_against_the_published_loop():
    plain = inverse_frequencies(RopeConfig(kind="default", theta=500000.0), 128, 0)
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    np.testing.assert_allclose(inverse_frequencies(LLAMA3, 128, 0), expected, rtol=1e-12)
    assert len({bool(e == p) for e, p in zip(expected, plain, strict=True)}) == 2


def test_yarn_keeps_fast_and_stretches_slow_frequencies():
    plain, yarn = inverse_frequencies(DEFAULT, 128, 0), inverse_frequencies(YARN, 128, 0)
    turns = 2048 * plain / (2 * math.pi)
    np.testing.assert_allclose(yarn[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(yarn[turns < 0.8], plain[turns < 0.8] / 4)
    assert (np.diff(yarn / plain) <= 0).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
        ({"kind": "linear", "attention_factor": 0.5}, 1.0),
    ],
)
def test_attention_factor_is_in_both_tables(changes: dict, expected: float):
    rope = RopeConfig(**{**YARN.__dict__, **changes})
    assert attention_factor(rope) == pytest.approx(expected)
    cos, sin = rope_tables(rope, 64, 50)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-5)


def test_yarn_ramp_of_no_width_is_a_step():
    rope = RopeConfig(**{**YARN.__dict__, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False})
    ratio = inverse_frequencies(rope, 128, 0) / inverse_frequencies(DEFAULT, 128, 0)
    assert {round(value, 6) for value in ratio.tolist()} == {1.0, 0.25}


LONGROPE = RopeConfig(
    kind="longrope",
    theta=10000.0,
    factor=4.0,
    original_max_position=64,
    rotary_fraction=0.5,
    short_factors=(1.0,) * 4,
    long_factors=(1.0, 2.0, 4.0, 8.0),
)


def test_longrope_has_one_list_of_factors_up_to_the_original_length_and_one_beyond():
    plain = inverse_frequencies(DEFAULT, 8, 0)
    np.testing.assert_allclose(inverse_frequencies(LONGROPE, 8, 64), plain)
    np.testing.assert_allclose(inverse_frequencies(LONGROPE, 8, 65), plain / [1, 2, 4, 8])
    assert attention_factor(LONGROPE) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_pairs_outside_the_rotated_dimensions_are_left_as_they_are():
    cos, sin = rope_tables(LONGROPE, 16, 65)
    assert (cos[:, 4:] == 1).all()
    assert (sin[:, 4:] == 0).all()
    assert sin[1:, :4].all()
    cos, sin = rope_tables(RopeConfig(kind="none", theta=1e4), 16, 9)
    assert (cos == 1).all()
    assert (sin == 0).all()


def test_queries_are_scaled_from_the_original_length_on():
    rope = RopeConfig(kind="default", theta=1e4, query_beta=0.1, original_max_position=16)
    scale = query_scale(rope, 40)
    assert scale.dtype == np.float32
    assert (scale[:16] == 1).all()
    np.testing.assert_allclose(scale[[16, 31, 32]], [1 + 0.1 * math.log(2)] * 2 + [1 + 0.1 * math.log(3)], rtol=1e-6)
    assert query_scale(rope, 16) is None
    assert query_scale(DEFAULT, 40) is None


DYNAMIC = RopeConfig(kind="dynamic", theta=10000.0, factor=2.0, original_max_position=64)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC, DEFAULT, RopeConfig(kind="none", theta=1e4)], ids=lambda r: r.kind)
def test_short_rows_follow_those_of_the_longest_sequence(rope):
    tables, (long_cos, long_sin) = RopeTables(rope, 16, 300, 64), rope_tables(rope, 16, 300)
    short_cos, short_sin = rope_tables(rope, 16, 64)
    for rows, long, short in ((tables.cos, long_cos, short_cos), (tables.sin, long_sin, short_sin)):
        whole = np.concatenate([long, short])
        assert tables.shape == whole.shape
        for first, last in ((0, 364), (290, 310), (300, 364), (320, 330), (10, 20)):
            assert rows(first, last).tobytes() == whole[first:last].tobytes()


def test_ropes_that_depend_on_the_length_have_short_rows():
    assert short_length([LONGROPE], 65) == short_length([DEFAULT, DYNAMIC], 300) == 64
    assert short_length([LONGROPE], 64) == short_length([DEFAULT, YARN], 1 << 20) == 0


def test_rows_have_the_bits_of_the_whole_table():
    """Threads that load weights compute them in pieces."""
    whole, tables = rope_tables(LONGROPE, 16, 300), RopeTables(LONGROPE, 16, 300)
    for table, rows in zip(whole, (tables.cos, tables.sin), strict=True):
        pieces = [rows(first, min(first + 37, 300)) for first in range(0, 300, 37)]
        assert np.concatenate(pieces).tobytes() == table.tobytes()
