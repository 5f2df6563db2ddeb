"""The forward pass on static buffers, captured once per size.

A size is a number of decodes (single-token rows) plus a number of further rows. Chunks use the further rows and those
that decodes leave. A step runs on the smallest size that holds it, else uncaptured. Padding has no context, writes no
key, and its logits are not read. Each size is captured without adapters and, if there are slots, with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tqdm import tqdm

from model.adapter_slots import AdapterSlots, StaticAdapterRows
from model.batch import Batch, StateRows
from model.families.llama import Llama
from model.ops.group.arrays import divided, product_split
from model.ops.interface import MAX_EXACT_ROWS, Array
from model.ops.packing import Packing, TableRows
from model.step_inputs import NO_PENDING_ROW, ForwardInputs

CHUNK_ROWS = tuple(range(64, 513, 64))
"""Captured chunk rows in addition to decodes; larger steps hide their launches."""

CHUNK_ROWS_WITH_FEW = (16, 48, *CHUNK_ROWS)
"""Captured chunk rows in addition to the fewest decodes: a prompt's uncached tail waits for such a step."""

CHUNK_ROWS_ALONE = (32, 48, 64, 128)
"""Captured sizes of chunks without decodes: one launch less per layer."""

DRAFTED_ROWS = (*range(2, 10), 12, 16, 17, MAX_EXACT_ROWS)
"""Captured rows of decodes with drafts: no padding for a sequence with up to 8 drafts, or with 16."""

MAX_CHUNKS = 32

NUM_TIMED = 3

MIN_GAIN = 1.05
"""Gain in rows/s that justifies leaving tokens to the next step."""


@dataclass(frozen=True)
class _Buffers:
    """Arrays of the largest step; smaller steps use their beginnings."""

    token_ids: Array
    source: Array
    positions: Array
    slots: Array
    context_lens: Array
    query_start: Array
    logit_rows: Array


