"""Philox4x32-10 against the vectors its authors publish, and the noise that sampling makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from model.ops.cpu.philox import gumbel_noise, philox_words

# Known answers of Random123 (kat_vectors): counter, key, words
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]):
    seeds = np.array([key[0] | key[1] << 32], np.uint64)
    assert philox_words(np.array([counter], np.uint32), seeds).tolist() == [list(words)]


def noise(token_ids: np.ndarray, seed: int = 7, position: int = 0, branch: int = 0) -> np.ndarray:
    n = len(token_ids)
    return gumbel_noise(
        token_ids, np.full(n, seed, np.uint64), np.full(n, position, np.uint32), np.full(n, branch, np.uint32)
    )


def test_noise_is_the_documented_word():
    words = philox_words(np.array([[33 // 4, 5, 2, 0]], np.uint32), np.array([1 << 40 | 9], np.uint64))[0]
    uniform = ((int(words[33 % 4]) >> 9) + 0.5) * 2.0**-23
    assert noise(np.array([33]), 1 << 40 | 9, 5, 2)[0] == pytest.approx(-np.log(-np.log(uniform)))


def test_noise_of_a_token_does_not_depend_on_its_company():
    token_ids = np.arange(1000)
    everything = noise(token_ids)
    shuffled = np.random.default_rng(0).permutation(token_ids)
    np.testing.assert_array_equal(noise(shuffled), everything[shuffled])
    np.testing.assert_array_equal(noise(token_ids[777:778]), everything[777:778])


def test_rows_that_meet_in_one_call_keep_their_own_seed_position_and_branch():
    token_ids = np.array([8, 8, 8, 8, 9])
    seeds = np.array([1, 2, 2, 2, 2], np.uint64)
    positions, branches = np.array([0, 0, 1, 1, 1], np.uint32), np.array([0, 0, 0, 3, 3], np.uint32)
    together = gumbel_noise(token_ids, seeds, positions, branches)
    alone = [
        noise(token_ids[i : i + 1], int(seeds[i]), int(positions[i]), int(branches[i]))[0]
        for i in range(len(token_ids))
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == 5


def test_noise_is_gumbel():
    sample = noise(np.arange(200_000)).astype(np.float64)
    assert np.isfinite(sample).all()
    assert sample.mean() == pytest.approx(0.5772, abs=0.01)
    assert sample.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    assert np.corrcoef(sample[:-1], sample[1:])[0, 1] == pytest.approx(0, abs=0.01)
