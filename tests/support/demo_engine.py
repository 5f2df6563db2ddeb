"""Small engines with the demo model on any backend, and requests that use every sampling parameter."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from model.adapter_slots import AdapterSlots
from model.config import ModelConfig
from model.families.eagle3 import Eagle3Head
from model.families.eagle3_device import DeviceEagle3
from model.families.llama import Llama
from model.kv_cache import allocate, allocate_with_draft, allocate_with_head, block_shape
from model.kv_scales import kv_format
from model.ops.backend import adapter_ops
from model.ops.group.arrays import on_rank
from model.ops.interface import Ops
from model.sampling_params import SamplingParams
from model.text.grammar_matcher import GrammarCompiler
from model.text.tokenizer import Tokenizer
from model.weights.loader import load_model
from model.weights.lora.adapter import LoraAdapter, read_adapter
from service.engine.adapters import Adapters
from service.engine.drafting.draft_model import DraftModelDrafter
from service.engine.drafting.drafter import MAX_DRAFTS, Drafter
from service.engine.drafting.eagle3 import Eagle3Drafter
from service.engine.drafting.eagle3_device import DeviceEagle3Drafter
from service.engine.engine import Engine
from service.engine.execution.executor import ModelExecutor
from service.engine.grammars import Grammars
from service.engine.kv.block_pool import BlockPool
from service.engine.kv.kv_manager import KVManager
from service.engine.request import AdapterSource, EngineRequest
from service.engine.scheduling.adapter_slots import AdapterSlotPool
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.speculation import Speculation
from service.engine.step import TokenLogprob
from tests.fakes.poisoning_executor import PoisoningExecutor

DEMO = Path(__file__).parents[2] / "model" / "demo"
MAX_LEN = 160
TWO_LAYERS = 2
BLOCK_SIZE = 8
MAX_LORA_RANK = 128
NUM_AHEAD = 3
"""Drafts of a head on the device."""

WISHES = (
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 8, "top_k": 20, "logprobs": 3},
    {"temperature": 0.8, "seed": 9, "min_tokens": 12, "logit_bias": ((300, 5.0),)},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.5, "seed": 10, "min_p": 0.1},
    {"temperature": 0.0, "max_tokens": 1},
)

Received = dict[str, tuple[list[int], list[TokenLogprob]]]


@functools.cache
def grammar_compiler() -> GrammarCompiler:
    config = ModelConfig.read(DEMO)
    return GrammarCompiler(Tokenizer.read(DEMO), config.vocab_size, config.eos_token_ids)


class DemoEngines:
    """Engines that share one copy of the model on `ops`, its weights rounded to `quantization`."""

    def __init__(self, ops: Ops, quantization: str = "auto", *, num_layers: int | None = None):
        """Models of TWO_LAYERS take half as long and test an engine's guarantees as well."""
        config = ModelConfig.read(DEMO)
        model = load_model(DEMO, config, ops, MAX_LEN, quantization=quantization)
        layers = model.weights.layers[:num_layers]
        self._config = replace(config, num_layers=len(layers))
        kv_scales = model.weights.kv_scales
        if num_layers is not None and kv_scales is not None:
            kv_scales = kv_scales[:num_layers]
        self.model = Llama(self._config, ops, replace(model.weights, layers=layers, kv_scales=kv_scales))
        self._format_key = kv_format(self.model, BLOCK_SIZE, MAX_LEN).key
        self.eos_token_ids = frozenset(self._config.eos_token_ids)

    def make(
        self,
        num_blocks: int = 200,
        budget: int = 64,
        max_num_seqs: int = 6,
        block_size: int = BLOCK_SIZE,
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
        poisons: bool = False,
        drafter: Drafter | None = None,
        draft: Eagle3Head | DeviceEagle3 | Llama | None = None,
        num_adapter_slots: int = 0,
    ) -> Engine:
        """Build an engine. With `poisons`, blocks hold NaN from when they are freed until they are written. `draft`: a
        head or a smaller model."""
        num_ahead = NUM_AHEAD if isinstance(draft, DeviceEagle3) else 0
        kv = KVManager(
            num_blocks,
            block_size,
            format_key=self._format_key,
            prefix_caching=prefix_caching,
            swapping=num_host_blocks > 0,
        )
        poisoned = kv.pool if poisons else None
        if draft is None:
            executor = self.executor(
                num_blocks, max_num_seqs, block_size, num_host_blocks, poisoned, num_adapter_slots, drafter is not None
            )
        elif isinstance(draft, DeviceEagle3):
            executor = self._executor(max_num_seqs, block_size, poisoned, True)
            cache = allocate_with_head(self.model.ops, self._config, num_blocks + poisons, block_size)
            drafter = DeviceEagle3Drafter(draft, cache, executor.runner, max_num_seqs, num_ahead)
            executor.attach(cache, head=drafter, num_host_blocks=num_host_blocks)
        else:
            is_head, executor = isinstance(draft, Eagle3Head), self._executor(max_num_seqs, block_size, poisoned, True)
            shape = draft.config.block_shape(block_size) if is_head else block_shape(draft.config, block_size)
            sizes = (num_blocks + poisons, block_size)
            blocks, cache, own = allocate_with_draft(self.model.ops, self._config, *sizes, shape)
            drafter = (Eagle3Drafter if is_head else DraftModelDrafter)(draft, on_rank(own, 0))
            head = drafter if is_head else None
            executor.attach(cache, blocks=blocks, head=head, num_host_blocks=num_host_blocks)
        limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=budget,
            max_model_len=MAX_LEN,
            max_decode_rows=executor.max_rows if executor.runs_ahead else None,
        )
        speculation = (
            None
            if drafter is None
            else Speculation(kv, self._config.vocab_size, drafter, num_ahead or MAX_DRAFTS, num_ahead=num_ahead)
        )
        adapters = self._adapters(executor, num_adapter_slots) if num_adapter_slots else None
        grammars = Grammars(grammar_compiler)
        slots = None if adapters is None else adapters.slots
        scheduler = Scheduler(kv, limits, speculation=speculation, adapter_slots=slots)
        return Engine(executor, scheduler, self.eos_token_ids, grammars, adapters)

    def _adapters(self, executor: ModelExecutor, num_slots: int) -> Adapters:
        """Build a loader that keeps one adapter more than the slots hold."""

        def read(source: AdapterSource) -> LoraAdapter:
            return read_adapter(Path(source.path), self._config, self.model.ops.dtype, MAX_LORA_RANK)

        return Adapters(read, executor.write_adapter, AdapterSlotPool(num_slots), num_slots + 1)

    def executor(
        self,
        num_blocks: int,
        max_num_seqs: int,
        block_size: int = BLOCK_SIZE,
        num_host_blocks: int = 0,
        poisoned: BlockPool | None = None,
        num_adapter_slots: int = 0,
        verifies_drafts: bool = False,
    ) -> ModelExecutor:
        """Build an executor with its own cache of zeros, or poisoned."""
        executor = self._executor(max_num_seqs, block_size, poisoned, verifies_drafts)
        cache = allocate(self.model.ops, self._config, num_blocks + (poisoned is not None), block_size)
        slots = None
        if num_adapter_slots:
            ops = self.model.ops
            slots = AdapterSlots(self._config, ops, adapter_ops(ops), num_adapter_slots, MAX_LORA_RANK)
        executor.attach(cache, adapters=slots, num_host_blocks=num_host_blocks)
        return executor

    def _executor(
        self, max_num_seqs: int, block_size: int, poisoned: BlockPool | None, verifies_drafts: bool
    ) -> ModelExecutor:
        sizes = (self.model, self.eos_token_ids, max_num_seqs, MAX_LEN // block_size)
        verifies_drafts = verifies_drafts and self.model.ops.name == "cuda"
        if poisoned is not None:
            return PoisoningExecutor(*sizes, poisoned, verifies_drafts=verifies_drafts)
        return ModelExecutor(*sizes, verifies_drafts=verifies_drafts)

    def each_alone(self) -> dict[str, list[int]]:
        """Return the answer to each of WISHES run alone."""
        received: dict[str, list[int]] = {}
        for number in range(len(WISHES)):
            engine = self.make(num_blocks=40, budget=256, max_num_seqs=1)
            engine.add_request(_request(number, WISHES[number]))
            received |= {name: tokens for name, (tokens, _) in run(engine).items()}
        return received


def run_all(engine: Engine, params=WISHES) -> Received:
    """Add all requests at once and run them to their ends."""
    for number, wish in enumerate(params):
        engine.add_request(_request(number, wish))
    return run(engine)


def run(engine: Engine) -> Received:
    received: Received = {}
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        for output in engine.drain_request_outputs():
            tokens, logprobs = received.setdefault(output.request_id, ([], []))
            for part in output.parts:
                tokens += part.token_ids
                logprobs += part.logprobs
    return received


def _request(number: int, wish: dict) -> EngineRequest:
    prompt = tuple(range(5 + number, 25 + 4 * number))
    return EngineRequest(request_id=str(number), prompt=prompt, sampling=SamplingParams(**{"max_tokens": 24} | wish))
