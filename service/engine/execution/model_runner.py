"""Steps of one rank: StepInputs in, sampled arrays out."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from model.adapter_slots import AdapterSlots, BatchAdapters
from model.batch import Batch, StateRows
from model.cuda_graphs import CHUNK_ROWS, StepGraphs
from model.families.llama import Llama
from model.ops.adapter_interface import AsyncWrite
from model.ops.host_blocks import HostBlocks, Transfer
from model.ops.interface import SAMPLING_COLUMNS, Array, Bias, Ops, Penalties, SamplingArrays, TokenMask
from model.step_inputs import ForwardInputs, LogprobRows, SampleInputs, StepInputs
from model.weights.lora.adapter import LoraAdapter

MAX_LATE_DRAFTS = 1024
"""Draft tokens that a step reads from the device: 16 for each of 64 sequences."""

Fetch = Callable[[], list[np.ndarray]]

Then = Callable[[StateRows, Array], None]
"""Work that follows a step on the device, called with its rows and the ids int32[R] from its first `sample` call.
Neither outlives the call."""


class DoneTransfer(NamedTuple):
    is_out: bool
    num_blocks: int
    seconds: float  # on the device


@dataclass(slots=True)
class RunningStep:
    """Launched step. Fetches return samples in the order of StepInputs."""

    logits: Array | None  # float32[R, V] until sampled
    context_lens: Array | None  # int32[num_decodes], if the buffer persists
    states: StateRows | None  # if there are state_layers
    scratch: ExitStack
    samples: list[Fetch]  # token ids, NaN flags, optionally log-probabilities (see Sampled)
    prompt_logprobs: list[Fetch]
    pool_rows: list[Fetch]


class ModelRunner:
    """Buffers for steps of at most `max_rows` sequences of `max_blocks` blocks. Sampled ids stay on the device in
    `sampled` for the next step. `attach` adds the cache."""

    def __init__(self, model: Llama, max_rows: int, max_blocks: int, *, verifies_drafts: bool = False):
        self.model = model
        self.kv: Array | None = None
        self._blocks: Array | None = None
        self._block_size = 0
        self.host: HostBlocks | None = None
        num_ids = max_rows + (MAX_LATE_DRAFTS if verifies_drafts else 0)
        self.sampled = model.ops.empty((num_ids,), np.dtype(np.int32))
        self._max_rows = max_rows
        self._ops: Ops = model.ops
        self._logit_sizes = model.ops.linear_sizes(max_rows)
        self._swap_outs: deque[tuple[int, Transfer]] = deque()  # (num_blocks, transfer)
        self._swap_ins: deque[tuple[int, Transfer]] = deque()
        self._kept_params: SamplingArrays | None = None
        self._state_layers: tuple[int, ...] = ()
        self._adapters: AdapterSlots | None = None
        self._graphs: StepGraphs | None = None
        if model.ops.name == "cuda":
            self._graphs = StepGraphs(model, self.sampled, max_rows, max_blocks, verifies_drafts=verifies_drafts)

    @property
    def max_captured_rows(self) -> int:
        return self._max_rows + CHUNK_ROWS[-1]

    @property
    def first_late_row(self) -> int:
        """First row of `sampled` where a draft head leaves up to MAX_LATE_DRAFTS tokens for the next step."""
        return self._max_rows

    @property
    def replays_graphs(self) -> bool:
        """True if decodes run as captured graphs and keep their sampling parameters."""
        return self._graphs is not None

    def attach(
        self,
        kv: Array,
        *,
        blocks: Array | None = None,
        state_layers: tuple[int, ...] = (),
        adapters: AdapterSlots | None = None,
        num_host_blocks: int = 0,
        progress: bool = False,
    ) -> None:
        """Use this cache [num_blocks, L, 2, Hkv, B, D]. Copies and swaps move `blocks` [num_blocks, ...] (default: the
        cache). Steps return the inputs of `state_layers`."""
        self.kv, self._block_size = kv, kv.shape[4]
        self._blocks, self._state_layers = kv if blocks is None else blocks, state_layers
        self._adapters = adapters
        if self._graphs is not None:
            self._graphs.capture(kv, state_layers=state_layers, adapters=adapters, progress=progress)
        if num_host_blocks:  # last: pinning slows down startup
            self.host = self._ops.host_blocks(self._blocks, num_host_blocks)

    def write_adapter(self, slot: int, adapter: LoraAdapter, *, is_unused: bool = False) -> AsyncWrite:
        """Start replacing a slot's adapter, after all launched steps unless the slot `is_unused`."""
        if self._adapters is None:
            raise ValueError("write_adapter: there are no slots (attach them)")
        return self._adapters.write(slot, adapter, is_unused=is_unused)

    def fit_prompts(self, num_decodes: int, num_tokens: int) -> int:
        """Return the efficient number of prompt tokens, up to `num_tokens`, for a step with decodes."""
        return num_tokens if self._graphs is None else self._graphs.fit(num_decodes, num_tokens)

    def decode_seconds(self) -> list[float]:
        """Time captured decodes of 1, 2, ... rows on padding; empty without captures."""
        return [] if self._graphs is None else self._graphs.decode_seconds()

    def launch(self, inputs: StepInputs) -> RunningStep:
        """Start the step; call `sample` unless the inputs include samples."""
        scratch = ExitStack()
        scratch.enter_context(self._ops.scratch())
        self.transfer(inputs)
        if inputs.forward is None:
            raise ValueError("launch: the step computes nothing (transfer it)")
        step = RunningStep(None, None, None, scratch, [], [], [])
        if inputs.needs_hidden or not self._replay(inputs.forward, step):
            self._forward(inputs, inputs.forward, step)
        if inputs.samples is not None:
            self.sample(step, inputs.samples)
        return step

    def transfer(self, inputs: StepInputs) -> None:
        if len(inputs.copies):
            self._copy(inputs.copies)
        if not len(inputs.swap_outs) and not len(inputs.swap_ins):
            return
        if self.host is None:
            raise ValueError("transfer: there are no host blocks to swap with")
        if len(inputs.swap_outs):
            self._swap_outs.append((len(inputs.swap_outs), self.host.copy_out(*inputs.swap_outs.T.tolist())))
        if len(inputs.swap_ins):
            self._swap_ins.append((len(inputs.swap_ins), self.host.copy_in(*inputs.swap_ins.T.tolist())))

    def sample(self, step: RunningStep, samples: Sequence[SampleInputs], then: Then | None = None) -> None:
        with step.scratch:
            sampled = [self._sample(step, call) for call in samples]
            step.samples = [fetch for _, fetch in sampled]
            step.logits = None
            if then is not None and step.states is not None and sampled:
                then(step.states, sampled[0][0])

    def finished_transfers(self) -> list[DoneTransfer]:
        """Return transfers finished since the last call, in order per direction."""
        finished = []
        for is_out, in_flight in ((True, self._swap_outs), (False, self._swap_ins)):
            while in_flight and in_flight[0][1].is_done():
                num_blocks, transfer = in_flight.popleft()
                finished.append(DoneTransfer(is_out, num_blocks, transfer.seconds()))
        return finished

    def wait_for_transfer(self) -> None:
        (self._swap_ins or self._swap_outs)[0][1].wait()

    def _copy(self, copies: np.ndarray) -> None:
        for together in independent_copies(copies):
            sources, targets = np.array(together, np.int32).T
            pair = [np.ascontiguousarray(sources), np.ascontiguousarray(targets)]
            self._ops.copy_blocks(self._blocks, *self._ops.upload_all(pair))

    def _replay(self, inputs: ForwardInputs, step: RunningStep) -> bool:
        """Replay a captured graph, which keeps no final hidden states; return False if none fits."""
        step.logits = None if self._graphs is None else self._graphs.forward(inputs)
        if self._graphs is None or step.logits is None:
            return False
        step.context_lens, step.states = self._graphs.context_lens(inputs.num_decodes), self._graphs.state_rows()
        return True

    def _forward(self, inputs: StepInputs, forward: ForwardInputs, step: RunningStep) -> None:
        batch, states = self._batch(forward), None
        if self._state_layers:
            shape = (batch.num_tokens, len(self._state_layers) * self.model.config.hidden_size)
            states = self._ops.empty(shape, self._ops.dtype)
            step.states = StateRows(batch.token_ids, batch.positions, batch.slots, states)
        hidden = self.model.hidden(batch, self.kv, self._state_layers, states)
        step.prompt_logprobs = [self._score(hidden, part) for part in inputs.prompt_logprobs]
        step.pool_rows = [self._ops.download_async([hidden[first:stop]]) for first, stop in inputs.pool_rows]
        step.logits = self.model.logits(hidden, batch.logit_rows)[: len(forward.logit_rows)]

    def _score(self, hidden: Array, part: LogprobRows) -> Fetch:
        with self._ops.scratch():
            rows, token_ids = self._ops.upload_all([padded_rows(part.rows, self._logit_sizes), part.token_ids])
            logits = self.model.logits(hidden, rows)[: len(part.rows)]
            return self._ops.download_async(self._ops.top_logprobs(logits, token_ids, part.num_alternatives))

    def _sample(self, step: RunningStep, call: SampleInputs) -> tuple[Array, Fetch]:
        """Return the ids on the device, and a function to fetch all results."""
        if not call.num_rows:
            return self.sampled, self._ops.download_async(())
        logits = step.logits
        if call.rows is not None:
            logits = self._ops.gather_rows(logits, self._ops.upload(call.rows))
        params = self._kept_params if call.params is None else self._upload(call.params)
        if params is None:
            raise ValueError("sample: no call has kept its parameters (send them)")
        if call.keeps_params and step.context_lens is not None:
            self._kept_params = replace(params, position=step.context_lens.view(np.uint32))
        is_kept = call.num_rows <= self._max_rows and not params.adjusts_logprobs
        out = self.sampled[: call.num_rows] if is_kept else None  # more rows have drafts: the next step knows their ids
        sampled = self._ops.sample(logits, params, out=out)
        arrays = [sampled.token_ids, sampled.is_nan]
        if sampled.logprobs is not None:
            arrays += [sampled.logprobs, sampled.top_ids, sampled.top_logprobs]
        return sampled.token_ids, self._ops.download_async(arrays)

    def _upload(self, params: SamplingArrays) -> SamplingArrays:
        columns = [getattr(params, name) for name in SAMPLING_COLUMNS]
        ragged = [
            [] if part is None else list(vars(part).values()) for part in (params.penalties, params.bias, params.mask)
        ]
        sent = iter(self._ops.upload_all([array for part in (columns, *ragged) for array in part]))
        columns, penalties, bias, mask = (list(islice(sent, len(part))) for part in (columns, *ragged))
        return replace(
            params,
            **dict(zip(SAMPLING_COLUMNS, columns, strict=True)),
            penalties=Penalties(*penalties) if penalties else None,
            bias=Bias(*bias) if bias else None,
            mask=TokenMask(*mask) if mask else None,
        )

    def _batch(self, inputs: ForwardInputs) -> Batch:
        """Upload the step and insert pending tokens; logit rows are padded."""
        tables = inputs.block_tables(np.arange(inputs.num_decodes), self._block_size)
        hosts = (
            inputs.token_ids,
            inputs.pending_token_row,
            inputs.positions,
            inputs.slots,
            tables,
            inputs.context_lens,
            inputs.query_start,
            padded_rows(inputs.logit_rows, self._logit_sizes),
            *self._adapter_rows(inputs),
        )
        sent = self._ops.upload_all(hosts)
        token_ids, pending_token_row, positions, slots, tables, context_lens, starts, logit_rows, *rows = sent
        self._ops.pick_tokens(token_ids, self.sampled, pending_token_row)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            context_lens=context_lens,
            query_start=starts,
            logit_rows=logit_rows,
            num_decodes=inputs.num_decodes,
            num_tokens=len(inputs.token_ids),
            num_sequences=len(inputs.context_lens),
            max_query_len=int(inputs.chunk_lens.max(initial=0)),
            adapters=self._batch_adapters(len(inputs.token_ids), rows),
        )

    def _adapter_rows(self, inputs: ForwardInputs) -> list[np.ndarray]:
        if self._adapters is None or inputs.adapter_slots is None:
            return []
        tile_rows = self._adapters.adapter_ops.lora_tile_rows(len(inputs.token_ids))
        return self._adapters.host_rows(inputs.adapter_slots, tile_rows)

    def _batch_adapters(self, num_tokens: int, sent: Sequence[Array]) -> BatchAdapters | None:
        if self._adapters is None or not sent:
            return None
        return self._adapters.batch(sent, self._adapters.adapter_ops.lora_tile_rows(num_tokens))


def padded_rows(rows: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Pad int32[R] with zeros to the next of `sizes`; unchanged if empty or longer than all. At other sizes of the LM
    head, cuBLASLt may load a kernel, which takes 15 to 70 ms under load."""
    index = bisect_left(sizes, len(rows))
    if not len(rows) or index == len(sizes):
        return rows
    return np.pad(rows, (0, sizes[index] - len(rows)))


def independent_copies(copies: np.ndarray) -> list[list[list[int]]]:
    """Split int32[n, 2] (from, to) into runs in which no target is a source or occurs twice."""
    runs: list[list[list[int]]] = [[]]
    seen_sources: set[int] = set()
    seen_targets: set[int] = set()
    for copy in copies.tolist():
        source, target = copy
        if target in seen_sources or target in seen_targets or source in seen_targets:
            runs.append([])
            seen_sources, seen_targets = set(), set()
        runs[-1].append(copy)
        seen_sources.add(source)
        seen_targets.add(target)
    return runs
