"""Builds the arrays of `Ops.sample`: one row per sequence that samples a token."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from itertools import islice

import numpy as np

from model.ops.interface import Array, Bias, Penalties, SamplingArrays, TokenMask
from model.sampling_params import SamplingParams

RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("branch", np.uint32),
        ("num_logprobs", np.int32),  # 0: none, else alternatives + 1
        ("has_logit_processors", np.int32),  # 1: has penalties, biases or a minimum length
    ]
)
"""Constant sampling parameters of a sequence."""

NO_TOP_K = np.iinfo(np.int32).max


def sampling_record(params: SamplingParams, branch: int, num_alternatives: int | None) -> bytes:
    """Return a RECORD, packed once so that a step only joins the records of its rows.

    `num_alternatives` counts log-probabilities besides the chosen token's; None: no log-probabilities. A beam needs
    only its best tokens, so its row is greedy.
    """
    num_logprobs = 0 if num_alternatives is None else num_alternatives + 1
    distribution = (params.seed, 0.0, NO_TOP_K, 1.0, 0.0)
    if params.beam is None:
        top_k = NO_TOP_K if params.top_k is None else min(params.top_k, NO_TOP_K)
        distribution = (params.seed, params.temperature, top_k, params.top_p, params.min_p)
    return np.array([(*distribution, branch, num_logprobs, has_logit_processors(params))], RECORD).tobytes()


def has_logit_processors(params: SamplingParams) -> bool:
    return params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0


class SeenTokens:
    """A sequence's distinct tokens and their output counts, updated at a cost independent of length."""

    def __init__(self, of: Sequence[int], num_prompt_tokens: int):
        """`of` is the shared, growing list of all tokens of the sequence."""
        prompt = dict.fromkeys(of[:num_prompt_tokens])
        self.of = of
        self.token_ids = array("i", prompt)  # int32, unique
        self.output_counts = array("i", bytes(4 * len(prompt)))  # int32
        self._place_of = dict(zip(prompt, range(len(prompt)), strict=True))
        self._num_counted = num_prompt_tokens

    def catch_up(self) -> None:
        for token in self.of[self._num_counted :]:
            place = self._place_of.setdefault(token, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token)
                self.output_counts.append(0)
            self.output_counts[place] += 1
        self._num_counted = len(self.of)

    def extended(self, token_ids: Sequence[int]) -> SeenTokens:
        """Return a copy with more output tokens, or itself without any."""
        if not token_ids:
            return self
        self.catch_up()
        other = copy(self)
        other.of = [*self.of, *token_ids]
        other.token_ids, other.output_counts = self.token_ids[:], self.output_counts[:]
        other._place_of = dict(self._place_of)
        return other


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """R sequences to sample; the next tokens have these `positions`."""

    records: list[bytes]
    positions: np.ndarray  # uint32[R]
    # The next three may be empty if no record has logit processors:
    sampling: list[SamplingParams]
    seen: list[SeenTokens | None]  # None: no penalties
    num_prompt_tokens: list[int]
    mask: TokenMask | None = None  # on the host


def sampling_arrays(
    rows: SampledRows,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    upload_all: Callable[[Sequence[np.ndarray]], list[Array]],
    *,
    adjusts_logprobs: bool = False,
) -> SamplingArrays:
    """Return the arrays of R rows, sent by one `upload_all`."""
    records = np.frombuffer(b"".join(rows.records), RECORD)
    columns = [
        records["temperature"],
        np.minimum(records["top_k"], vocab_size, dtype=np.int32),
        records["top_p"],
        records["min_p"],
        records["seed"],
        rows.positions,
        records["branch"],
    ]
    processes_logits = bool(records["has_logit_processors"].any())
    penalties = _penalties(rows) if processes_logits else []
    bias = _bias(rows, eos_token_ids) if processes_logits else []
    mask = [] if rows.mask is None else [rows.mask.rows, rows.mask.words]
    parts = (columns, penalties, bias, mask)
    sent = iter(upload_all([array for part in parts for array in part]))
    columns, penalties, bias, mask = (list(islice(sent, len(part))) for part in parts)
    temperature, top_k, top_p, min_p, seed, position, branch = columns
    num_logprobs = int(records["num_logprobs"].max(initial=0))
    return SamplingArrays(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position,
        branch=branch,
        penalties=Penalties(*penalties) if penalties else None,
        bias=Bias(*bias) if bias else None,
        mask=TokenMask(*mask) if mask else None,
        num_logprobs=max(0, num_logprobs - 1),
        with_logprobs=num_logprobs > 0,
        adjusts_logprobs=adjusts_logprobs,
        has_thresholds=_has_thresholds(records, vocab_size),
    )


def _has_thresholds(records: np.ndarray, vocab_size: int) -> bool:
    cut = (records["top_k"] < vocab_size) | (records["top_p"] < 1) | (records["min_p"] > 0)
    return bool((cut & (records["temperature"] > 0)).any())


def _penalties(rows: SampledRows) -> list[np.ndarray]:
    penalised = [seen for seen in rows.seen if seen is not None]
    if not penalised:
        return []
    for seen in penalised:
        seen.catch_up()
    factors = [
        (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) for params in rows.sampling
    ]
    return [
        *np.array(factors, np.float32).T,
        _indptr([() if seen is None else seen.token_ids for seen in rows.seen]),
        np.frombuffer(b"".join(seen.token_ids for seen in penalised), np.int32),
        np.frombuffer(b"".join(seen.output_counts for seen in penalised), np.int32),
    ]


def _bias(rows: SampledRows, eos_token_ids: frozenset[int]) -> list[np.ndarray]:
    num_outputs = rows.positions.astype(np.int64) - np.array(rows.num_prompt_tokens)
    biases = [
        _row_bias(params, num_output, eos_token_ids, _allowed(rows.mask, row))
        for row, (params, num_output) in enumerate(zip(rows.sampling, num_outputs.tolist(), strict=True))
    ]
    if not any(biases):
        return []
    return [
        _indptr(biases),
        np.array([token for bias in biases for token, _ in bias], np.int32),
        np.array([value for bias in biases for _, value in bias], np.float32),
    ]


def _allowed(mask: TokenMask | None, row: int) -> np.ndarray | None:
    return None if mask is None or mask.rows[row] < 0 else mask.words[mask.rows[row]]


def _row_bias(
    params: SamplingParams, num_output: int, eos_token_ids: frozenset[int], allowed: np.ndarray | None
) -> list[tuple[int, float]]:
    """Return a row's biases. Within min_tokens, tokens that end a response are forbidden, unless a grammar allows
    nothing else."""
    if num_output >= params.min_tokens:
        return list(params.logit_bias)
    forbidden = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    if allowed is not None and not _without(allowed, forbidden).any():
        return list(params.logit_bias)
    return [pair for pair in params.logit_bias if pair[0] not in forbidden] + [(i, -np.inf) for i in sorted(forbidden)]


def _without(words: np.ndarray, token_ids: Iterable[int]) -> np.ndarray:
    left = words.copy()
    for token in token_ids:
        if token // 32 < len(left):
            left[token // 32] &= ~np.uint32(1 << token % 32)
    return left


def _indptr(ragged: Sequence[Sized]) -> np.ndarray:
    return np.cumsum([0, *map(len, ragged)], dtype=np.int32)
