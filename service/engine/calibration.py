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

NUM_TOKENS = (256, 2048)
"""Two lengths of prompts: what one more token costs is the difference."""


def measure_rates(model: Llama, kv: Array, host: HostBlocks, longest: int) -> Rates:
    """Copies out and in and two prompts, on a cache that holds nothing yet; prompts of at most `longest` tokens."""
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
    few, many = (min(count, longest) for count in NUM_TOKENS)
    pairs_in_tokens = _pair_operations(model.config) / _token_operations(model.config) * 2
    few_s, many_s = (_quickest(lambda count=count: _compute(model, kv, count)) for count in (few, many))
    if many == few or many_s <= few_s:
        token_s = many_s / many
    else:
        token_s = (many_s - few_s) / (many - few + pairs_in_tokens * (many**2 - few**2) / 2)
    return token_s, token_s * pairs_in_tokens


def _compute(model: Llama, kv: Array, num_tokens: int) -> None:
    with model.ops.scratch():
        model.forward(shared_block_batch(model.ops, np.array([num_tokens]), kv.shape[4], num_tokens), kv)
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
