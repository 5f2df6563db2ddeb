from __future__ import annotations

import time

import numpy as np

from model.families.llama import Llama
from model.ops.interface import Array, Ops
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.drafting.drafter import MAX_DRAFTS, Drafter
from service.engine.drafting.lengths import DraftLengths, StepCost
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from service.engine.execution.executor import ModelExecutor
from service.engine.kv.kv_manager import KVManager
from service.engine.kv.memory_profile import shared_block_batch
from service.engine.scheduling.speculation import Speculation
from service.errors import StartupError

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
NUM_ROUNDS = 3


def check_speculation(settings: Settings, ops: Ops) -> None:
    """Raises StartupError if the device cannot verify drafts."""
    if settings.speculative_config is not None and ops.name == "cuda":
        raise StartupError("--speculative-config: a GPU does not verify drafts yet (--device cpu)")


def build_speculation(
    settings: Settings, executor: ModelExecutor, kv: KVManager, max_model_len: int
) -> Speculation | None:
    """Return the drafts of this engine; None on a GPU. Without a config, only grammars draft."""
    if executor.runs_ahead:
        return None
    vocab_size, wanted = executor.model.config.vocab_size, settings.speculative_config
    if wanted is None:
        return Speculation(kv, vocab_size)
    cost = measure_step_cost(executor.model, executor.kv, max_model_len)
    drafter = _drafter(wanted)
    return Speculation(kv, vocab_size, drafter, wanted.num_speculative_tokens, DraftLengths(cost))


def _drafter(wanted: SpeculativeConfig) -> Drafter:
    if wanted.method == "ngram":
        return NgramDrafter(wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    return SuffixDrafter(
        max_depth=wanted.suffix_decoding_max_tree_depth,
        max_requests=wanted.suffix_decoding_max_cached_requests,
        max_spec_factor=wanted.suffix_decoding_max_spec_factor,
        min_token_prob=wanted.suffix_decoding_min_token_prob,
    )


def measure_step_cost(model: Llama, kv: Array, max_model_len: int) -> StepCost:
    """Time forward passes of short sequences on an empty cache."""
    seconds = []
    for num_rows in MEASURED_ROWS:
        lengths = _lengths(num_rows, min(MAX_DRAFTS, max_model_len))
        batch = shared_block_batch(model.ops, lengths, kv.shape[4], max_model_len)
        rounds = []
        for _ in range(NUM_ROUNDS):
            start_s = time.perf_counter()
            with model.ops.scratch():
                model.logits(model.hidden(batch, kv), None)
            model.ops.synchronize()
            rounds.append(time.perf_counter() - start_s)
        seconds.append(min(rounds))
    return StepCost(MEASURED_ROWS, seconds)


def _lengths(num_rows: int, longest: int) -> np.ndarray:
    whole, rest = divmod(num_rows, longest)
    return np.array(([rest] if rest else []) + [longest] * whole)
