"""Carries a plan out: the plan's chunks as one batch through the model, a token for each sequence that is due one."""

from __future__ import annotations

import numpy as np
from model.llama import Llama

from model.batch import Batch
from model.ops.interface import Array, Sampled
from model.sampler import SampledRow, sampling_arrays
from service.engine.plan import Chunk, SampledToken, StepPlan, StepResult, TokenLogprob


class ModelExecutor:
    """Owns the model and the KV cache `kv` [num_blocks, L, 2, Hkv, B, D] of its backend."""

    def __init__(self, model: Llama, kv: Array, eos_token_ids: frozenset[int]):
        self._model = model
        self._ops = model.ops
        self._kv = kv
        self._block_size = kv.shape[4]
        self._eos_token_ids = eos_token_ids

    def execute(self, plan: StepPlan) -> StepResult:
        """See service.engine.engine.Executor."""
        due = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        with self._ops.scratch():
            logits = self._model.forward(self.batch(plan.chunks), self._kv)
            if not due:
                self._ops.synchronize()
                return StepResult(())
            rows = [
                SampledRow(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, sequence.branch)
                for sequence in due
            ]
            how = sampling_arrays(rows, self._model.config.vocab_size, self._eos_token_ids, self._ops.upload)
            return StepResult(self._tokens(rows, self._ops.sample(logits, how)))

    def batch(self, chunks: tuple[Chunk, ...]) -> Batch:
        """The arrays of a step; chunks of one token come first."""
        lengths = np.fromiter((chunk.length for chunk in chunks), np.int32, len(chunks))
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, len(chunks))
        num_decodes = int(np.count_nonzero(lengths == 1))
        ends = np.cumsum(lengths)
        row_of = np.repeat(np.arange(len(chunks)), lengths)
        positions = (np.arange(ends[-1]) - (ends - lengths)[row_of] + starts[row_of]).astype(np.int32)
        tables = self._block_tables(chunks)
        slots = tables[row_of, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        tokens = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.end]]
        upload = self._ops.upload
        return Batch(
            token_ids=upload(np.array(tokens, np.int32)),
            positions=upload(positions),
            slots=upload(slots),
            block_tables=upload(tables),
            context_lens=upload(starts + lengths),
            query_start=upload(np.concatenate([[0], np.cumsum(lengths[num_decodes:])]).astype(np.int32)),
            logit_rows=upload((ends - 1)[[chunk.samples for chunk in chunks]].astype(np.int32)),
            num_decodes=num_decodes,
            num_tokens=int(ends[-1]),
            num_sequences=len(chunks),
            max_query_len=int(lengths[num_decodes:].max(initial=0)),
            max_context_len=int((starts + lengths).max()),
        )

    def _block_tables(self, chunks: tuple[Chunk, ...]) -> np.ndarray:
        width = max(len(chunk.sequence.block_table) for chunk in chunks)
        tables = np.zeros((len(chunks), width), np.int32)
        for row, chunk in enumerate(chunks):
            blocks = chunk.sequence.block_table
            tables[row, : len(blocks)] = np.frombuffer(blocks, np.int32)
        return tables

    def _tokens(self, rows: list[SampledRow], sampled: Sampled) -> tuple[SampledToken, ...]:
        token_ids = self._ops.download(sampled.token_ids).tolist()
        is_nan = self._ops.download(sampled.is_nan).tolist()
        logprobs = self._logprobs(rows, sampled) if sampled.logprobs is not None else [None] * len(rows)
        return tuple(map(SampledToken, token_ids, is_nan, logprobs))

    def _logprobs(self, rows: list[SampledRow], sampled: Sampled) -> list[TokenLogprob | None]:
        chosen = self._ops.download(sampled.logprobs).tolist()
        top_ids = self._ops.download(sampled.top_ids).tolist()
        top = self._ops.download(sampled.top_logprobs).tolist()
        return [
            None
            if (wanted := row.sampling.logprobs) is None
            else TokenLogprob(chosen[r], tuple(top_ids[r][:wanted]), tuple(top[r][:wanted]))
            for r, row in enumerate(rows)
        ]
