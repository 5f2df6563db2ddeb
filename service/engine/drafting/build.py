from __future__ import annotations

import logging
import time
from itertools import accumulate

import numpy as np

from model.batch import Batch
from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3 import dummy_eagle3, load_eagle3, read_eagle3
from model.families.eagle3_device import upload_eagle3
from model.families.llama import Llama
from model.ops.backend import open_ops
from model.ops.group.arrays import on_rank
from model.ops.interface import Array, DraftOps, Ops
from model.weights.loader import load_model
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.drafting.draft_model import DraftModelDrafter
from service.engine.drafting.drafter import MAX_DRAFTS, Drafter
from service.engine.drafting.eagle3 import Eagle3Drafter
from service.engine.drafting.eagle3_device import DeviceEagle3Drafter
from service.engine.drafting.lengths import DraftLengths
from service.engine.drafting.models import PlannedDraftModel
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.step_cost import StepCost
from service.engine.drafting.suffix import SuffixDrafter
from service.engine.execution.executor import ModelExecutor
from service.engine.kv.kv_manager import KVManager
from service.engine.kv.warm_up import shared_block_batch
from service.engine.scheduling.speculation import Speculation
from service.errors import StartupError
from service.observability.logs import fields

log = logging.getLogger("quire.engine")

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
NUM_ROUNDS = 5
WITHOUT_WEIGHTS = ("ngram", "suffix")
TUNED_ROWS = (1, 2, 4, 8, 16)
"""Batch sizes of a draft model for which GEMMs are tuned."""
DEFAULT_DRAFTS = 3
"""Default number of draft tokens."""


def check_speculation(settings: Settings, ops: Ops) -> None:
    """Raise StartupError for settings that the device does not support together."""
    wanted = settings.speculative_config
    if wanted is not None and wanted.ignored:
        log.info("--speculative-config: without effect here %s", fields(keys=",".join(wanted.ignored)))
    if wanted is None or ops.name != "cuda" or wanted.method != "eagle3":
        return
    if ops.num_ranks > 1:
        raise StartupError("--speculative-config: eagle3 runs on one GPU (--tensor-parallel-size 1)")
    if ops.kv_dtype != ops.dtype:
        raise StartupError("--speculative-config: eagle3 on a GPU needs a cache of 16 bits (--kv-cache-dtype auto)")


def build_speculation(
    settings: Settings,
    executor: ModelExecutor,
    kv: KVManager,
    max_model_len: int,
    drafter: Drafter | None,
    draft: PlannedDraftModel | None,
) -> Speculation | None:
    """Return this engine's speculation; None on a GPU without the setting. Without a drafter, only grammars draft."""
    vocab_size, wanted = executor.model.config.vocab_size, settings.speculative_config
    if executor.runs_ahead and wanted is None:
        return None
    if wanted is None or drafter is None or not executor.model.config.has_head:
        return Speculation(kv, vocab_size)
    cost, max_drafts = step_cost(executor, max_model_len), max_draft_tokens(wanted, draft)
    num_ahead = max_drafts if isinstance(drafter, DeviceEagle3Drafter) else 0
    return Speculation(kv, vocab_size, drafter, max_drafts, DraftLengths(cost), num_ahead)


def max_draft_tokens(wanted: SpeculativeConfig, draft: PlannedDraftModel | None) -> int:
    proposed = None if draft is None else draft.num_proposed
    return wanted.num_speculative_tokens or proposed or DEFAULT_DRAFTS


