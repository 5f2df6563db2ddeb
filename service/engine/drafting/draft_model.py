"""Drafter that runs a smaller model with the same vocabulary."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from model.batch import Batch
from model.families.llama import Llama
from model.ops.interface import Array
from service.engine.drafting.drafter import DRAFT_MODEL
from service.engine.drafting.draws import drawn_on
from service.engine.drafting.step_cost import DraftTime
from service.engine.sequence import Sequence

SHORT_CATCH_UP = 32
"""Tokens of a sequence that are read in one batch with other sequences."""
MAX_PIECE = 512
"""Prompt tokens per forward pass."""


@dataclass(slots=True)
class _Read:
    """Tokens whose keys and values are written, and their blocks."""

    num_tokens: int
    drafts: list[int]  # following drafts
    table: array[int]
    num_tokens_before_preemption: int


class DraftModelDrafter:
    """Drafter with its keys and values in the model's blocks. Tokens a sequence took from the prefix cache or the host
    are recomputed."""

    source, writes_cache = DRAFT_MODEL, True

    def __init__(self, model: Llama, kv: Array):
        """`kv` [num_blocks, L, 2, Hkv, B, D]."""
        self._model, self._kv, self._block_size = model, kv, int(kv.shape[4])
        self._read: dict[Sequence, _Read] = {}
        self._time = DraftTime()

    @property
    def token_s(self) -> float:
        return self._time.token_s

    def on_end(self, sequence: Sequence) -> None:
        self._read.pop(sequence, None)

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[tuple[int, ...]]:
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        counts = dict(zip(sequences, max_tokens, strict=True))
        ready = sorted((one for one in sequences if counts[one]), key=lambda one: -counts[one])
        if not ready:
            return [()] * len(sequences)
        starts = [self._catch_up(sequence) for sequence in ready]
        start_s = time.perf_counter()
        tokens = [sequence.token_ids[start:] for sequence, start in zip(ready, starts, strict=True)]
        ids = self._forward(ready, tokens, starts)
        for step in range(1, counts[ready[0]] + 1):
            for sequence, token_id in zip(ready, ids, strict=False):
                drafts[sequence].append(token_id)
            ready = [sequence for sequence in ready if counts[sequence] > step]
            if ready:
                last = [array("I", drafts[sequence][-1:]) for sequence in ready]
                ids = self._forward(ready, last, [len(sequence.token_ids) + step - 1 for sequence in ready])
        self._time.add((time.perf_counter() - start_s) / max(max_tokens))
        for sequence, found in drafts.items():
            self._note(sequence, len(sequence.token_ids), found[:-1])
        return [tuple(drafts[sequence]) for sequence in sequences]

    def _catch_up(self, sequence: Sequence) -> int:
        """Read all but the last tokens; return the number read."""
        start, num_tokens = self._num_read(sequence), len(sequence.token_ids)
        while num_tokens - start > SHORT_CATCH_UP:
            end = min(start + MAX_PIECE, num_tokens - 1)
            self._forward([sequence], [sequence.token_ids[start:end]], [start])
            start = end
        return start

    def _num_read(self, sequence: Sequence) -> int:
        """Return the number of tokens with valid keys, at most all but the last."""
        read = self._read.get(sequence)
        if read is None or read.num_tokens_before_preemption != sequence.num_tokens_before_preemption:
            return 0
        count = read.num_tokens
        for known, drafted in zip(sequence.token_ids[count:], read.drafts, strict=False):
            if known != drafted:
                break
            count += 1
        pairs = enumerate(zip(read.table, sequence.block_table, strict=False))
        same = next((index for index, (before, now) in pairs if before != now), len(read.table))
        return min(count, same * self._block_size, len(sequence.token_ids) - 1)

    def _note(self, sequence: Sequence, num_tokens: int, drafts: list[int]) -> None:
        before = sequence.num_tokens_before_preemption
        self._read[sequence] = _Read(num_tokens, drafts, sequence.block_table[:], before)

    def _forward(self, sequences: list[Sequence], tokens: list[array[int]], starts: list[int]) -> list[int]:
        """Read `tokens` at `starts`; return each sequence's next token."""
        ops = self._model.ops
        with ops.scratch():
            logits = self._model.forward(self._batch(sequences, tokens, starts), self._kv)
            ends = [start + len(own) for start, own in zip(starts, tokens, strict=True)]
            return drawn_on(ops, logits, sequences, ends)

    def _batch(self, sequences: list[Sequence], tokens: list[array[int]], starts: list[int]) -> Batch:
        lengths = np.array([len(one) for one in tokens])
        ends = np.cumsum(lengths)
        width = max(len(sequence.block_table) for sequence in sequences)
        tables = np.zeros((len(sequences), width), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.block_table)] = sequence.block_table
        positions = np.arange(ends[-1]) + np.repeat(np.array(starts) - ends + lengths, lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        rows = np.repeat(np.arange(len(sequences)), lengths)
        is_decode = int(ends[-1]) == len(sequences)
        token_ids, positions, slots, block_tables, context_lens, query_start, *logit_rows = self._model.ops.upload_all(
            [
                np.concatenate([np.frombuffer(one, np.uint32) for one in tokens]).astype(np.int32),
                positions.astype(np.int32),
                tables[rows, blocks].astype(np.int64) * self._block_size + offsets,
                tables,
                (np.array(starts) + lengths).astype(np.int32),
                np.array([len(sequences)] if is_decode else [0, *ends], np.int32),
                *([] if is_decode else [(ends - 1).astype(np.int32)]),
            ]
        )
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=block_tables,
            context_lens=context_lens,
            query_start=query_start,
            logit_rows=logit_rows[0] if logit_rows else None,
            num_decodes=len(sequences) if is_decode else 0,
            num_tokens=int(ends[-1]),
            num_sequences=len(sequences),
            max_query_len=0 if is_decode else int(lengths.max()),
        )
