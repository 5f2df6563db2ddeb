from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from model.adapter_slots import AdapterSlots
from model.config import ModelConfig
from model.errors import GrammarError, ModelError
from model.families.eagle3_config import Eagle3Config
from model.families.llama import Llama
from model.kv_cache import allocate, allocate_with_draft, allocate_with_head
from model.kv_scales import KvFormat, kv_format
from model.ops.backend import open_group
from model.ops.interface import Ops
from model.presets import PRESETS
from model.rope import short_length
from model.sampling_params import SamplingParams
from model.text.grammar_matcher import GrammarCompiler
from model.text.tokenizer import Tokenizer
from model.weights.loader import PlannedWeights, allocate_model, check_device, plan_weights
from service.config.settings import Settings
from service.engine.adapters import build_adapters, check_adapters, open_slots, slots_bytes
from service.engine.drafting.build import (
    build_drafter,
    build_speculation,
    check_speculation,
    load_device_head,
    load_drafter,
)
from service.engine.drafting.drafter import Drafter
from service.engine.drafting.eagle3 import Eagle3Drafter
from service.engine.drafting.models import LONGEST_STEP, PlannedDraftModel, plan_draft_model
from service.engine.engine import Engine
from service.engine.execution.executor import ModelExecutor, max_decode_rows
from service.engine.grammars import Grammars
from service.engine.kv.kv_manager import KVManager
from service.engine.kv.memory_profile import MemoryPlan, host_memory_bytes, plan_memory
from service.engine.kv.warm_up import WarmUpSizes, run_all_kernels, warm_up, warm_up_products
from service.engine.request import EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.swap_cost import SwapCostModel, measure_rates
from service.errors import EndReason, StartupError
from service.observability.logs import fields

log = logging.getLogger("quire.engine")

DEFAULT_BATCHED_TOKENS = {"cuda": LONGEST_STEP, "numpy": 512}
DEFAULT_SWAP_GIB = {"cuda": 4, "numpy": 0}
SWAP_MEMORY_DIVISOR = 8
"""Default limit of --swap-space: 1/8 of the host's memory."""

MAX_HOST_RATIO = 8
"""Maximum host blocks per GPU block."""

DEFAULT_PREFILL_CHUNK = {"cuda": 512, "numpy": 128}
"""Enough for the best GEMM rate on a GPU."""


@dataclass(frozen=True)
class BuiltEngine:
    engine: Engine
    executor: ModelExecutor
    config: ModelConfig
    ops: Ops
    memory: MemoryPlan
    limits: Limits
    weight_format: str
    kv_format: KvFormat


@dataclass(frozen=True)
class SizedModel:
    executor: ModelExecutor
    memory: MemoryPlan
    weight_format: str
    kv_format: KvFormat
    workspace_bytes: int
    budget: int  # tokens per step
    slots: AdapterSlots | None  # for --enable-lora


def read_model_config(settings: Settings) -> ModelConfig:
    """Read the model's config. Raises StartupError."""
    if settings.model_config is None:
        try:
            return ModelConfig.read(Path(settings.model or ""), settings.config_overrides)
        except ModelError as error:
            raise StartupError(str(error)) from None
    if settings.model_config not in PRESETS:
        raise StartupError(f"--model-config: {settings.model_config!r} is none of {', '.join(sorted(PRESETS))}")
    if settings.hf_overrides is not None:
        raise StartupError("--hf-overrides: --model-config names a whole shape")
    if settings.load_format != "dummy":
        raise StartupError("--model-config names a shape without weights: add --load-format dummy")
    return PRESETS[settings.model_config]


def build_engine(settings: Settings, *, progress: bool) -> BuiltEngine:
    """Load, size, warm up and test the model. Raises StartupError."""
    try:
        return _build_engine(settings, progress=progress)
    except MemoryError as error:  # also on a GPU that another process fills meanwhile
        raise StartupError(f"memory: {error or 'none is left'} (lower --num-gpu-blocks or --swap-space)") from None


