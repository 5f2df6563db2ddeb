"""Cost of restoring a sequence by swapping or recomputing.

Rates are measured at start and corrected by observation. Recomputing delays all running sequences, copies only waiting
ones: the more sequences run, the more are swapped, until the bus is the bottleneck.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from model.config import ModelConfig
from model.families.llama import Llama
from model.ops.host_blocks import HostBlocks, Transfer
from model.ops.interface import Array
from service.engine.kv.warm_up import shared_block_batch

EWMA_WEIGHT = 0.1

COPY_SLOWDOWN = 0.03
"""Slowdown of steps while the bus is busy."""

MIN_BLOCKS = 8
"""Smaller transfers are ignored."""

MIN_TOKENS = 256
"""Smaller prefill steps are ignored."""


@dataclass(kw_only=True)
class Rates:
    """Device seconds."""

    token_s: float  # in a long prompt
    pair_s: float  # per token attended to
    block_out_s: float
    block_in_s: float
    transfer_s: float  # fixed cost, from request to completion


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """Engine load; default: one sequence alone."""

    num_running: int = 1
    num_swapping_out: int = 0  # blocks, including planned ones
    num_swapping_in: int = 0


class SwapCostModel:
    """Costs in seconds, summed over running sequences."""

    def __init__(self, rates: Rates, block_size: int):
        self.rates = rates
        self._block_size = block_size
        self._decode_s: float | None = None  # moving average

    def recompute_s(self, start: int, end: int) -> float:
        return (end - start) * self.rates.token_s + (end**2 - start**2) / 2 * self.rates.pair_s

    def copy_in_s(self, num_blocks: int) -> float:
        return self.rates.transfer_s + num_blocks * self.rates.block_in_s if num_blocks else 0.0

    def copy_out_s(self, num_blocks: int) -> float:
        return self.rates.transfer_s + num_blocks * self.rates.block_out_s if num_blocks else 0.0

    def swap_s(self, num_out: int, num_in: int, load: EngineLoad) -> float:
        """Return the seconds lost by copying `num_out` blocks out and later `num_in` back in. One sequence waits for
        copies out, and another needs a block every `block_size` steps."""
        swap_out_s, swap_in_s = self.copy_out_s(num_out), self.copy_in_s(num_in)
        share = 1 / load.num_running
        loss_s = COPY_SLOWDOWN * (swap_out_s + swap_in_s)
        if num_out:
            wait_s = swap_out_s + load.num_swapping_out * self.rates.block_out_s
            steps_s = 2 * self._block_size * (self._decode_s or math.inf)
            loss_s += min(1.0, share + wait_s / steps_s) * wait_s
        if num_in:
            loss_s += share * (swap_in_s + load.num_swapping_in * self.rates.block_in_s)
        return loss_s

    def crossover_tokens(self, longest: int) -> int | None:
        """Return the shortest lone sequence that is cheaper to swap; None up to `longest`."""
        for num_blocks in range(1, longest // self._block_size + 1):
            if self.swap_s(num_blocks, num_blocks, EngineLoad()) < self.recompute_s(0, num_blocks * self._block_size):
                return num_blocks * self._block_size
        return None

    def on_transfer(self, num_blocks: int, seconds: float, *, out: bool) -> None:
        if num_blocks < MIN_BLOCKS:
            return
        if out:
            self.rates.block_out_s = _ewma(self.rates.block_out_s, seconds / num_blocks)
        else:
            self.rates.block_in_s = _ewma(self.rates.block_in_s, seconds / num_blocks)

    def on_decode_step(self, seconds: float) -> None:
        self._decode_s = seconds if self._decode_s is None else _ewma(self._decode_s, seconds)

    def on_prefill_step(self, spans: list[tuple[int, int]], seconds: float, *, with_decodes: bool) -> None:
        if sum(end - start for start, end in spans) < MIN_TOKENS or (with_decodes and self._decode_s is None):
            return
        seen_s = seconds - ((self._decode_s or 0.0) if with_decodes else 0.0)
        if seen_s <= 0:  # the decode estimate is outdated
            return
        expected_s = sum(self.recompute_s(start, end) for start, end in spans)
        ratio = min(2.0, max(0.5, seen_s / expected_s))
        self.rates.token_s = _ewma(self.rates.token_s, self.rates.token_s * ratio)
        self.rates.pair_s = _ewma(self.rates.pair_s, self.rates.pair_s * ratio)


def _ewma(value: float, seen: float) -> float:
    return value + EWMA_WEIGHT * (seen - value)


CALIBRATION_BLOCKS = 16

PINNING_WAIT_S = 1.0
"""Longest wait for pinned memory."""

GUESSED_BYTES_PER_S = 25e9
GUESSED_TRANSFER_S = 1e-4
"""Assumed if no host memory is pinned in time."""

CALIBRATION_TOKENS = 2048
"""Enough to hide a step's fixed cost."""


def measure_rates(model: Llama, kv: Array, host: HostBlocks, longest: int) -> Rates:
    """Time copies, and prompts of at most `longest` tokens, on an empty cache."""
    token_s, pair_s = _prompt_rates(model, kv, longest)
    count = _wait_for_blocks(host, min(CALIBRATION_BLOCKS, len(kv)))
    if count == 0:
        block_s = kv.nbytes / len(kv) / GUESSED_BYTES_PER_S
        return Rates(
            token_s=token_s, pair_s=pair_s, block_out_s=block_s, block_in_s=block_s, transfer_s=GUESSED_TRANSFER_S
        )
    blocks = list(range(count))
    swap_out_s, swap_in_s = (_best_s(partial(_copy_and_wait, copy, blocks)) for copy in (host.copy_out, host.copy_in))
    transfer_s = _best_s(lambda: host.copy_out([0], [0]).wait())
    return Rates(
        token_s=token_s,
        pair_s=pair_s,
        block_out_s=max(swap_out_s - transfer_s, swap_out_s / 2) / count,
        block_in_s=max(swap_in_s - transfer_s, swap_in_s / 2) / count,
        transfer_s=transfer_s,
    )


def _copy_and_wait(copy: Callable[[list[int], list[int]], Transfer], blocks: list[int]) -> None:
    copy(blocks, blocks).wait()


def _prompt_rates(model: Llama, kv: Array, longest: int) -> tuple[float, float]:
    """Return seconds per prompt token and per token attended to, assuming attention runs at half the GEMM rate."""
    length = min(CALIBRATION_TOKENS, longest)
    count = CALIBRATION_TOKENS // length
    pairs_in_tokens = _attention_flops_per_pair(model.config) / _flops_per_token(model.config) * 2
    seconds = _best_s(lambda: _run_prompts(model, kv, np.full(count, length)))
    token_s = seconds / (count * (length + pairs_in_tokens * length**2 / 2))
    return token_s, token_s * pairs_in_tokens


def _run_prompts(model: Llama, kv: Array, lengths: np.ndarray) -> None:
    with model.ops.scratch():
        model.forward(shared_block_batch(model.ops, lengths, kv.shape[4], int(lengths.max())), kv)
    model.ops.synchronize()


def _best_s(work: Callable[[], object], rounds: int = 3) -> float:
    seconds = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)


def _wait_for_blocks(host: HostBlocks, count: int) -> int:
    deadline_s = time.monotonic() + PINNING_WAIT_S
    while host.num_ready < count and host.failure is None and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return min(host.num_ready, count)


def _flops_per_token(config: ModelConfig) -> int:
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return 2 * (config.num_active_parameters - embeddings)


def _attention_flops_per_pair(config: ModelConfig) -> int:
    return 4 * config.num_layers * config.num_heads * config.head_dim
