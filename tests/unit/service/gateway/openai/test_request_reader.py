"""Bodies as requests: fields that work, defaults, and fields that contradict others."""

import math

import pytest

from model.sampling_params import BeamSearch
from service.gateway.core.request import CHAT, COMPLETIONS
from service.gateway.openai.request_reader import read_request
from tests.unit.service.gateway.openai.test_refused_fields import BODIES, refused

NAN, INF = math.nan, math.inf


EVERYTHING = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "0": 3.5},
    "seed": -1,
    "stop": ["a", "b", "a"],
    "stop_token_ids": [9, 9, 8],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "logprobs": 3,
    "timeout": 5,
    "user": "me",
}


def test_everything_that_works():
    request = read_request(COMPLETIONS, EVERYTHING)
    options = request.sampling
    assert request.prompts == ((1, 2, 3),)
    assert (options.max_tokens, options.min_tokens, options.temperature, options.top_p) == (7, 2, 0, 0.5)
    assert (options.top_k, options.min_p, options.repetition_penalty) == (4, 0.1, 1.1)
    assert (options.presence_penalty, options.frequency_penalty) == (1, -1)
    assert options.logit_bias == ((5, -100.0), (0, 3.5))
    assert options.seed == 2**64 - 1
    assert (options.stop_token_ids, options.ignore_eos, options.logprobs) == ((9, 8), True, 3)
    assert (request.stop, request.timeout_s) == (("a", "b"), 5)
    assert request.stream
    assert request.include_usage
    assert request.include_stop_str_in_output
    assert not request.skip_special_tokens


def test_defaults():
    completion = read_request(COMPLETIONS, {"model": "m", "prompt": ["hi"]})
    assert completion.prompts == ("hi",)
    assert completion.sampling.max_tokens == 16
    assert completion.sampling.temperature is None
    chat = read_request(CHAT, BODIES[CHAT])
    assert chat.sampling.max_tokens is None
    assert chat.sampling.logprobs is None
    assert read_request(COMPLETIONS, {"model": "m", "prompt": [[1, 2]]}).prompts == ((1, 2),)
    assert read_request(COMPLETIONS, {"model": "m", "prompt": [[1], [2, 0]]}).prompts == ((1,), (2, 0))
    assert read_request(COMPLETIONS, {"model": "m", "prompt": ["a", "b"]}).prompts == ("a", "b")


def test_chat_logprobs_and_lengths():
    def sampling(**more):
        return read_request(CHAT, {**BODIES[CHAT], **more}).sampling

    assert sampling(logprobs=True).logprobs == 0
    assert sampling(logprobs=True, top_logprobs=5).logprobs == 5
    assert sampling(logprobs=False).logprobs is None
    assert sampling(top_logprobs=0).logprobs is None  # asks for nothing
    assert sampling(max_completion_tokens=5).max_tokens == 5
    assert sampling(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    refused(CHAT, {**BODIES[CHAT], "max_completion_tokens": 5, "max_tokens": 6})
    refused(CHAT, {**BODIES[CHAT], "max_tokens": 5, "min_tokens": 6})


@pytest.mark.parametrize("endpoint", BODIES)
def test_how_many_choices(endpoint):
    def choices(**more):
        options = read_request(endpoint, {**BODIES[endpoint], **more}).sampling
        return options.n, options.best_of, options.beam

    def beams(**more):
        return choices(use_beam_search=True, **more)

    assert choices() == (1, 1, None)
    assert choices(n=3) == (3, 3, None)
    assert choices(n=2, best_of=4) == (2, 4, None)
    assert choices(use_beam_search=False, length_penalty=1, early_stopping=False) == (1, 1, None)
    assert beams(n=3) == (3, 1, BeamSearch(width=3))
    assert beams(n=2, best_of=4, temperature=0) == (2, 1, BeamSearch(width=4))
    assert beams(beam_width=5, length_penalty=0, early_stopping="never") == (
        1, 1, BeamSearch(width=5, length_penalty=0, early_stopping="never"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": "now"}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 2, "n": 3}, "n"),
        ({"use_beam_search": True, "beam_width": 2, "best_of": 3}, "best_of"),
        ({"use_beam_search": True, "n": 17}, "beam_width"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.7}, "top_p"),
        ({"use_beam_search": True, "top_k": 7}, "top_k"),
        ({"use_beam_search": True, "min_p": 0.7}, "min_p"),
    ],
)
def test_fields_that_contradict_each_other(body, param):
    assert refused(COMPLETIONS, {**BODIES[COMPLETIONS], **body}).param == param


def test_continuing_the_final_message():
    def prompt(**more):
        return read_request(CHAT, {**BODIES[CHAT], **more}).prompts[0]

    assert prompt().add_generation_prompt
    continued = prompt(continue_final_message=True)
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)
    error = refused(CHAT, {**BODIES[CHAT], "continue_final_message": True, "add_generation_prompt": True})
    assert error.param == "continue_final_message"


def test_messages():
    prompt = read_request(
        CHAT,
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "n",
                },
                {"role": "tool", "content": "12", "tool_call_id": "c"},
            ],
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ).prompts[0]
    assert prompt.messages == (
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "tool", "content": "12", "tool_call_id": "c"},
    )
    assert not prompt.add_generation_prompt
    assert prompt.template_options == {"enable_thinking": False}


def test_numbers_that_would_overflow_downstairs_are_tamed():
    def sampling(**more):
        return read_request(COMPLETIONS, {**BODIES[COMPLETIONS], **more}).sampling

    assert sampling(temperature=1e-320).temperature == 0
    assert sampling(top_p=0).top_p == 1e-6
    assert sampling(top_k=-1).top_k == 0
    assert sampling(top_k=0).top_k == 0
