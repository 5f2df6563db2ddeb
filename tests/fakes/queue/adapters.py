from __future__ import annotations

from collections.abc import Sequence

from service.queue.records import AdapterRecord, pack_adapter, unpack_adapter


class MemoryAdapterStore:
    """Implements AdapterStore."""

    def __init__(self, packed: dict[str, bytes]) -> None:
        self._packed = packed

    async def put_adapter(self, record: AdapterRecord, *, replaces: bool) -> bool:
        if record.name in self._packed and not replaces:
            return False
        self._packed[record.name] = pack_adapter(record)
        return True

    async def get_adapter(self, name: str) -> AdapterRecord | None:
        packed = self._packed.get(name)
        return None if packed is None else unpack_adapter(packed)

    async def list_adapters(self) -> Sequence[AdapterRecord]:
        return [unpack_adapter(self._packed[name]) for name in sorted(self._packed)]

    async def drop_adapter(self, name: str) -> bool:
        return self._packed.pop(name, None) is not None
