"""`quire check`: reports what fits, and the block pool that `quire serve` would allocate. Reads only weight headers."""

from __future__ import annotations

import argparse
from dataclasses import replace

from model.config import ModelConfig
from model.errors import ModelError
from model.kv_scales import cache_dtype_name
from model.ops.interface import Ops
from model.weights.checkpoint import Checkpoint
from model.weights.loader import plan_weights
from model.weights.sharding import SIZES
from service.bench.flag_values import whole_number
from service.cli.table import print_table
from service.config.settings import Settings
from service.engine.adapters import check_adapters, slots_bytes
from service.engine.build import (
    model_folder,
    num_swap_blocks,
    open_devices,
    planned_weights,
    read_model_config,
    size_engine,
    wanted_model_len,
)
from service.engine.drafting.build import check_speculation
from service.engine.drafting.models import plan_draft_model
from service.engine.kv.memory_profile import MemoryPlan, plan_memory
from service.errors import StartupError
from service.gateway.core.served_model import ServedModel

MIB, GIB = 1 << 20, 1 << 30
LENGTHS = (512, 2048, 8192, 32768, 131072)

Rows = list[tuple[str, str]]


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--length",
        metavar="N",
        help="one more length, in tokens, to report (default: none)",
    )


def run_check(settings: Settings, flags: argparse.Namespace) -> int:
    """Return 0 if the model fits, else 1. On a GPU, run the largest steps to measure the workspace."""
    length = None if flags.length is None else whole_number("--length", flags.length)
    config = read_model_config(settings)
    wanted_len = wanted_model_len(settings, config)
    _check_files(settings, config)
    ops = open_devices(settings, config)
    check_speculation(settings, ops)
    check_adapters(settings)
    draft = plan_draft_model(settings, config, ops)
    each = "" if ops.num_ranks == 1 else " on each rank"
    weights = planned_weights(settings, config, ops)
    rows: Rows = [
        ("model", f"{config.family}, {_parameters(config)}, {ops.dtype} on {ops.device_name}"),
        ("free memory", _size(ops.memory_bytes()[0]) + each),
        ("weights", _size(weights.num_bytes) + each + (f", {weights.label}" if weights.label else "")),
        ("weights by ranks", _by_ranks(settings, config, ops)),
    ]
    if (experts := config.experts) is not None:
        used = _size(weights.expert_bytes * experts.num_used // experts.num_experts)
        of_all = f"{experts.num_experts} in {sum(experts.layers)} layers, {_size(weights.expert_bytes)} of the weights"
        rows.append(("experts", f"{of_all}; {experts.num_used} for a token, {used}{each}"))
    slots = slots_bytes(settings, config, ops)
    if slots:
        count = f"{settings.max_loras} slots of rank {settings.max_lora_rank}"
        of_experts = " for experts too" if settings.lora_experts and config.experts is not None else ""
        rows.append(("adapters", f"{count}{of_experts}, {_size(slots)}{each}"))
    if draft is not None:
        rows.append(("drafts", f"{_size(draft.num_bytes)}, {draft.folder.name}"))
    try:
        if ops.name == "cuda":
            dummy = replace(settings, load_format="dummy")
            sized = size_engine(dummy, config, ops, progress=True, draft=draft)
            memory = sized.memory
            rows.append(("a step's workspace", _size(sized.workspace_bytes)))
        else:
            reserved_bytes = weights.num_bytes + slots
            memory = plan_memory(settings, config, ops, wanted_len, reserved_bytes=reserved_bytes, draft=draft)
    except StartupError as reason:
        print_table([*rows, ("does not fit", str(reason))])
        return 1
    print_table([*rows, *_cache(settings, ops, memory), *_concurrency(memory, settings.max_num_seqs, length)])
    return 0


def _check_files(settings: Settings, config: ModelConfig) -> None:
    """Open the files that `quire serve` reads, unless weights are random. Raises StartupError that names the file."""
    folder = model_folder(settings)
    if folder is None or settings.load_format == "dummy":
        return
    try:
        Checkpoint.open(folder, config)
    except ModelError as error:
        raise StartupError(str(error)) from None
    ServedModel.read(settings)


def _by_ranks(settings: Settings, config: ModelConfig, ops: Ops) -> str:
    """Return the bytes per rank, for each number of ranks that divides the model."""
    free_bytes, sizes = ops.memory_bytes()[0], []
    for num_ranks in SIZES:
        try:
            planned = plan_weights(model_folder(settings), config, ops.dtype, settings.quantization, num_ranks)
        except ModelError:
            continue
        own_bytes = free_bytes * ops.num_ranks // num_ranks if ops.name == "numpy" else free_bytes
        sizes.append(
            f"{num_ranks}: {_size(planned.num_bytes)}" + ("" if planned.num_bytes < own_bytes else " (too large)")
        )
    return ", ".join(sizes)


def _cache(settings: Settings, ops: Ops, memory: MemoryPlan) -> Rows:
    num_host_blocks, num_tokens = num_swap_blocks(settings, ops, memory), memory.num_blocks * memory.block_size
    size, block = _size(memory.num_blocks * memory.block_bytes), f"{memory.block_bytes} bytes each"
    if memory.num_ranks > 1:
        size += f" ({_size(memory.num_blocks * memory.block_bytes // memory.num_ranks)} on each rank)"
        block += f" ({memory.block_bytes // memory.num_ranks} on each rank)"
    rows = [
        ("KV cache", f"{size}, {num_tokens} tokens in {cache_dtype_name(ops)}"),
        ("blocks", f"{memory.num_blocks} of {memory.block_size} tokens, {block}"),
        ("longest sequence", f"{memory.max_model_len} tokens"),
    ]
    if num_host_blocks:
        rows.append(("blocks on the host", f"{num_host_blocks}, {_size(num_host_blocks * memory.block_bytes)}"))
    return rows


def _concurrency(memory: MemoryPlan, max_num_seqs: int, length: int | None) -> Rows:
    lengths = sorted({each for each in LENGTHS if each <= memory.max_model_len} | ({length} if length else set()))
    fitting = [
        memory.num_blocks // -(-each // memory.block_size) if each <= memory.max_model_len else 0 for each in lengths
    ]
    counts = [min(count, max_num_seqs) for count in fitting]
    return [
        (f"{each} tokens each", f"{count} sequence{'' if count == 1 else 's'} at once")
        for each, count in zip(lengths, counts, strict=True)
    ]


def _parameters(config: ModelConfig) -> str:
    total, active = config.num_parameters / 1e9, config.num_active_parameters / 1e9
    return f"{total:.3g} B parameters" + ("" if config.experts is None else f" ({active:.3g} B active)")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
