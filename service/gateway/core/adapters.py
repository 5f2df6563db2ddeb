"""LoRA adapters by name: those in --lora-modules, and those loaded at run time, which all gateways share."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from model.config import ModelConfig
from model.errors import ModelError
from service.config.lora import LoraModule, is_adapter_name
from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.adapter_files import read_record
from service.gateway.core.refusals import refusal, unavailable
from service.gateway.core.served_model import ServedModel
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.records import AdapterRecord

MAX_ADAPTERS = 1024
"""Maximum number of adapters loaded at run time."""


class Adapters:
    def __init__(self, model: ServedModel, queue: GatewayQueue, settings: Settings) -> None:
        self._model = model
        self._store = queue.adapters
        self._settings = settings
        self._loading = asyncio.Lock()

    @property
    def loads_at_run_time(self) -> bool:
        return self._settings.enable_lora and self._settings.lora_dir is not None

    async def find(self, name: str | None) -> AdapterRecord | None:
        """Return the adapter; None: the base model. Raises RequestError (404, 503)."""
        if self._model.is_base(name):
            return None
        record = self._model.adapters.get(name or "")
        if record is None and self.loads_at_run_time and is_adapter_name(name or ""):
            try:
                record = await self._store.get_adapter(name or "")
            except QueueUnavailable:
                raise unavailable() from None
        if record is None:
            self._model.require(name)
        return record

    async def records(self) -> Sequence[AdapterRecord]:
        """Return all adapters. Raises RequestError (503)."""
        own = list(self._model.adapters.values())
        if not self.loads_at_run_time:
            return own
        try:
            loaded = await self._store.list_adapters()
        except QueueUnavailable:
            raise unavailable() from None
        return own + [record for record in loaded if record.name not in self._model.adapters]

    async def loaded_names(self) -> Collection[str]:
        """Return all names, none without run-time loading. Raises RequestError (503)."""
        return {record.name for record in await self.records()} if self.loads_at_run_time else ()

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Check an adapter below --lora-dir and serve it under `name` in every gateway.

        Raises RequestError: 400 for a name in use, a path outside the folder or an unsupported adapter; 503.
        """
        if not is_adapter_name(name):
            raise refusal("lora_name", "must have 1 to 128 characters, none of them blank, ',' or '='")
        async with self._loading:
            taken = {record.name for record in await self.records()}
            if self._model.is_base(name) or name in self._model.adapters:
                raise refusal("lora_name", "is a name of the served model or of --lora-modules")
            if name in taken and not in_place:
                raise _already_loaded(name)
            if len(taken) >= MAX_ADAPTERS and name not in taken:
                raise refusal("lora_name", f"exceeds {MAX_ADAPTERS} adapters (unload one)")
            record = await asyncio.to_thread(self._checked, name, path)
            try:
                is_written = await self._store.put_adapter(record, replaces=in_place)
            except QueueUnavailable:
                raise unavailable() from None
            if not is_written:  # another gateway was faster
                raise _already_loaded(name)

    async def unload(self, name: str) -> None:
        """Stop serving `name`; its open requests continue. Raises RequestError: 400 for --lora-modules, 404, 503."""
        if name in self._model.adapters:
            raise refusal("lora_name", "is one of --lora-modules, which stay until the gateway ends")
        try:
            was_there = await self._store.drop_adapter(name)
        except QueueUnavailable:
            raise unavailable() from None
        if not was_there:
            message = f"The lora adapter '{name}' cannot be found."
            raise RequestError(404, message, param="lora_name", code="model_not_found")

    def _checked(self, name: str, path: str) -> AdapterRecord:
        folder = self._settings.lora_dir
        if folder is None:
            raise AssertionError("adapters are loaded without --lora-dir")
        root = folder.resolve()
        try:
            found = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            found = root.parent
        if not found.is_relative_to(root):
            raise refusal("lora_path", "must be a folder below this server's --lora-dir")
        shown = found.relative_to(root)
        if not found.is_dir():
            message = f"Loading lora {name} failed: No adapter found for {shown}"
            raise RequestError(404, message, param="lora_path", code="adapter_not_found")
        try:
            config = ModelConfig.read(self._settings.model or Path())
            return read_record(LoraModule(name, str(found)), config, self._settings)
        except ModelError as error:
            problem = str(error).replace(f"{root}/", "")
            raise RequestError(400, problem, param="lora_path", code="adapter_not_supported") from None


def _already_loaded(name: str) -> RequestError:
    message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
    return RequestError(400, message + "place, set 'load_inplace' to True.", param="lora_name")
