"""Writes a file to the queue in pieces; it is never whole in memory."""

from __future__ import annotations

import secrets
from contextlib import suppress

from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.records import PIECE_BYTES, StorageFull, StorageLimits, StoredFile


class FileWriter:
    """A tenant's new file. Drop it unless finished; the queue expires it anyway.

    Space is reserved in advance, so that of files which do not all fit, some are written whole instead of each in part.
    """

    def __init__(self, queue: GatewayQueue, tenant: str, limits: StorageLimits) -> None:
        self.file_id = f"file-{secrets.token_hex(16)}"
        self.num_bytes = 0
        self._queue = queue
        self._tenant = tenant
        self._limits = limits
        self._reserved_bytes = 0
        self._num_pieces = 0
        self._rest = bytearray()

    async def reserve(self, num_bytes: int) -> None:
        """Reserve space for the file. Raises StorageFull, QueueUnavailable."""
        await self._queue.batches.reserve_file(self.file_id, self._tenant, num_bytes, self._limits)
        self._reserved_bytes = num_bytes

    async def write(self, data: bytes) -> None:
        """Append `data`. Raises StorageFull, QueueUnavailable."""
        self._rest += data
        while len(self._rest) >= PIECE_BYTES:
            piece = bytes(self._rest[:PIECE_BYTES])
            del self._rest[:PIECE_BYTES]
            await self._append(piece)

    async def finish(self, filename: str, purpose: str) -> StoredFile:
        """Store the file. Raises StorageFull, QueueUnavailable."""
        if self._rest:
            await self._append(bytes(self._rest))
        file = StoredFile(
            file_id=self.file_id,
            tenant=self._tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_s=await self._queue.now_s(),
        )
        await self._queue.batches.put_file(file)
        return file

    async def drop(self) -> None:
        """Delete the file. Raises QueueUnavailable."""
        await self._queue.batches.drop_file(self.file_id, self._tenant)

    async def _append(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        self._num_pieces += 1
        if self.num_bytes > self._reserved_bytes:
            with suppress(StorageFull):  # then piece by piece, while there is space
                await self.reserve(2 * self.num_bytes)
        is_reserved = self.num_bytes <= self._reserved_bytes
        found = await self._queue.batches.append_file(
            self.file_id, self._tenant, piece, self._limits, is_reserved=is_reserved
        )
        if found != self._num_pieces:
            raise QueueUnavailable("the queue has lost what was written of a file")
