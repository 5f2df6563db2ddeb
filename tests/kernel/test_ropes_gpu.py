"""Ropes of short and long requests in captured decodes and prompts, each alone and beside the other."""

import pytest

from tests.support.goldens import Golden
from tests.support.rope_requests import LONG, ROUNDING, SHORT, answers, engine_of, requests_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "original"), [("phi4_mini_longrope_bf16", 32), ("llama_dynamic_bf16", 64)])
def test_each_request_has_the_rope_of_its_longest_length(name, original):
    golden = Golden.load(name)
    requests, how = requests_of(golden, original), {"device": "cuda", "dtype": "float32", "block_size": 16}
    short, long = ({key: requests[key]} for key in (SHORT, LONG))
    alone = answers(engine_of(golden, 128, **how), short) | answers(engine_of(golden, 128, **how), long)
    wanted = answers(engine_of(golden, original, **how), short)[SHORT]
    assert alone[SHORT].is_close_to(wanted)
    assert abs(alone[LONG].logprobs[0] - wanted.logprobs[0]) > 10 * ROUNDING
    together = answers(engine_of(golden, 128, **how), requests)
    assert together[SHORT].is_close_to(wanted)
    assert together[LONG].is_close_to(alone[LONG])