class StepGraphs:
    """Buffers for `max_rows` decodes and one replay per size.

    The caller's `sampled` int32[max_rows or more] holds the previous step's tokens.
    """

    def __init__(self, model: Llama, sampled: Array, max_rows: int, max_blocks: int, *, verifies_drafts: bool = False):
        ops = model.ops
        self._model = model
        self._sampled = sampled
        self._max_rows = max_rows
        self._num_slots = 0
        self._block_tables = ops.empty((max_rows + MAX_CHUNKS, max_blocks), np.dtype(np.int32))
        split = product_split(model.weights.lm_head.data)
        vocab_size = model.config.vocab_size if split is None else split.part_size(ops.num_ranks)
        self._logits = divided(ops.empty((max_rows + MAX_CHUNKS, vocab_size), np.dtype(np.float32)), split)
        padding = self._padding()
        packing = Packing.of(padding)
        self._packed = ops.empty((packing.num_bytes,), np.dtype(np.uint8))
        self._buffers = _Buffers(*packing.views(self._packed, padding))
        self._host = np.zeros(packing.num_bytes, np.uint8)
        self._columns = _Buffers(*packing.views(self._host, padding))
        self._num_tokens = len(padding[0])  # tokens in the columns, before padding
        self._decodes_only = decode_sizes(max_rows)
        self._decodes_with_chunks = _decodes_with_chunks(max_rows)
        self._adapters: StaticAdapterRows | None = None
        self._drafted = drafted_sizes(max_rows) if verifies_drafts else []
        self._decodes_with_drafts = [1, *self._drafted] if verifies_drafts else self._decodes_only
        self._drafted_replays: dict[int, Callable[[], None]] = {}
        self._drafted_adapter_replays: dict[int, Callable[[], None]] = {}
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._adapter_replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._seconds: dict[tuple[int, int], float] = {}  # with chunks, on padding
        self._state_layers: tuple[int, ...] = ()
        self._states: Array | None = None
        self._num_rows = 0  # of the last step, including padding

    def capture(
        self,
        kv: Array,
        *,
        state_layers: tuple[int, ...] = (),
        adapters: AdapterSlots | None = None,
        progress: bool = False,
    ) -> None:
        """Record the pass on this cache, the largest size first, so that smaller ones reuse its memory.

        Products are tuned for powers of two only: each size costs about 0.2 s at a cold start. The inputs of
        `state_layers` stay in `state_rows`.
        """
        if state_layers:
            self._keep_states(state_layers)
        self._begin(kv, adapters)
        first_layer, sizes = self._model.first_layer(), self._sizes()
        for size in tqdm(sizes, desc="graphs", disable=None if progress else True):
            batch = self._batch(*size)
            self._replays[size] = self._captured(batch, kv, first_layer)
            if self._adapters is not None:
                adapted = replace(batch, adapters=self._adapters.batch(batch.num_tokens))
                self._adapter_replays[size] = self._captured(adapted, kv, first_layer)
        for rows in reversed(self._drafted):
            batch = self._batch(rows, 0)
            self._drafted_replays[rows] = self._captured(batch, kv, first_layer, is_drafted=True)
            if self._adapters is not None:
                adapted = replace(batch, adapters=self._adapters.batch(rows))
                self._drafted_adapter_replays[rows] = self._captured(adapted, kv, first_layer, is_drafted=True)
        self._seconds = self._measured(self._sizes_with_chunks())

    def run_sizes(self, kv: Array, adapters: AdapterSlots | None = None) -> None:
        """Run the kernels of `capture` once, in one layer, for `Ops.compile_ahead`."""
        self._begin(kv, adapters)
        first_layer = self._model.first_layer()
        works = [(self._run_drafted, self._batch(rows, 0)) for rows in self._drafted]  # first: they compile longest
        works += [(self._run, self._batch(*size)) for size in self._sizes()]
        for run, batch in works:
            run(first_layer, batch, kv)
            if self._adapters is not None:
                run(first_layer, replace(batch, adapters=self._adapters.batch(batch.num_tokens)), kv)

    def forward(self, inputs: ForwardInputs) -> Array | None:
        """Return logits float32[R, V], valid until the next call, or None if the step fits no captured size.

        Send only dirty tables, and mark them clean.
        """
        size = self._size_of(inputs)
        if size is None:
            return None
        self._fill(inputs, *size)
        self._num_rows = sum(size)
        hosts, replays, drafted = [self._host], self._replays, self._drafted_replays
        if self._adapters is not None and inputs.adapter_slots is not None:
            hosts = [self._host, *self._adapters.host_rows(inputs.adapter_slots, sum(size))]
            replays, drafted = self._adapter_replays, self._drafted_adapter_replays
        self._model.ops.upload_all(hosts, self._packed, self._changed_tables(inputs, size[0]))
        has_drafts = inputs.num_draft_rows and size[1] == 0
        replay = drafted.get(size[0]) if has_drafts else None
        (replay or replays[size])()
        return self._logits[: len(inputs.logit_rows)]

    def decode_seconds(self) -> list[float]:
        """Time decodes of 1, 2, ... rows on padding, run as in steps with drafts."""
        ops, marks = self._model.ops, {}
        sizes = self._decodes_with_drafts
        for rows in sizes:
            replay = self._drafted_replays.get(rows) or self._replays[rows, 0]
            replay()  # measure after work
            begin = ops.record_event()
            for _ in range(NUM_TIMED):
                replay()
            marks[rows] = begin, ops.record_event()
        seconds = {rows: ops.elapsed_s(*pair) / NUM_TIMED for rows, pair in marks.items()}
        return [seconds[_at_least(sizes, rows)] for rows in range(1, self._max_rows + 1)]

    def state_rows(self) -> StateRows | None:
        """Return the last step's rows in static memory, or None without `state_layers`."""
        if self._states is None:
            return None
        columns = (self._buffers.token_ids, self._buffers.positions, self._buffers.slots, self._states)
        return StateRows(*(column[: self._num_rows] for column in columns))

    def context_lens(self, num_decodes: int) -> Array:
        """Return the last step's int32[num_decodes] in static memory."""
        return self._buffers.context_lens[:num_decodes]

    def fit(self, num_decodes: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` chunk tokens a step should take with its decodes.

        It takes all, unless a smaller size computes MIN_GAIN times the rows/s: one row beyond a wave of tiles can cost
        a third of a step.
        """
        decodes = _at_least(self._decodes_with_chunks, num_decodes)
        room = decodes - num_decodes
        if num_tokens - room > CHUNK_ROWS[-1]:
            return num_tokens
        sizes = self._chunk_rows(decodes)
        all_of_them = _at_least(sizes, num_tokens - room)
        best, best_rate = num_tokens, MIN_GAIN * (num_decodes + num_tokens) / self._seconds[decodes, all_of_them]
        for more in sizes:
            rate = (decodes + more) / self._seconds[decodes, more]
            if more < all_of_them and rate > best_rate:
                best, best_rate = room + more, rate
        return best

    def _begin(self, kv: Array, adapters: AdapterSlots | None) -> None:
        """Fill the buffers with padding and tune products."""
        self._block_size = kv.shape[4]
        self._num_slots = kv.shape[0] * self._block_size
        Packing.of(self._padding()).fill(self._host, self._padding())
        if adapters is not None:
            self._add_adapters(adapters)
        self._model.ops.upload_all([self._host], self._packed)
        tuned = [size for size in self._decodes_only if size.bit_count() == 1]
        self._model.tune(tuned, tuned)

    def _captured(self, batch: Batch, kv: Array, first_layer: Llama, *, is_drafted: bool = False) -> Callable[[], None]:
        run = self._run_drafted if is_drafted else self._run
        whole, warm_up_run = (partial(run, model, batch, kv) for model in (self._model, first_layer))
        return self._model.ops.capture(whole, warm_up_run)

    def _keep_states(self, layers: tuple[int, ...]) -> None:
        ops, width = self._model.ops, self._model.config.hidden_size
        self._state_layers = layers
        self._states = ops.empty((len(self._columns.token_ids), len(layers) * width), ops.dtype)
        # a warm-up run has no such layer
        ops.place_columns(ops.empty((1, width), ops.dtype), self._states[:1], 0)

    def _add_adapters(self, slots: AdapterSlots) -> None:
        self._adapters = StaticAdapterRows(slots, len(self._columns.token_ids))
        hosts: list[np.ndarray] = [self._host, *self._adapters.padding]
        packing = Packing.of(hosts)
        self._packed = self._model.ops.empty((packing.num_bytes,), np.dtype(np.uint8))
        columns, *rows = self._model.ops.upload_all(hosts, self._packed)
        self._buffers = _Buffers(*Packing.of(self._padding()).views(columns, self._padding()))
        self._adapters.place(rows)

    def _changed_tables(self, inputs: ForwardInputs, decodes: int) -> TableRows | None:
        rows = np.flatnonzero(inputs.dirty_tables)
        if len(rows) == len(inputs.chunk_lens) == 0:
            return None
        inputs.dirty_tables[:] = False
        places = np.append(rows, decodes + np.arange(len(inputs.chunk_lens))).astype(np.int32)
        return TableRows(inputs.block_tables(rows, self._block_size), places, self._block_tables)

    def _chunk_rows(self, decodes: int) -> Sequence[int]:
        return CHUNK_ROWS_WITH_FEW if decodes == self._decodes_with_chunks[0] else CHUNK_ROWS

    def _sizes(self) -> list[tuple[int, int]]:
        """Return all sizes, the largest first."""
        sizes = self._sizes_with_chunks() + [(decodes, 0) for decodes in self._decodes_only]
        return sorted(sizes, key=sum, reverse=True)

    def _sizes_with_chunks(self) -> list[tuple[int, int]]:
        mixed = [(decodes, more) for decodes in self._decodes_with_chunks for more in self._chunk_rows(decodes)]
        return [(0, more) for more in CHUNK_ROWS_ALONE] + mixed

    def _measured(self, sizes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Time sizes on padding, once per total of rows: equal totals differ by less than 2 % (the head's product)."""
        ops, by_rows = self._model.ops, {sum(size): size for size in sizes}
        marks = {}
        self._replays[sizes[-1]]()  # measure after work
        for rows, size in by_rows.items():
            begin = ops.record_event()
            self._replays[size]()
            marks[rows] = begin, ops.record_event()
        seconds = {rows: ops.elapsed_s(*pair) for rows, pair in marks.items()}
        return {size: seconds[sum(size)] for size in sizes}

    def _size_of(self, inputs: ForwardInputs) -> tuple[int, int] | None:
        num_decodes, num_chunks, num_logits = inputs.num_decodes, len(inputs.chunk_lens), len(inputs.logit_rows)
        if num_chunks == 0 and num_logits == num_decodes:
            sizes = self._decodes_with_drafts if inputs.num_draft_rows else self._decodes_only
            return _at_least(sizes, num_decodes), 0
        if (
            num_decodes == 0
            and max(num_chunks, num_logits) <= MAX_CHUNKS
            and len(inputs.token_ids) <= CHUNK_ROWS_ALONE[-1]
        ):
            return 0, _at_least(CHUNK_ROWS_ALONE, len(inputs.token_ids))
        decodes = _at_least(self._decodes_with_chunks, num_decodes)
        num_more = len(inputs.token_ids) - decodes
        if num_chunks > MAX_CHUNKS or num_more > CHUNK_ROWS[-1] or num_logits > decodes + MAX_CHUNKS:
            return None
        return decodes, _at_least(self._chunk_rows(decodes), num_more)

    def num_rows(self) -> tuple[list[int], list[int]]:
        mixed = self._decodes_with_chunks
        in_layers = {sum(size) for size in self._sizes_with_chunks()}
        in_head = {decodes + MAX_CHUNKS for decodes in (0, *mixed)}
        return sorted(in_layers.union(self._decodes_only)), sorted(in_head.union(self._decodes_only))

    def _run(self, model: Llama, batch: Batch, kv: Array) -> None:
        ops = model.ops
        with ops.scratch():
            ops.pick_tokens(batch.token_ids, self._sampled, self._buffers.source[: batch.num_tokens])
            num_logits = batch.num_tokens if batch.logit_rows is None else len(batch.logit_rows)
            states = None if self._states is None else self._states[: batch.num_tokens]
            hidden = model.hidden(batch, kv, self._state_layers, states)
            model.logits(hidden, batch.logit_rows, self._logits[:num_logits])

    def _run_drafted(self, model: Llama, batch: Batch, kv: Array) -> None:
        """Run decodes with drafts; few rows get the bits of single steps."""
        is_exact = batch.num_tokens <= MAX_EXACT_ROWS
        with model.ops.exact_rows() if is_exact else nullcontext():
            self._run(model, replace(batch, has_drafts=True, is_drafted=True), kv)

    def _batch(self, decodes: int, more: int) -> Batch:
        buffers, total = self._buffers, decodes + more
        num_sequences = decodes + (MAX_CHUNKS if more else 0)
        return Batch(
            token_ids=buffers.token_ids[:total],
            positions=buffers.positions[:total],
            slots=buffers.slots[:total],
            block_tables=self._block_tables[:num_sequences],
            context_lens=buffers.context_lens[:num_sequences],
            query_start=buffers.query_start,
            logit_rows=buffers.logit_rows[:num_sequences] if more else None,
            num_decodes=decodes,
            num_tokens=total,
            num_sequences=num_sequences,
            max_query_len=total if more else 0,
            has_drafts=more > 0,
        )

    def _padding(self) -> list[np.ndarray]:
        """Return padding in the order of _Buffers. Slots outside the cache are not written."""
        num_tokens, num_sequences = self._max_rows + CHUNK_ROWS[-1], self._max_rows + MAX_CHUNKS
        return [
            np.zeros(num_tokens, np.int32),
            np.full(num_tokens, NO_PENDING_ROW, np.int32),
            np.zeros(num_tokens, np.int32),
            np.full(num_tokens, self._num_slots, np.int64),
            np.zeros(num_sequences, np.int32),
            np.zeros(MAX_CHUNKS + 1, np.int32),
            np.zeros(num_sequences, np.int32),
        ]

    def _fill(self, inputs: ForwardInputs, decodes: int, more: int) -> None:
        columns, num_tokens = self._columns, len(inputs.token_ids)
        padded = slice(num_tokens, self._num_tokens)
        for column, known, padding in (
            (columns.token_ids, inputs.token_ids, 0),
            (columns.source, inputs.pending_token_row, NO_PENDING_ROW),
            (columns.positions, inputs.positions, 0),
            (columns.slots, inputs.slots, self._num_slots),
        ):
            column[:num_tokens], column[padded] = known, padding
        self._num_tokens = num_tokens
        n, num_chunks, num_logits = inputs.num_decodes, len(inputs.chunk_lens), len(inputs.logit_rows)
        columns.context_lens[:n], columns.context_lens[n:] = inputs.context_lens[:n], 0
        columns.logit_rows[:num_logits], columns.logit_rows[num_logits:] = inputs.logit_rows, 0
        if more:
            columns.context_lens[decodes : decodes + num_chunks] = inputs.context_lens[n:]
            starts = inputs.query_start
            columns.query_start[: num_chunks + 1], columns.query_start[num_chunks + 1 :] = starts, starts[-1]


def decode_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, 8, 12, then steps of an eighth of the next power of two, at least 8."""
    sizes = [size for size in (1, 2, 4, 8, 12) if size < max_rows]
    size = 16
    while size < max_rows:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // 16)
    return [*sizes, max_rows]


def drafted_sizes(max_rows: int) -> list[int]:
    """Return DRAFTED_ROWS, then the sizes of `decode_sizes`, up to `max_rows`."""
    most_exact = min(max_rows, MAX_EXACT_ROWS)
    exact = {size for size in (*DRAFTED_ROWS, most_exact) if 1 < size <= most_exact}
    return sorted(exact.union(size for size in decode_sizes(max_rows) if size > most_exact))


def _decodes_with_chunks(max_rows: int) -> list[int]:
    return [size for size in (16, 64, *range(128, max_rows, 128)) if size < max_rows] + [max_rows]


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return sizes[bisect_left(sizes, wanted)]