def _build_engine(settings: Settings, *, progress: bool) -> BuiltEngine:
    config = read_model_config(settings)
    grammars = Grammars(partial(grammar_compiler, settings, config))
    ops = open_devices(settings, config)
    check_speculation(settings, ops)
    check_adapters(settings)
    draft = plan_draft_model(settings, config, ops)
    sized = size_engine(settings, config, ops, progress=progress, draft=draft)
    executor, memory = sized.executor, sized.memory
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=sized.budget,
        max_prefill_chunk=settings.max_prefill_chunk or DEFAULT_PREFILL_CHUNK[ops.name],
        max_model_len=memory.max_model_len,
        max_decode_rows=executor.max_rows if executor.runs_ahead else None,
        short_rope_len=_short_rope_len(config, memory.max_model_len, draft),
        generates=config.has_head,
        fit_prompts=executor.fit_prompts,
    )
    num_host_blocks = num_swap_blocks(settings, ops, memory)
    drafter = _attach(settings, sized, draft, num_host_blocks, progress=progress)
    kv = KVManager(
        memory.num_blocks,
        memory.block_size,
        block_bytes=memory.block_bytes,
        format_key=sized.kv_format.key,
        prefix_caching=settings.enable_prefix_caching,
        swapping=num_host_blocks > 0,
    )
    preemption = Preemption(
        kv, FairShare(kv, limits.max_num_seqs), calibrate_swap_cost(executor, memory), settings.preemption_mode
    )
    speculation = build_speculation(settings, executor, kv, memory.max_model_len, drafter, draft)
    adapters = None if sized.slots is None else build_adapters(settings, config, ops, executor.write_adapter)
    scheduler = Scheduler(kv, limits, preemption, speculation, None if adapters is None else adapters.slots)
    engine = Engine(executor, scheduler, frozenset(config.eos_token_ids), grammars, adapters)
    _check_generation(engine, limits)
    _log_ready(sized, ops)
    return BuiltEngine(engine, executor, config, ops, memory, limits, sized.weight_format, sized.kv_format)


def _short_rope_len(config: ModelConfig, max_model_len: int, draft: PlannedDraftModel | None) -> int:
    """Return the length limit of short rope rows; 0 with a draft head, whose keys are at the model's positions."""
    has_head = draft is not None and isinstance(draft.config, Eagle3Config)
    return 0 if has_head else short_length(config.ropes, max_model_len)


def _attach(
    settings: Settings,
    sized: SizedModel,
    draft: PlannedDraftModel | None,
    num_host_blocks: int,
    *,
    progress: bool,
) -> Drafter | None:
    """Attach the cache to the executor; return the settings' drafter."""
    executor, memory, model = sized.executor, sized.memory, sized.executor.model
    attach = partial(executor.attach, adapters=sized.slots, num_host_blocks=num_host_blocks, progress=progress)
    if draft is None:
        cache = allocate(model.ops, model.config, memory.num_blocks, memory.block_size)
        attach(cache)
        return build_drafter(settings.speculative_config)
    if model.ops.name == "cuda" and isinstance(draft.config, Eagle3Config):
        cache = allocate_with_head(model.ops, model.config, memory.num_blocks, memory.block_size)
        head = load_device_head(settings, draft, executor, cache, memory.max_model_len)
        attach(cache, head=head)
        return head
    shape = draft.block_shape(memory.block_size)
    blocks, cache, own = allocate_with_draft(model.ops, model.config, memory.num_blocks, memory.block_size, shape)
    drafter = load_drafter(draft, model, own, memory.max_model_len)
    attach(cache, blocks=blocks, head=drafter if isinstance(drafter, Eagle3Drafter) else None)
    return drafter


def open_devices(settings: Settings, config: ModelConfig) -> Ops:
    """Open the settings' devices. Raises StartupError."""
    wanted = settings.device, settings.dtype, config.dtype, settings.kv_cache_dtype
    try:
        return open_group(*wanted, settings.tensor_parallel_size)
    except ModelError as error:
        raise StartupError(str(error)) from None