def build_drafter(wanted: SpeculativeConfig | None) -> Drafter | None:
    """Return a drafter without weights."""
    if wanted is None or wanted.method not in WITHOUT_WEIGHTS:
        return None
    if wanted.method == "ngram":
        return NgramDrafter(wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    return SuffixDrafter(
        max_depth=wanted.suffix_decoding_max_tree_depth,
        max_requests=wanted.suffix_decoding_max_cached_requests,
        max_spec_factor=wanted.suffix_decoding_max_spec_factor,
        min_token_prob=wanted.suffix_decoding_min_token_prob,
    )


def check_experts(draft: ModelConfig, model: ModelConfig, ops: Ops) -> None:
    """Raise StartupError for two expert models on one GPU: thread blocks of `experts_row` wait for each other, and
    those of two streams could each occupy some SMs."""
    if ops.name == "cuda" and ops.num_ranks == 1 and draft.experts is not None and model.experts is not None:
        raise StartupError(
            "--speculative-config: two models with experts on one GPU are not supported (a dense draft model)"
        )


def load_drafter(
    draft: PlannedDraftModel, model: Llama, kv: Array, max_model_len: int
) -> Eagle3Drafter | DraftModelDrafter:
    """Load a draft head or model for `model`, with its cache `kv`; rank 0 of a group runs it. Raises StartupError."""
    kv, embedding = on_rank((kv, model.weights.embedding), 0)
    try:
        if isinstance(draft.config, ModelConfig):
            check_experts(draft.config, model.config, model.ops)
            device = "cuda" if model.ops.name == "cuda" else "cpu"
            ops = open_ops(device, model.ops.dtype.name, draft.config.dtype)  # its cache is not rounded
            drafting = load_model(draft.folder, draft.config, ops, max_model_len)
            drafting.tune(TUNED_ROWS, TUNED_ROWS)
            return DraftModelDrafter(drafting, kv)
        return Eagle3Drafter(load_eagle3(draft.folder, model.config, embedding, max_model_len), kv)
    except ModelError as error:
        raise StartupError(f"--speculative-config: {error}") from None


def load_device_head(
    settings: Settings, draft: PlannedDraftModel, executor: ModelExecutor, kv: Array, max_model_len: int
) -> DeviceEagle3Drafter:
    """Load a draft head that runs on the model's GPU, in the last layer of its cache `kv`. Raises StartupError."""
    model, wanted = executor.model, settings.speculative_config
    if wanted is None or not isinstance(model.ops, DraftOps):
        raise StartupError(f"--speculative-config: eagle3 does not run on {model.ops.device_name}")
    is_dummy, ops = settings.load_format == "dummy", model.ops
    try:
        given = draft.folder, model.config
        stored = dummy_eagle3(*given, ops.dtype) if is_dummy else read_eagle3(*given)
    except ModelError as error:
        raise StartupError(f"--speculative-config: {error}") from None
    head = upload_eagle3(stored, ops, model.weights.embedding, max_model_len)
    sizes = settings.max_num_seqs, max_draft_tokens(wanted, draft)
    return DeviceEagle3Drafter(head, kv, executor.runner, *sizes)


def step_cost(executor: ModelExecutor, max_model_len: int) -> StepCost:
    """Measure the captured steps; without captures, the model."""
    seconds = executor.runner.decode_seconds()
    if seconds:
        return StepCost(range(1, len(seconds) + 1), seconds)
    return measure_step_cost(executor.model, executor.kv, max_model_len)


def measure_step_cost(model: Llama, kv: Array, max_model_len: int) -> StepCost:
    """Time forward passes of short sequences on an empty cache."""
    batches = [
        shared_block_batch(model.ops, _lengths(num_rows, min(MAX_DRAFTS, max_model_len)), kv.shape[4], max_model_len)
        for num_rows in MEASURED_ROWS
    ]
    rounds = [[_seconds(model, kv, batch) for batch in batches] for _ in range(NUM_ROUNDS)]
    return StepCost(MEASURED_ROWS, list(accumulate((min(each) for each in zip(*rounds, strict=True)), max)))


def _seconds(model: Llama, kv: Array, batch: Batch) -> float:
    """Return a forward pass's seconds: this thread's CPU time on a single NumPy rank, else wall time."""
    is_alone = model.ops.name == "numpy" and model.ops.num_ranks == 1
    clock = time.thread_time if is_alone else time.perf_counter
    start_s = clock()
    with model.ops.scratch():
        model.logits(model.hidden(batch, kv), None)
    model.ops.synchronize()
    return clock() - start_s


def _lengths(num_rows: int, longest: int) -> np.ndarray:
    whole, rest = divmod(num_rows, longest)
    return np.array(([rest] if rest else []) + [longest] * whole)
