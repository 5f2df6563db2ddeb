"""apply_penalties against the two halves of its reference, `add_bias` and `penalise`: equal to the last bit."""

import numpy as np
import pytest

from model.ops.cpu.sampling import add_bias, penalise
from model.ops.interface import Bias, Penalties
from tests.support.kernel_checks import report_bandwidth, seconds_of
from tests.support.sampling_cases import random_bias, random_penalties

pytestmark = pytest.mark.gpu


def launch(ops, logits, adjusted, bias: Bias | None, seen: Penalties | None) -> None:
    biases = [None] * 3 if bias is None else [bias.indptr, bias.token_ids, bias.values]
    tokens = [None] * 3 if seen is None else [seen.indptr, seen.token_ids, seen.output_counts]
    factors = [None] * 3 if seen is None else [seen.repetition, seen.presence, seen.frequency]
    args = (logits, adjusted, *biases, *tokens, *factors, np.int32(logits.shape[1]))
    ops.launch("apply_penalties", (len(logits),), args, threads=1024, QUIRE_DTYPE=0)


def on_device(ops, record):
    return None if record is None else type(record)(**{key: ops.upload(each) for key, each in vars(record).items()})


@pytest.mark.parametrize("vocab", [1, 37, 4096, 32003, 151936])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_penalties", [False, True])
def test_adjusted_logits(open_ops, rng, vocab, with_bias, with_penalties):
    ops, rows = open_ops("float32"), 5
    logits = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
    logits[0, ::7] = -np.inf
    bias = random_bias(rng, rows, vocab) if with_bias else None
    seen = random_penalties(rng, rows, vocab) if with_penalties else None

    with ops.scratch():
        adjusted = ops.temporary(logits.shape, np.float32)
        given = ops.upload(logits)
        launch(ops, given, adjusted, on_device(ops, bias), on_device(ops, seen))
        got, left = ops.download(adjusted), ops.download(given)

    expected = logits.copy()
    if bias is not None:
        add_bias(expected, bias)
    if seen is not None:
        penalise(expected, seen)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(left, logits)


def test_speed(open_ops, rng):
    ops, rows, vocab = open_ops("float32"), 256, 151936
    seen = on_device(ops, random_penalties(rng, rows, vocab))
    logits, adjusted = ops.empty((rows, vocab), np.float32), ops.empty((rows, vocab), np.float32)
    seconds = seconds_of(ops, [lambda: launch(ops, logits, adjusted, None, seen)])
    report_bandwidth("apply_penalties [256, 151936]", 2 * logits.nbytes, seconds)
