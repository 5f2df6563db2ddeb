"""Reference model: computes all tokens of a sequence at once in a fresh cache."""

from __future__ import annotations

import numpy as np

from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.ops.interface import SamplingArrays
from model.sampling_params import SamplingParams
from tests.support.paged import PagedSequences

BLOCK_SIZE = 16


class PlainModel:
    """Reference of a NumPy model, with cached results."""

    def __init__(self, model: Llama, eos_token_ids: frozenset[int]):
        self._model = model
        self.eos_token_ids = eos_token_ids
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32[V]"""
        key = tuple(token_ids)
        if key not in self._known:
            pages = PagedSequences(self._model, 1, len(token_ids), BLOCK_SIZE)
            self._known[key] = pages.forward([(0, np.array(token_ids))])[0][-1]
        return self._known[key]

    def logprobs(self, token_ids: list[int], params: SamplingParams, num_prompt: int) -> np.ndarray:
        """Return float32[V]: log-probabilities after penalties, logit_bias and min_tokens."""
        logits = self.logits(token_ids)
        shifted = logits - logits.max()
        return self._shaped(shifted - np.log(np.exp(shifted).sum()), token_ids, params, num_prompt)

    def sample(self, prompt: list[int], params: SamplingParams, branch: int) -> list[int]:
        """Return a branch's tokens."""
        token_ids, stops = list(prompt), self._stops(params)
        while len(token_ids) - len(prompt) < params.max_tokens:
            logits = self._shaped(self.logits(token_ids), token_ids, params, len(prompt))
            how = SamplingArrays(
                temperature=np.array([params.temperature], np.float32),
                top_k=np.array([params.top_k or len(logits)], np.int32),
                top_p=np.array([params.top_p], np.float32),
                min_p=np.array([params.min_p], np.float32),
                seed=np.array([params.seed], np.uint64),
                position=np.array([len(token_ids)], np.uint32),
                branch=np.array([branch], np.uint32),
                penalties=None,
                bias=None,
                num_logprobs=0,
                with_logprobs=False,
            )
            token_ids.append(int(NumpyOps().sample(logits[None], how).token_ids[0]))
            if token_ids[-1] in stops and len(token_ids) - len(prompt) >= params.min_tokens:
                break
        return token_ids[len(prompt) :]

    def _stops(self, params: SamplingParams) -> set[int]:
        return set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)

    def _shaped(self, scores: np.ndarray, token_ids: list[int], params: SamplingParams, num_prompt: int) -> np.ndarray:
        logits, output = np.array(scores), token_ids[num_prompt:]
        for token, value in params.logit_bias:
            logits[token] += value
        if len(output) < params.min_tokens:
            logits[list(self._stops(params))] = -np.inf
        for token in set(token_ids):
            logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
            count = output.count(token)
            logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        return logits
