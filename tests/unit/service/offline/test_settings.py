from __future__ import annotations

from pathlib import Path

import pytest

from service.offline.settings import KEYWORDS, read_keywords


def test_vllms_words_become_settings(monkeypatch):
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "3")  # of a service, not of this
    settings = read_keywords(
        {
            "model": None, "dtype": "half", "trust_remote_code": True, "enforce_eager": False, "max_model_len": "1k",
            "enable_prefix_caching": False, "gpu_memory_utilization": 0.5, "compilation_config": {"mode": 3},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "tensor_parallel_size": 1,
        }
    )  # fmt: skip
    assert (settings.dtype, settings.max_model_len, settings.enable_prefix_caching) == ("float16", 1000, False)
    assert settings.model.name == "demo"
    assert settings.max_num_seqs == 256
    assert settings.speculative_config.method == "ngram"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int3"}, r"^dtype: 'int3' is not supported \("),
        ({"max_modl_len": 5}, "max_modl_len: unknown argument .*max_model_len"),
        ({"port": 8000}, "port: .*not of LLM"),
        ({"tokenizer": "x"}, "tokenizer"),
        ({"model": Path("/nowhere")}, "model: /nowhere: no such folder"),
        ({"quantization": "awq"}, "quantization: awq"),
    ],
)
def test_a_wrong_keyword_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        read_keywords(wrong)


def test_a_model_that_embeds_needs_no_keyword():
    assert read_keywords({"task": "embed", "runner": "pooling", "convert": "embed"}) == read_keywords({})
    with pytest.raises(ValueError, match="task classify"):
        read_keywords({"task": "classify"})


def test_every_keyword_is_a_setting():
    assert set(KEYWORDS) <= set(vars(read_keywords({})))
