"""What it costs to bring a sequence back: by copying its blocks out and in, or by computing its tokens again.

Calibrated at start and corrected by what is seen. Both grow with the length; a transfer also has a cost of its own, and
computing grows faster than the length, so short sequences are computed again and long ones are copied. What is computed
again holds up all that run. Copies go on beside the steps: they slow these down a little, and hold up whoever waits for
them. So the more run, the more is copied, until the bus is what everybody waits for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.llama import Llama
from model.ops.host_blocks import HostBlocks
from model.ops.interface import Array
from service.engine.kv.memory_profile import shared_block_batch

EWMA_WEIGHT = 0.1
"""Of a new observation against all before it."""

COPY_SLOWDOWN = 0.03
"""Of steps beside copies, which share the memory with them: what was measured with the bus full in both directions."""

MIN_BLOCKS = 8
"""A transfer of fewer says little of bandwidth."""

MIN_TOKENS = 256
"""Prompt tokens of a step that tell of the cost of tokens: fewer are lost in what a step costs anyway."""


@dataclass(kw_only=True)
class Rates:
    """Seconds of the device."""

    token_s: float  # to compute one token of a long prompt
    pair_s: float  # more for each token before it
    block_out_s: float
    block_in_s: float
    transfer_s: float  # of any transfer, however small, with asking for it and seeing it done


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What is going on while a choice is made. By itself: one that runs alone."""

    num_running: int = 1  # sequences
    num_swapping_out: int = 0  # blocks on their way to the host, or about to be
    num_swapping_in: int = 0  # and from it


class SwapCostModel:
    """Compares the two ways for one sequence, in seconds of all that run."""

    def __init__(self, rates: Rates, block_size: int):
        self.rates = rates
        self._block_size = block_size
        self._decode_s: float | None = None  # of a step without prompts, lately

    def recompute_s(self, start: int, end: int) -> float:
        """To compute the tokens from `start` to `end`."""
        return (end - start) * self.rates.token_s + (end**2 - start**2) / 2 * self.rates.pair_s

    def copy_in_s(self, num_blocks: int) -> float:
        """To bring so many blocks from the host."""
        return self.rates.transfer_s + num_blocks * self.rates.block_in_s if num_blocks else 0.0

    def copy_out_s(self, num_blocks: int) -> float:
        """To take so many blocks to the host."""
        return self.rates.transfer_s + num_blocks * self.rates.block_out_s if num_blocks else 0.0

    def swap_s(self, num_out: int, num_in: int, load: EngineLoad) -> float:
        """To take so many blocks to the host and to bring so many from it later, behind what is on its way by now.

        Who waits for them to be out is one sequence at first. Each of the others needs a block too every `block_size`
        steps: the longer it takes, the more of them stand still.
        """
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
        """The shortest length, in whole blocks, from which on a copy out and in is cheaper for a sequence that runs
        alone; None up to `longest`. The more run beside it, the shorter it is."""
        for num_blocks in range(1, longest // self._block_size + 1):
            if self.swap_s(num_blocks, num_blocks, EngineLoad()) < self.recompute_s(0, num_blocks * self._block_size):
                return num_blocks * self._block_size
        return None

    def on_transfer(self, num_blocks: int, seconds: float, *, out: bool) -> None:
        """A transfer to the host (`out`) or from it took so long."""
        if num_blocks < MIN_BLOCKS:
            return
        if out:
            self.rates.block_out_s = _ewma(self.rates.block_out_s, seconds / num_blocks)
        else:
            self.rates.block_in_s = _ewma(self.rates.block_in_s, seconds / num_blocks)

    def on_decode_step(self, seconds: float) -> None:
        """A step without prompts took so long."""
        self._decode_s = seconds if self._decode_s is None else _ewma(self._decode_s, seconds)

    def on_prefill_step(self, spans: list[tuple[int, int]], seconds: float, *, with_decodes: bool) -> None:
        """A step that computed the tokens of these spans (start, end) of prompts took so long."""
        if sum(end - start for start, end in spans) < MIN_TOKENS or (with_decodes and self._decode_s is None):
            return
        seen_s = seconds - (self._decode_s if with_decodes else 0.0)
        if seen_s <= 0:  # decodes are no longer what they were
            return
        expected_s = sum(self.recompute_s(start, end) for start, end in spans)
        ratio = min(2.0, max(0.5, seen_s / expected_s))
        self.rates.token_s = _ewma(self.rates.token_s, self.rates.token_s * ratio)
        self.rates.pair_s = _ewma(self.rates.pair_s, self.rates.pair_s * ratio)


def _ewma(value: float, seen: float) -> float:
    return value + EWMA_WEIGHT * (seen - value)


CALIBRATION_BLOCKS = 16
"""In a transfer that is long enough to tell of bandwidth."""

PINNING_WAIT_S = 1.0
"""Host memory is pinned in the background; for its first piece the start of the engine waits so long at most."""

GUESSED_BYTES_PER_S = 25e9
GUESSED_TRANSFER_S = 1e-4
"""Where no host memory was ready in time; the first transfers correct it."""

CALIBRATION_TOKENS = 2048
"""Of prompts that are timed, together: so many that neither what the host takes to launch them nor what every step
costs is seen in it."""


def measure_rates(model: Llama, kv: Array, host: HostBlocks, longest: int) -> Rates:
    """Copies out and in and prompts, on a cache that holds nothing yet; prompts of at most `longest` tokens."""
    token_s, pair_s = _prompt_rates(model, kv, longest)
    count = _wait_for_blocks(host, min(CALIBRATION_BLOCKS, len(kv)))
    if count == 0:
        block_s = kv.nbytes / len(kv) / GUESSED_BYTES_PER_S
        return Rates(
            token_s=token_s, pair_s=pair_s, block_out_s=block_s, block_in_s=block_s, transfer_s=GUESSED_TRANSFER_S
        )
    blocks = list(range(count))
    swap_out_s, swap_in_s = (
        _best_s(lambda copy=copy: copy(blocks, blocks).wait()) for copy in (host.copy_out, host.copy_in)
    )
    transfer_s = _best_s(lambda: host.copy_out([0], [0]).wait())
    return Rates(
        token_s=token_s,
        pair_s=pair_s,
        block_out_s=max(swap_out_s - transfer_s, swap_out_s / 2) / count,
        block_in_s=max(swap_in_s - transfer_s, swap_in_s / 2) / count,
        transfer_s=transfer_s,
    )


def _prompt_rates(model: Llama, kv: Array, longest: int) -> tuple[float, float]:
    """Seconds of one more token of a prompt, and of one more for each token before it.

    The second is reckoned from the first: attention's operations, at half the rate of the products with the weights.
    """
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
    """Of the matrices, to compute one token of which no logits are wanted."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return 2 * (config.num_parameters - embeddings)


def _attention_flops_per_pair(config: ModelConfig) -> int:
    """Of attention, for one token and one before it."""
    return 4 * config.num_layers * config.num_heads * config.head_dim
