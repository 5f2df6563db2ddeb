import json
from pathlib import Path

import pytest

from service.config.speculative import SpeculativeConfig, parse_speculative_config


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4}, {}),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}, {"prompt_lookup_min": 3}),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}, {}),
        ({"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_spec_factor": 2}, {}),
        ({"method": "eagle3"}, {}),
        ({"method": "suffix", "model": None}, {"num_speculative_tokens": 16}),
        ({"model": "[ngram]", "num_speculative_tokens": 4}, {"method": "ngram"}),
        ({"method": "ngram", "model": "ngram", "num_speculative_tokens": 4}, {}),
        ({"method": "ngram_gpu", "num_speculative_tokens": 4}, {"method": "ngram"}),
        ({"model": "x/y", "revision": "v2"}, {"method": "draft_model", "model": Path("x/y")}),
        ({"model": "x/y", "num_speculative_tokens": 5}, {"method": "draft_model", "model": Path("x/y")}),
        ({"method": "eagle3", "num_speculative_tokens": 2, "model": "x/y"}, {"model": Path("x/y")}),
    ],
)
def test_vllms_keys(given, wanted):
    read = parse_speculative_config(json.dumps(given))
    wanted = {key: value for key, value in (given | wanted).items() if value is not None}
    if wanted["method"] == "ngram":
        wanted.pop("model", None)
    assert read == SpeculativeConfig(**wanted)
    assert parse_speculative_config(str(read)) == read


def test_keys_that_change_no_answer_are_accepted():
    given = {"disable_by_batch_size": 32, "draft_sample_method": "greedy", "draft_tensor_parallel_size": 1}
    read = parse_speculative_config(json.dumps({"method": "eagle3", "kv_cache_dtype": "auto"} | given))
    assert read == SpeculativeConfig(method="eagle3")
    assert read.ignored == ("disable_by_batch_size", "draft_sample_method")


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("ngram", "not JSON"),
        ("[]", "a JSON object"),
        ({}, "method must be one of ngram, suffix, eagle3, draft_model"),
        ({"method": "medusa"}, r"method medusa is not supported \(ngram, suffix, eagle3, draft_model\)"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "draft_model needs model"),
        ({"method": "qwen3_5_mtp"}, "method qwen3_5_mtp is not supported"),
        ({"method": "eagle3", "revision": 3}, "revision must be a branch, tag or commit"),
        ({"method": "eagle3", "draft_tensor_parallel_size": 2}, r"draft_tensor_parallel_size 2 is not supported .1."),
        ({"method": "eagle3", "parallel_drafting": True}, r"parallel_drafting true is not supported .false."),
        ({"method": "eagle3", "parallel_drafting": 0}, r"parallel_drafting 0 is not supported .false."),
        ({"method": "eagle3", "rejection_sample_method": "synthetic"}, r'"synthetic" is not supported ."standard".'),
        ({"method": "eagle3", "quantization": "fp8"}, "quantization is not supported .leave it out"),
        ({"method": "eagle3", "max_model_len": 2048}, "max_model_len is not supported .leave it out"),
        ({"method": 3}, "method must be"),
        ({"method": "NGRAM"}, "method NGRAM is not supported"),
        ({"model": ["ngram"]}, "model must be a folder or org/name"),
        ({"method": "eagle3", "revision": "v2"}, "revision needs model"),
        ("[" * 100_000, "not JSON: a number of too many digits, or too many levels$"),
        ('{"num_speculative_tokens": ' + "9" * 5000 + "}", "not JSON: a number of too many digits"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "whole number from 0 to 1048576"),
        ({"method": "ngram"}, "ngram needs num_speculative_tokens"),
        ({"method": "eagle3", "model": 3}, "model must be a folder or org/name"),
        ({"method": "eagle3", "model": ""}, "model must be a folder or org/name"),
        (
            {"method": "ngram", "num_speculative_tokens": 17},
            "num_speculative_tokens must be a whole number from 1 to 16",
        ),
        ({"method": "ngram", "num_speculative_tokens": True}, "whole number"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "whole number"),
        ({"method": "ngram", "num_speculative_tokens": 4, "model": "x"}, r"ngram has no key model \(num_spec"),
        (
            {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_min_token_prob": 2},
            "a number from 0 to 1",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min 5 exceeds prompt_lookup_max 4",
        ),
        ({"method": "ngram", "num_speculative_tokens": 4, "tensor_parallel_size": 2}, "use draft_tensor"),
    ],
)
def test_wrong_keys_are_named(given, refusal):
    with pytest.raises(ValueError, match=refusal):
        parse_speculative_config(given if isinstance(given, str) else json.dumps(given))