def size_engine(
    settings: Settings,
    config: ModelConfig,
    ops: Ops,
    *,
    progress: bool,
    draft: PlannedDraftModel | None = None,
) -> SizedModel:
    """Load a model and size its pool: on a GPU after the largest steps, on a CPU before loading, as others use its
    memory. Raises StartupError."""
    wanted_len = wanted_model_len(settings, config)
    planned_format = planned_weights(settings, config, ops)
    weights, weight_format = planned_format.num_bytes, planned_format.label or ops.dtype.name
    free_bytes = ops.memory_bytes()[0]
    reserved_bytes = weights + slots_bytes(settings, config, ops)
    planned = plan_memory(settings, config, ops, wanted_len, reserved_bytes=reserved_bytes, draft=draft)
    slots = open_slots(settings, config, ops)
    budget = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[ops.name]
    verifies_drafts = ops.name == "cuda" and settings.speculative_config is not None
    sizes = WarmUpSizes(
        block_size=settings.block_size,
        num_tokens=budget,
        num_sequences=max_decode_rows(settings.max_num_seqs, verifies_drafts=verifies_drafts),
        max_model_len=wanted_len,
        verifies_drafts=verifies_drafts,
    )
    model = _load(settings, config, ops, sizes, slots, progress=progress)
    eos_token_ids, max_blocks = frozenset(config.eos_token_ids), -(-wanted_len // settings.block_size)
    executor = ModelExecutor(model, eos_token_ids, settings.max_num_seqs, max_blocks, verifies_drafts=verifies_drafts)
    if ops.name != "cuda":
        cache_format = kv_format(model, settings.block_size, wanted_len)
        return SizedModel(executor, planned, weight_format, cache_format, 0, budget, slots)
    warm_up(model.first_layer(), sizes, slots)
    warm_up_products(model, sizes)
    cache_format = kv_format(model, settings.block_size, wanted_len)
    memory = plan_memory(settings, config, ops, wanted_len, draft=draft)
    workspace_bytes = free_bytes - reserved_bytes - ops.memory_bytes()[0]
    return SizedModel(executor, memory, weight_format, cache_format, workspace_bytes, budget, slots)


def _load(
    settings: Settings,
    config: ModelConfig,
    ops: Ops,
    sizes: WarmUpSizes,
    slots: AdapterSlots | None,
    *,
    progress: bool,
) -> Llama:
    """Load a model while its kernels are compiled. Raises StartupError."""
    how = {"load_format": settings.load_format, "quantization": settings.quantization}
    try:
        allocated = allocate_model(model_folder(settings), config, ops, sizes.max_model_len, **how)
        ops.compile_ahead(lambda: run_all_kernels(allocated.first_layer(), sizes, slots))
        return allocated.load(progress=progress)
    except ModelError as error:
        raise StartupError(str(error)) from None


def _log_ready(sized: SizedModel, ops: Ops) -> None:
    memory, kv = sized.memory, sized.kv_format
    log.info(
        "engine ready %s",
        fields(
            device=ops.name,
            ranks=ops.num_ranks,
            dtype=ops.dtype,
            weights=sized.weight_format,
            kv_cache=f"{kv.dtype}, {kv.scales} scales" if kv.scales else kv.dtype,
            num_blocks=memory.num_blocks,
            max_model_len=memory.max_model_len,
        ),
    )


def model_folder(settings: Settings) -> Path | None:
    """Return the weights' folder; None for a shape."""
    return None if settings.model_config is not None or settings.model is None else Path(settings.model)


def planned_weights(settings: Settings, config: ModelConfig, ops: Ops) -> PlannedWeights:
    """Plan the weights. Raises StartupError."""
    try:
        check_device(config, ops)
        return plan_weights(model_folder(settings), config, ops.dtype, settings.quantization, ops.num_ranks)
    except ModelError as error:
        raise StartupError(str(error)) from None


def grammar_compiler(settings: Settings, config: ModelConfig) -> GrammarCompiler:
    """Build the compiler. Raises GrammarError without a tokenizer."""
    if settings.model_config is not None:
        raise GrammarError("A shape alone has no tokens.")
    try:
        tokenizer = Tokenizer.read(Path(settings.model or ""))
    except ModelError as error:
        raise GrammarError("The model has no tokenizer.") from error
    return GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_ids)


def num_swap_blocks(settings: Settings, ops: Ops, memory: MemoryPlan) -> int:
    space_bytes = int((DEFAULT_SWAP_GIB[ops.name] if settings.swap_space is None else settings.swap_space) * (1 << 30))
    if settings.swap_space is None:
        space_bytes = min(space_bytes, host_memory_bytes() // SWAP_MEMORY_DIVISOR)
    return min(space_bytes // memory.block_bytes, MAX_HOST_RATIO * memory.num_blocks)


def calibrate_swap_cost(executor: ModelExecutor, memory: MemoryPlan) -> SwapCostModel | None:
    if executor.host is None:
        return None
    rates = measure_rates(executor.model, executor.kv, executor.host, memory.max_model_len)
    costs = SwapCostModel(rates, memory.block_size)
    crossover = costs.crossover_tokens(memory.max_model_len)
    log.info(
        "swap or recompute %s",
        fields(
            crossover_tokens="never" if crossover is None else crossover,
            prompt_tokens_per_s=round(1 / rates.token_s),
            out_gb_per_s=round(memory.block_bytes / rates.block_out_s / 1e9, 1),
            in_gb_per_s=round(memory.block_bytes / rates.block_in_s / 1e9, 1),
            transfer_us=round(1e6 * rates.transfer_s),
        ),
    )
    return costs


def wanted_model_len(settings: Settings, config: ModelConfig) -> int:
    """Return the longest sequence to serve. Raises StartupError."""
    if settings.max_model_len is None:
        return config.max_position
    if settings.max_model_len > config.max_position:
        raise StartupError(f"--max-model-len: this model ends at {config.max_position} tokens")
    return settings.max_model_len


def _check_generation(engine: Engine, limits: Limits) -> None:
    prompt = (0, 1)[: limits.max_model_len - 1]
    num_tokens = min(2, limits.max_model_len - len(prompt))
    pooling: Literal["last"] | None = None if limits.generates else "last"
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, pooling=pooling)
    engine.add_request(EngineRequest(request_id="canary", prompt=prompt, sampling=params))
    while engine.has_work:
        engine.step()
    last = engine.drain_request_outputs()[-1]
    if last.end is not EndReason.LENGTH:
        raise StartupError(f"the first generation ended with {last.end}: the weights or the device are at fault")
