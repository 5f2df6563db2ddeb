"""What copies and prompts cost on this machine, measured before the engine serves; CostModel corrects it later."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from model.config import ModelConfig
from model.llama import Llama
from model.ops.host_blocks import HostBlocks
from model.ops.interface import Array
from service.engine.cost_model import Rates
from service.engine.memory import shared_block_batch

NUM_BLOCKS = 16
"""In a transfer that is long enough to tell of bandwidth."""

PATIENCE_S = 1.0
"""Host memory is pinned in the background; for its first piece the start of the engine waits so long at most."""

GUESSED_BYTES_PER_S = 25e9
GUESSED_TRANSFER_S = 1e-4
"""Where no host memory was ready in time; the first transfers correct it."""

NUM_TOKENS = 2048
"""Of prompts that are timed, together: so many that neither what the host takes to launch them nor what every step
costs is seen in it."""


def measure_rates(model: Llama, kv: Array, host: HostBlocks, longest: int) -> Rates:
    """Copies out and in and prompts, on a cache that holds nothing yet; prompts of at most `longest` tokens."""
    token_s, pair_s = _prompt_rates(model, kv, longest)
    count = _wait_for_blocks(host, min(NUM_BLOCKS, len(kv)))
    if count == 0:
        block_s = kv.nbytes / len(kv) / GUESSED_BYTES_PER_S
        return Rates(
            token_s=token_s, pair_s=pair_s, block_out_s=block_s, block_in_s=block_s, transfer_s=GUESSED_TRANSFER_S
        )
    blocks = list(range(count))
    out_s, in_s = (_quickest(lambda copy=copy: copy(blocks, blocks).wait()) for copy in (host.copy_out, host.copy_in))
    transfer_s = _quickest(lambda: host.copy_out([0], [0]).wait())
    return Rates(
        token_s=token_s,
        pair_s=pair_s,
        block_out_s=max(out_s - transfer_s, out_s / 2) / count,
        block_in_s=max(in_s - transfer_s, in_s / 2) / count,
        transfer_s=transfer_s,
    )


def _prompt_rates(model: Llama, kv: Array, longest: int) -> tuple[float, float]:
    """Seconds of one more token of a prompt, and of one more for each token before it.

    The second is reckoned from the first: attention's operations, at half the rate of the products with the weights.
    """
    length = min(NUM_TOKENS, longest)
    count = NUM_TOKENS // length
    pairs_in_tokens = _pair_operations(model.config) / _token_operations(model.config) * 2
    seconds = _quickest(lambda: _compute(model, kv, np.full(count, length)))
    token_s = seconds / (count * (length + pairs_in_tokens * length**2 / 2))
    return token_s, token_s * pairs_in_tokens


def _compute(model: Llama, kv: Array, lengths: np.ndarray) -> None:
    with model.ops.scratch():
        model.forward(shared_block_batch(model.ops, lengths, kv.shape[4], int(lengths.max())), kv)
    model.ops.synchronize()


def _quickest(work: Callable[[], object], rounds: int = 3) -> float:
    seconds = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)


def _wait_for_blocks(host: HostBlocks, count: int) -> int:
    deadline_s = time.monotonic() + PATIENCE_S
    while host.num_ready < count and host.failure is None and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return min(host.num_ready, count)


def _token_operations(config: ModelConfig) -> int:
    """Of the matrices, to compute one token of which no logits are wanted."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return 2 * (config.num_parameters - embeddings)


def _pair_operations(config: ModelConfig) -> int:
    """Of attention, for one token and one before it."""
    return 4 * config.num_layers * config.num_heads * config.head_dim
