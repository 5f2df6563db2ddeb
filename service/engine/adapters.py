from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from model.adapter_slots import AdapterSlots, slot_bytes
from model.config import ModelConfig
from model.errors import ModelError
from model.ops.adapter_interface import AsyncWrite
from model.ops.backend import adapter_ops
from model.ops.interface import Ops
from model.weights.lora.adapter import LoraAdapter, read_adapter
from service.config.settings import Settings
from service.engine.adapter_reading.process import AdapterProcess
from service.engine.request import AdapterSource
from service.engine.scheduling.adapter_slots import AdapterSlotPool
from service.engine.sequence import SequenceGroup
from service.errors import StartupError
from service.observability.logs import fields

log = logging.getLogger("quire.engine")


class WriteAdapter(Protocol):
    """`ModelExecutor.write_adapter`."""

    def __call__(self, slot: int, adapter: LoraAdapter, *, is_unused: bool = False) -> AsyncWrite: ...


class Adapters:
    """Loader of adapters: from disk to host memory on a thread, then to the device while steps run.

    Adapters of open requests and the last `num_kept` stay in host memory.
    """

    def __init__(
        self,
        read: Callable[[AdapterSource], LoraAdapter],
        write: WriteAdapter,
        slots: AdapterSlotPool,
        num_kept: int,
    ):
        """`read` runs on the thread and may raise ModelError, which fails the adapter's requests."""
        self.slots = slots
        self._read = read
        self._write = write
        self._writes: dict[int, AsyncWrite] = {}  # by slot
        self._num_kept = num_kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._kept: OrderedDict[str, LoraAdapter] = OrderedDict()  # by digest, least recently used first
        self._loading: dict[str, Future[LoraAdapter]] = {}
        self._waiting: dict[SequenceGroup, AdapterSource] = {}

    @property
    def is_loading(self) -> bool:
        return bool(self._loading or self._writes)

    def start_loading(self, group: SequenceGroup, source: AdapterSource) -> None:
        """Load the group's adapter; it is ready at once if it is in host memory."""
        adapter = self._kept.get(source.digest)
        if adapter is not None:
            self._kept.move_to_end(source.digest)
            group.adapter = adapter
            return
        group.is_loaded = False
        self._waiting[group] = source
        if source.digest not in self._loading:
            self._loading[source.digest] = self._thread.submit(self._checked, source)

    def drain_loaded(self) -> list[tuple[SequenceGroup, bool]]:
        """Return groups whose adapter was newly read, and whether each has it."""
        done = {digest: future for digest, future in self._loading.items() if future.done()}
        if not done:
            return []
        adapters = {digest: self._result(digest, future) for digest, future in done.items()}
        found = []
        for group, source in list(self._waiting.items()):
            if source.digest in adapters:
                del self._waiting[group]
                group.adapter, group.is_loaded = adapters[source.digest], True
                found.append((group, group.adapter is not None))
        for digest in done:
            del self._loading[digest]
        return found

    def start_writes(self) -> None:
        for slot, adapter, is_unused in self.slots.drain_loads():
            self._writes[slot] = self._write(slot, adapter, is_unused=is_unused)

    def finish_writes(self) -> None:
        """Let groups run whose slots are written."""
        for slot in [slot for slot, write in self._writes.items() if write.is_done()]:
            del self._writes[slot]
            self.slots.finish_load(slot)

    def wait(self, timeout_s: float) -> None:
        """Wait for a write, or up to `timeout_s` for a file."""
        if self._writes:
            next(iter(self._writes.values())).wait()
        else:
            wait(self._loading.values(), timeout_s, FIRST_COMPLETED)

    def _checked(self, source: AdapterSource) -> LoraAdapter:
        adapter = self._read(source)
        if adapter.digest != source.digest:
            raise ModelError(f"{source.path}: changed since adapter {source.name} was registered")
        return adapter

    def _result(self, digest: str, future: Future[LoraAdapter]) -> LoraAdapter | None:
        try:
            adapter = future.result()
        except ModelError as error:
            log.error("adapter not loaded %s", fields(error=error))
            return None
        self._kept[digest] = adapter
        while len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
        return adapter


def check_adapters(settings: Settings) -> None:
    """Raise StartupError for limits that contradict each other."""
    if not settings.enable_lora:
        return
    if settings.max_cpu_loras is not None and settings.max_cpu_loras < settings.max_loras:
        raise StartupError(f"--max-cpu-loras: {settings.max_cpu_loras} is below --max-loras ({settings.max_loras})")


def open_slots(settings: Settings, config: ModelConfig, ops: Ops) -> AdapterSlots | None:
    """Allocate --max-loras slots; None without --enable-lora."""
    products = adapter_ops(ops) if settings.enable_lora else None
    if products is None:
        return None
    rank, with_experts = settings.max_lora_rank, settings.lora_experts
    return AdapterSlots(config, ops, products, settings.max_loras, rank, with_experts=with_experts)


def slots_bytes(settings: Settings, config: ModelConfig, ops: Ops) -> int:
    if not settings.enable_lora:
        return 0
    rank, with_experts = settings.max_lora_rank, settings.lora_experts
    return settings.max_loras * slot_bytes(config, ops.dtype, rank, ops.num_ranks, with_experts=with_experts)


def build_adapters(settings: Settings, config: ModelConfig, ops: Ops, write: WriteAdapter) -> Adapters:
    """Build the loader. On a GPU, another process reads, as steps need this interpreter."""
    rank, with_experts = settings.max_lora_rank, settings.lora_experts
    process = None
    products = adapter_ops(ops)
    if ops.name == "cuda" and products is not None:
        process = AdapterProcess(config, ops.dtype, rank, products.pin, with_experts=with_experts)

    def read(source: AdapterSource) -> LoraAdapter:
        if process is not None:
            return process.read(Path(source.path))
        return read_adapter(Path(source.path), config, ops.dtype, rank, with_experts=with_experts)

    return Adapters(read, write, AdapterSlotPool(settings.max_loras), settings.max_cpu_loras or settings.max_loras)
