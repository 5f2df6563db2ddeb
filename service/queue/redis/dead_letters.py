from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from service.queue import keys
from service.queue.codec import decode, encode
from service.queue.interface import SUSPECT_AFTER_DEATHS
from service.queue.messages import DeadLetter, Job
from service.queue.redis.link import RedisLink
from service.queue.redis.script_args import bound_args, deadline_arg, new_state


class RedisDeadLetters:
    """Reader of dead letters, which it can requeue. Raises QueueUnavailable."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def letters(self) -> Sequence[DeadLetter]:
        """Return letters, newest first."""
        return [letter for _, letter in await self._entries()]

    async def find(self, job_id: str) -> DeadLetter | None:
        return next((letter for letter in await self.letters() if letter.job_id == job_id), None)

    async def requeue(self, job_id: str) -> str | None:
        """Submit a copy that runs alone, without deadline, and drop the letter; return the copy's id, if any."""
        found = next(((entry, letter) for entry, letter in await self._entries() if letter.job_id == job_id), None)
        if found is None:
            return None
        entry_id, letter = found
        now_s = await self._link.now_s()
        job = replace(
            decode(Job, letter.job), job_id=f"again-{secrets.token_hex(8)}", submitted_at_s=now_s, deadline_s=None
        )
        state = new_state(job, deaths=SUSPECT_AFTER_DEATHS)
        args = [secrets.token_hex(8), job.job_id, encode(job), state, deadline_arg(job), *bound_args()]
        await self._link.script("submit", [keys.cancel(job.job_id)], args)
        async with self._link.commands() as redis:
            await redis.xdel(keys.DEAD, entry_id)
        return job.job_id

    async def _entries(self) -> list[tuple[str, DeadLetter]]:
        async with self._link.commands() as redis:
            entries = await redis.xrevrange(keys.DEAD)
        return [(entry_id.decode(), decode(DeadLetter, entry.get(keys.PAYLOAD, b""))) for entry_id, entry in entries]
