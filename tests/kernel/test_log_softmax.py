"""log_softmax against its reference `numpy_sampling.log_softmax`."""

import numpy as np
import pytest

from model.ops.cpu.sampling import log_softmax
from tests.support.kernel_checks import assert_close, report_bandwidth, seconds_of

pytestmark = pytest.mark.gpu


def launch(ops, logits, logprobs) -> None:
    rows, vocab = logits.shape
    ops.launch("log_softmax", (rows,), (logits, logprobs, np.int32(vocab)), threads=1024, QUIRE_DTYPE=0)


@pytest.mark.parametrize("vocab", [1, 3, 4096, 32003, 151936])
def test_log_probabilities(open_ops, rng, vocab):
    ops, rows = open_ops("float32"), 7
    logits = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
    logits[0, 1::7] = -np.inf
    logits[1] += 1e4
    with ops.scratch():
        given, logprobs = ops.upload(logits), ops.temporary(logits.shape, np.float32)
        launch(ops, given, logprobs)
        got = ops.download(logprobs)
    expected = log_softmax(logits)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    assert_close(got[finite], expected[finite], "float32")


def test_a_nan_stays_in_its_row(open_ops, rng):
    ops, rows, vocab = open_ops("float32"), 4, 5000
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    logits[1, 4321] = np.nan
    logits[2] = -np.inf
    with ops.scratch():
        given, logprobs = ops.upload(logits), ops.temporary(logits.shape, np.float32)
        launch(ops, given, logprobs)
        got = ops.download(logprobs)
    assert np.isnan(got[[1, 2]]).all()
    assert_close(got[[0, 3]], log_softmax(logits[[0, 3]]), "float32")


@pytest.mark.parametrize("rows", [16, 256])
def test_speed(open_ops, rng, rows):
    ops, vocab = open_ops("float32"), 151936
    with ops.scratch():
        logits = ops.upload(rng.standard_normal((rows, vocab), np.float32))
        logprobs = ops.temporary(logits.shape, np.float32)
        seconds = seconds_of(ops, [lambda: launch(ops, logits, logprobs)])
    report_bandwidth(f"log_softmax {rows} x {vocab}", 2 * logits.nbytes, seconds)
