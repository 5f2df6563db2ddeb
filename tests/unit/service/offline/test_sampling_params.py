from __future__ import annotations

import pytest

from service.offline.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    default_sampling_params,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0}, {"temperature": -0.1}, {"temperature": "hot"}, {"top_p": 1.5}, {"top_k": -2}, {"min_p": 2},
        {"presence_penalty": 3}, {"frequency_penalty": -3}, {"repetition_penalty": 0}, {"seed": 1.5},
        {"stop": [""]}, {"stop_token_ids": ["x"]}, {"max_tokens": 0}, {"min_tokens": 17}, {"logprobs": -1},
        {"prompt_logprobs": 21}, {"logit_bias": {1: 200.0}}, {"bad_words": [" "]}, {"allowed_token_ids": [None]},
        {"structured_outputs": StructuredOutputsParams()}, {"output_kind": 3}, {"logits_processors": [print]},
        {"extra_args": {"a": 1}}, {"spaces_between_special_tokens": False}, {"truncate_prompt_tokens": 0},
        {"structured_outputs": StructuredOutputsParams(structural_tag="x")},
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_contradictions_are_named():
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(detokenize=False, stop="x")
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="guided_decoding"):
        SamplingParams(structured_outputs=form, guided_decoding=form)
    for wrong in ({"beam_width": 17, "max_tokens": 4}, {"beam_width": 2, "max_tokens": 4, "temperature": 0.5}):
        with pytest.raises(ValueError, match=r"beam_width|temperature"):
            BeamSearchParams(**wrong)
    with pytest.raises(ValueError, match="truncate_prompt_tokens"):
        PoolingParams(truncate_prompt_tokens=-2)


def test_values_reach_the_request():
    params = SamplingParams(seed=-1, max_tokens=None, min_tokens=40, logit_bias={3: -1.0}, stop="x", top_k=-1)
    request = params.request()
    sampling = request.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (None, None, 40)
    assert (sampling.logit_bias, request.stop, sampling.top_k) == (((3, -1.0),), ("x",), 0)
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)  # not the model's
    params.temperature = 3.0
    with pytest.raises(ValueError, match="temperature"):
        params.request()


def test_a_folders_recommendations_are_the_defaults():
    found = default_sampling_params({"temperature": 0.6, "top_k": 20.0, "other": 3})
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 1.0)


def test_clones_and_optional_values():
    params = SamplingParams.from_optional(n=None, max_tokens=3, stop=["x"])
    clone = params.clone()
    assert params == clone == SamplingParams(max_tokens=3, stop=["x"])
    clone.stop.append("y")
    assert params.stop == ["x"]
