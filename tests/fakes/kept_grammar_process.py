"""Grammar processes reused by the gateways of tests: starting two takes longer than most tests."""

from __future__ import annotations

import atexit
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from service.gateway.grammars.messages import Reply
from service.gateway.grammars.process import GrammarProcess

_idle: defaultdict[bytes, list[GrammarProcess]] = defaultdict(list)  # by hello
MAX_IDLE = 4


@contextmanager
def kept_grammar_processes() -> Iterator[None]:
    """While inside, gateways reuse the grammar processes of earlier ones."""
    with patch("service.gateway.grammars.pool.GrammarProcess", KeptGrammarProcess):
        yield


@atexit.register
def _end_idle() -> None:
    for process in [process for idle in _idle.values() for process in idle]:
        process.kill()
        process._process.wait()  # without `end`: threads no longer start here
        process._link.close()


class KeptGrammarProcess:
    """A real GrammarProcess, which the pool's stop returns for the next pool with the same tokens; after a failed
    request it is ended."""

    def __init__(self) -> None:
        self._hello = b""
        self._process: GrammarProcess | None = None
        self._is_sound = True

    @property
    def pid(self) -> int:
        return self._started().pid

    def cpu_s(self) -> float:
        return self._started().cpu_s()

    async def ask(self, frame: bytes) -> Reply:
        if self._process is None and _idle[frame]:
            self._hello, self._process = frame, _idle[frame].pop()
            return Reply()
        self._hello = self._hello or frame
        self._process = self._process or GrammarProcess()
        self._is_sound = False
        reply = await self._process.ask(frame)
        self._is_sound = not reply.is_spent
        return reply

    def kill(self) -> None:
        if not self._is_sound:
            self._started().kill()

    async def end(self) -> int:
        if self._is_sound and self._process is not None and len(_idle[self._hello]) < MAX_IDLE:
            _idle[self._hello].append(self._process)
            return 0
        self._started().kill()
        return await self._started().end()

    def _started(self) -> GrammarProcess:
        assert self._process is not None
        return self._process
