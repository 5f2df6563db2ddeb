"""Steps with adapters of experts: `python -m tests.bench.expert_adapters_gpu` takes about 20 s on a GPU.

Captured decodes and prompts of `LAYERS` layers of a model, the base model's and with adapters on every expert, in
microseconds of a layer. Weights and adapters are random or zero; `--cpu` runs a small model, to try the script.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

import tests.support.steps as steps
from model.adapter_slots import NO_SLOT, AdapterSlots
from model.batch import Batch
from model.config import ModelConfig
from model.cuda_graphs import StepGraphs
from model.families.llama import Llama
from model.kv_cache import allocate
from model.ops.backend import open_ops
from model.ops.interface import Array, Ops
from model.presets import PRESETS
from model.weights.loader import load_model
from model.weights.lora.adapter import LoraAdapter
from model.weights.lora.products import STACK_NAMES
from tests.support.expert_models import write_config

LAYERS, NUM_SLOTS, VOCABULARY = 4, 4, 32_000
ROWS, PROMPTS = (1, 2, 8, 16, 64, 256), (512, 2048)
CONTEXT = 100
TURNS, REPEATS = 5, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-config", default="qwen3-30b-a3b")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    flags = parser.parse_args()
    if flags.cpu:
        ops, config = open_ops("cpu", "float32", "bfloat16"), ModelConfig.read(write_config(Path(tempfile.mkdtemp())))
        rows, prompts = (1, 8), (64,)
    else:
        ops, config = open_ops("cuda", "bfloat16", "bfloat16"), replace(PRESETS[flags.model_config], num_layers=LAYERS)
        config, rows, prompts = replace(config, vocab_size=VOCABULARY), ROWS, PROMPTS
    model = load_model(None, config, ops, 2 * max(prompts), load_format="dummy", quantization=flags.quantization)
    slots = AdapterSlots(config, ops, ops, NUM_SLOTS, flags.rank, with_experts=True)
    for slot in range(NUM_SLOTS):
        slots.write(slot, zeros_like(slots, flags.rank)).wait()
    found = [*timed_decodes(model, slots, rows), *timed_prompts(model, slots, prompts)]
    if flags.out is not None:
        flags.out.write_text(json.dumps({"device": ops.device_name, **vars(flags), "us_a_layer": found}, default=str))


def zeros_like(slots: AdapterSlots, rank: int) -> LoraAdapter:
    """Return an adapter of zeros of every product."""
    products = {}
    for layer, matrices in enumerate(slots._layers):
        for product, matrix in matrices.items():
            num_inputs, parts, begin = matrix.a.shape[3], {}, 0
            lead = (len(matrix.a) // NUM_SLOTS,) if product in STACK_NAMES else ()
            for part, end in enumerate(matrix.part_ends):
                shapes = (*lead, rank, num_inputs), (*lead, end - begin, rank)
                parts[part] = tuple(np.zeros(shape, matrix.a.dtype) for shape in shapes)
                begin = end
            products[layer, product] = parts
    return LoraAdapter("", rank, products, 0)


def timed_decodes(model: Llama, slots: AdapterSlots, all_rows: tuple[int, ...]) -> list[dict[str, float | str]]:
    """Time captured decodes with 1 adapter, with NUM_SLOTS in turn, and without one in the step with adapters."""
    ops, most, max_blocks = model.ops, max(all_rows), 2 * CONTEXT // steps.BLOCK_SIZE
    steps.MAX_ROWS, steps.MAX_BLOCKS = most, max_blocks
    kv = zeroed(ops, allocate(ops, model.config, most * max_blocks, steps.BLOCK_SIZE))
    graphs = StepGraphs(model, ops.upload(np.arange(most, dtype=np.int32)), most, max_blocks)
    tune = model.tune
    model.tune = lambda rows, heads: tune(*([each for each in some if each in all_rows] for some in (rows, heads)))
    graphs._begin(kv, slots)
    first_layer, static = model.first_layer(), graphs._adapters
    for rows in sorted(all_rows, reverse=True):
        batch = graphs._batch(rows, 0)
        graphs._replays[rows, 0] = graphs._captured(batch, kv, first_layer)
        adapted = replace(batch, adapters=static.batch(rows))
        graphs._adapter_replays[rows, 0] = graphs._captured(adapted, kv, first_layer)
    found = []
    for rows in all_rows:
        inputs, numbers = steps.step(model, [(CONTEXT, 1)] * rows), np.arange(rows)
        graphs.forward(inputs)
        of_rows = {"base": us_a_layer(model, graphs._replays[rows, 0])}
        choices = {f"{count} adapters": numbers * count // rows for count in (1, NUM_SLOTS)}
        for name, chosen in {**choices, "none of them": np.full(rows, NO_SLOT)}.items():
            graphs.forward(replace(inputs, adapter_slots=chosen.astype(np.int32)))
            of_rows[name] = us_a_layer(model, graphs._adapter_replays[rows, 0])
        found.append({"step": f"decode of {rows}", **of_rows})
        print(found[-1], flush=True)
    return found


def timed_prompts(model: Llama, slots: AdapterSlots, lengths: tuple[int, ...]) -> list[dict[str, float | str]]:
    """Time prompts of one sequence, not captured."""
    ops, found = model.ops, []
    for length in lengths:
        steps.MAX_ROWS, steps.MAX_BLOCKS = 2, length // steps.BLOCK_SIZE
        kv = zeroed(ops, allocate(ops, model.config, steps.MAX_ROWS * steps.MAX_BLOCKS, steps.BLOCK_SIZE))
        inputs, tile_rows = steps.step(model, [(0, length)]), ops.lora_tile_rows(length)
        chosen = slots.batch(ops.upload_all(slots.host_rows(np.zeros(length, np.int32), tile_rows)), tile_rows)
        hosts = inputs.token_ids, inputs.positions, inputs.slots, inputs.block_tables(np.arange(0), steps.BLOCK_SIZE)
        ends = inputs.context_lens, np.array([0, length], np.int32), np.array([length - 1], np.int32)
        batch = Batch(*map(ops.upload, (*hosts, *ends)), 0, length, 1, length)
        of_prompt = {
            name: us_a_layer(model, forward_of(model, replace(batch, adapters=adapters), kv), REPEATS // 4)
            for name, adapters in (("base", None), ("1 adapters", chosen))
        }
        found.append({"step": f"prompt of {length}", **of_prompt})
        print(found[-1], flush=True)
    return found


def forward_of(model: Llama, batch: Batch, kv: Array) -> Callable[[], None]:
    def forward() -> None:
        with model.ops.scratch():
            model.forward(batch, kv)

    return forward


def us_a_layer(model: Llama, work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Return the median of TURNS, the head included."""
    ops, times = model.ops, []
    work()
    for _ in range(TURNS):
        begin = ops.record_event()
        for _ in range(repeats):
            work()
        times.append((begin, ops.record_event()))
    return round(median(ops.elapsed_s(*pair) for pair in times) / repeats / model.config.num_layers * 1e6, 1)


def zeroed(ops: Ops, array: Array) -> Array:
    if isinstance(array, np.ndarray):
        array[...] = 0
    else:
        array.data.memset_async(0, array.nbytes, ops.stream)
    return array


if __name__ == "__main__":
    main()
