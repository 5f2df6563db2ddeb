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
        ({"model": "x/y", "num_speculative_tokens": 5}, {"method": "draft_model", "model": Path("x/y")}),
        ({"method": "eagle3", "num_speculative_tokens": 2, "model": "x/y"}, {"model": Path("x/y")}),
    ],
)
def test_vllms_keys(given, wanted):
    read = parse_speculative_config(json.dumps(given))
    assert read == SpeculativeConfig(**given | wanted)
    assert parse_speculative_config(str(read)) == read


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("ngram", "not JSON"),
        ("[]", "a JSON object"),
        ({}, "method must be one of ngram, suffix, eagle3, draft_model"),
        ({"method": "medusa"}, r"method medusa is not supported \(ngram, suffix, eagle3, draft_model\)"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "draft_model needs model"),
        ({"model": "x"}, "draft_model needs num_speculative_tokens"),
        ({"method": 3}, "method must be"),
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
        ({"method": "ngram", "num_speculative_tokens": 4, "tensor_parallel_size": 2}, "no key tensor_parallel_size"),
    ],
)
def test_wrong_keys_are_named(given, refusal):
    with pytest.raises(ValueError, match=refusal):
        parse_speculative_config(given if isinstance(given, str) else json.dumps(given))
