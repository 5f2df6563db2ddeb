from __future__ import annotations

import inspect

import pytest

from service.offline.api import LLM, AsyncLLM, BeamSearchParams, PoolingParams, SamplingParams
from service.offline.vllm_names import ATTRIBUTES, KEYWORDS, VllmNames, named

OWN = (LLM, AsyncLLM)
PARAMS = (SamplingParams, BeamSearchParams, PoolingParams)


@named
def call(prompts, params=None, *, use_tqdm=True):
    return prompts, params, use_tqdm


@pytest.mark.parametrize(
    ("args", "keywords", "message"),
    [
        ((), {"prompt_token_ids": [[1]]}, "call: 'prompt_token_ids' is not supported: pass `prompts`"),
        (("x",), {"pooling_task": "token_embed"}, "'pooling_task' is not supported: one pooled vector"),
        (("x",), {"use_tqmd": False}, r"unknown argument 'use_tqmd' \(did you mean use_tqdm\?\)"),
        (("x", None, False), {}, r"too many positional arguments \(by position: params\)"),
        ((), {}, "missing a required argument: 'prompts'"),
    ],
)
@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_wrong_call_is_named(args, keywords, message, kind):
    with pytest.raises(kind, match=message):
        call(*args, **keywords)


def test_values_that_change_nothing_are_accepted():
    assert call("x", prompt_token_ids=None, pooling_task="embed", tokenization_kwargs={}) == ("x", None, True)


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (SamplingParams, {"max_token": 1}, "SamplingParams: unknown argument 'max_token' .did you mean max_tokens"),
        (SamplingParams, {"use_beam_search": True}, "'use_beam_search' is not supported: use LLM.beam_search"),
        (BeamSearchParams, {"beam_width": 2}, "missing a required argument: 'max_tokens'"),
        (PoolingParams, {"dimensions": 3}, "'dimensions' is not supported: vectors have length 1"),
    ],
)
def test_constructors_name_wrong_fields(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


def test_missing_attributes_have_a_reason():
    class Model(VllmNames):
        pass

    with pytest.raises(AttributeError, match=r"Model\.sleep: not supported: the engine keeps its memory"):
        Model().sleep()
    with pytest.raises(AttributeError, match=r"Model\.slep: unknown name"):
        Model().slep()
    with pytest.raises(AttributeError, match=r"Model\.from_engine_args: not supported: no part of vLLM's engine"):
        Model.from_engine_args()
    assert not hasattr(Model(), "llm_engine")


def test_what_is_here_is_not_refused():
    assert not [name for name in ATTRIBUTES for each in OWN if name in vars(each)]
    calls = [getattr(LLM, name) for name in ("generate", "chat", "beam_search", "encode", "embed", "score")]
    assert all(hasattr(each, "__wrapped__") for each in (*calls, AsyncLLM.generate, AsyncLLM.encode))
    fields = set(inspect.signature(SamplingParams).parameters)
    assert fields & KEYWORDS.keys() == {"truncate_prompt_tokens"}
