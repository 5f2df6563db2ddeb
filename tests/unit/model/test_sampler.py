import random
from collections import Counter

import numpy as np

from model.ops.interface import TokenMask
from model.sampler import SampledRows, SeenTokens, sampling_arrays, sampling_record
from model.sampling_params import SamplingParams

EOS = frozenset({2})


def arrays(*rows, mask=None):
    options, tokens, num_prompt_tokens = map(list, zip(*rows, strict=True))
    gathered = SampledRows(
        records=[sampling_record(wish, 0, wish.logprobs) for wish in options],
        positions=np.array(list(map(len, tokens)), np.uint32),
        sampling=options,
        seen=[
            SeenTokens(*own) if wish.has_penalties else None
            for wish, *own in zip(options, tokens, num_prompt_tokens, strict=True)
        ],
        num_prompt_tokens=num_prompt_tokens,
        mask=mask,
    )
    return sampling_arrays(gathered, 100, EOS, lambda hosts: list(map(np.array, hosts)))


def row(tokens=(5, 6, 7), num_prompt=2, **options):
    return SamplingParams(**{"max_tokens": 9} | options), tokens, num_prompt


def test_plain_rows_need_neither_penalties_nor_bias_nor_logprobs():
    how = arrays(row(temperature=0.5, seed=2**64 - 1), row(top_k=7, top_p=0.25))
    assert how.temperature.tolist() == [0.5, 1.0]
    assert how.top_k.tolist() == [100, 7]
    assert how.top_p.tolist() == [1.0, 0.25]
    assert how.seed.tolist() == [2**64 - 1, 0]
    assert how.position.tolist() == [3, 3]
    assert (how.penalties, how.bias, how.with_logprobs) == (None, None, False)


def test_penalties_count_the_output_and_know_the_prompt():
    how = arrays(row(), row((5, 5, 6, 8, 8, 5), 3, repetition_penalty=1.5, frequency_penalty=0.25))
    seen = how.penalties
    assert seen.indptr.tolist() == [0, 0, 3]
    assert dict(zip(seen.token_ids.tolist(), seen.output_counts.tolist(), strict=True)) == {5: 1, 6: 0, 8: 2}
    assert seen.repetition.tolist() == [1.0, 1.5]
    assert seen.frequency.tolist() == [0.0, 0.25]


class Tokens(list):
    """Knows how many of it were read."""

    num_read = 0

    def __getitem__(self, part):
        found = super().__getitem__(part)
        self.num_read += len(found)
        return found


def test_each_token_is_counted_once_however_long_the_sequence_grows():
    rng = random.Random(0)
    tokens = Tokens(rng.randrange(40) for _ in range(500))
    seen = SeenTokens(tokens, 300)
    for _ in range(50):
        tokens.extend(rng.randrange(99) for _ in range(rng.randrange(3)))
        seen.catch_up()
        counts = Counter(tokens[300:])
        tokens.num_read -= len(tokens) - 300
        wanted = {token: counts[token] for token in tokens}
        assert dict(zip(seen.token_ids, seen.output_counts, strict=True)) == wanted
        assert tokens.num_read == len(tokens)


def test_min_tokens_forbids_every_stop_until_then():
    options = {"min_tokens": 2, "stop_token_ids": (9,), "logit_bias": ((9, 50.0), (4, 1.0))}
    how = arrays(row((5, 6, 7), **options), row((5, 6, 7, 8), **options), row((5, 6), ignore_eos=True, **options))
    rows = np.split(np.stack([how.bias.token_ids, how.bias.values], axis=1), how.bias.indptr[1:-1])
    assert [dict(map(tuple, pairs.tolist())) for pairs in rows] == [
        {4: 1.0, 2: -np.inf, 9: -np.inf},
        {9: 50.0, 4: 1.0},
        {4: 1.0, 9: -np.inf},
    ]


def test_min_tokens_forbids_no_stop_where_a_mask_allows_nothing_else():
    options = {"min_tokens": 9, "stop_token_ids": (9, 40)}
    only_stops = np.array([1 << 9 | 1 << 2, 1 << 8, 0, 0], np.uint32)  # 9, 2 (EOS) and 40
    mask = TokenMask(np.array([0, 1, -1], np.int32), np.stack([only_stops, only_stops | np.uint32(1)]))
    how = arrays(row(**options), row(**options), row(**options), mask=mask)
    assert np.diff(how.bias.indptr).tolist() == [0, 3, 3]
    assert how.bias.token_ids.tolist() == [2, 9, 40] * 2
    assert how.mask.words.tolist() == mask.words.tolist()


def test_every_row_gets_the_most_alternatives_requested():
    how = arrays(row(logprobs=3), row(), row(logprobs=0))
    assert (how.with_logprobs, how.num_logprobs) == (True, 3)
    assert arrays(row(logprobs=0)).num_logprobs == 0


def test_a_mask_goes_along():
    mask = TokenMask(np.array([0, -1], np.int32), np.array([[1, 2, 3, 4]], np.uint32))
    for options in ({}, {"frequency_penalty": 1.0, "logit_bias": ((4, 1.0),)}):
        how = arrays(row(**options), row(), mask=mask)
        assert how.mask.rows.tolist() == [0, -1]
        assert how.mask.words.tolist() == [[1, 2, 3, 4]]
        assert (how.bias is None, how.penalties is None) == (not options, not options)
    assert arrays(row()).mask is None


def test_thresholds_of_greedy_rows_do_not_count():
    assert arrays(row(), row(temperature=0.5, min_p=0.1)).has_thresholds
    assert arrays(row(top_k=7)).has_thresholds
    assert arrays(row(top_p=0.5)).has_thresholds
    assert not arrays(row(temperature=0.7, top_k=100), row(temperature=0.0, top_p=0.5, top_k=1)).has_thresholds
