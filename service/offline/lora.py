"""`LoRARequest`: a prompt's adapter, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from model.config import ModelConfig
from model.errors import ModelError
from service.config.lora import LoraModule
from service.config.settings import Settings
from service.engine.request import AdapterSource
from service.gateway.core.adapter_files import read_record


@dataclass(frozen=True)
class LoRARequest:
    """An adapter in PEFT's format. The engine identifies adapters by content, not by name or id.

    Raises ValueError that names the invalid value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""  # folder
    base_model_name: str | None = None  # not checked
    load_inplace: bool = False  # reread the folder

    def __post_init__(self) -> None:
        if not self.lora_name or not isinstance(self.lora_name, str):
            raise ValueError("'lora_name' must be a text, and not empty")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"'lora_int_id' must be at least 1, not {self.lora_int_id!r}")
        if not self.lora_path:
            raise ValueError("'lora_path' must be a folder")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one per prompt."""


def each_adapter(given: LoRARequests, num_prompts: int) -> Sequence[LoRARequest | None]:
    """Return one adapter per prompt. Raises ValueError."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(one, LoRARequest | None) for one in given):
        raise ValueError("'lora_request' must be a LoRARequest, or a list of them")
    if len(given) != num_prompts:
        raise ValueError(f"'lora_request': {len(given)} for {num_prompts} prompts (one, or one per prompt)")
    return given


class AdapterFiles:
    """Checks adapters before requests may use them, each folder once. Thread-safe."""

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._lock = Lock()
        self._digests: dict[str, str] = {}  # by folder

    def source(self, request: LoRARequest) -> AdapterSource:
        """Check an adapter. Raises ValueError if it is not supported."""
        if not self._settings.enable_lora:
            raise ValueError("'lora_request': adapters are off (enable_lora=True)")
        path = str(Path(request.lora_path).expanduser().absolute())
        with self._lock:
            if request.load_inplace or path not in self._digests:
                self._digests[path] = self._digest(request.lora_name, path)
            return AdapterSource(name=request.lora_name, path=path, digest=self._digests[path])

    def _digest(self, name: str, path: str) -> str:
        try:
            return read_record(LoraModule(name, path), self._config, self._settings).digest
        except ModelError as error:
            raise ValueError(f"'lora_request': {error}") from None
