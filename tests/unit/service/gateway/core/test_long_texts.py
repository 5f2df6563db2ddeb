"""Texts that are much too long cost no more than a prompt of the greatest length."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.request import Conversation
from service.gateway.core.served_model import LONG_TEXT_CHARS, ServedModel
from tests.support.demo_engine import DEMO

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def model() -> ServedModel:
    """The demo model with a context too long for its byte bound."""
    return replace(ServedModel.read(Settings(model=DEMO)), max_model_len=100_000)


@pytest.mark.parametrize(
    "text", ["1" * MEBIBYTE, "a" * MEBIBYTE, "ﷺ" * (MEBIBYTE // 3), "a" + "\u0301" * (MEBIBYTE // 2)]
)
def test_a_text_that_is_too_long_is_refused_early(model, text):
    whole_s = time.thread_time()
    model.tokenizer.encode(text)
    whole_s = time.thread_time() - whole_s
    talk = Conversation(messages=({"role": "user", "content": "hi"}, {"role": "user", "content": text}))
    for prompt in (text, talk):
        begin_s = time.thread_time()
        with pytest.raises(RequestError) as caught:
            model.encode(prompt)
        assert caught.value.code == "context_length_exceeded"
        assert time.thread_time() - begin_s < whole_s / 2


def test_of_a_text_that_is_truncated_the_end_is_the_same(model):
    text = "".join(f"The cat {i} sat on the mat. " for i in range(40_000))
    assert len(text) > LONG_TEXT_CHARS
    ids = model.encode(text, keeps_end=True)
    assert ids[-100_000:] == model.tokenizer.encode(text)[-100_000:]


def test_a_long_text_that_fits_is_encoded_whole(model):
    text = "the cat sat on " * 25_000
    assert len(text) > LONG_TEXT_CHARS
    roomy = replace(model, max_model_len=1 << 20)
    assert roomy.encode(text) == roomy.tokenizer.encode(text)
