"""Engine thread: runs commands between steps, never awaits, and alone uses the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.engine.engine import Engine
from service.engine.kv.table_view import TableView
from service.engine.output_processor import EngineOutput
from service.engine.request import EngineRequest
from service.engine.stats import EngineStats
from service.errors import EndReason


@dataclass(frozen=True, slots=True)
class Add:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    reason: EndReason
    branch: int | None = None  # None: all


@dataclass(frozen=True, slots=True)
class Stop:
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Render:
    """Render the blocks now, even while idle."""


STATS_EVERY_S = 0.1
"""Limits the cost of statistics with short steps."""

IDLE_TURN_S = 0.5

RENDER_EVERY_S = 0.9
"""An image takes milliseconds to render; a heartbeat carries one."""

Command = Add | Cancel | Stop | Render


class EngineThread:
    """Runner of the engine. Its thread calls `on_outputs` after steps, `on_turn` (monotonic seconds) between steps, and
    `on_death` with the exception that ended it."""

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[EngineOutput]], None],
        on_death: Callable[[BaseException], None],
        on_turn: Callable[[float], None] = lambda now_s: None,
    ):
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_turn = on_turn
        self._turned_at_s = time.monotonic()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats: EngineStats = engine.stats()
        self._stats_due_s = 0.0
        self._is_watched = False
        self.blocks = self.host_blocks = b""
        self.tables: tuple[TableView, ...] = ()
        self._blocks_due_s = 0.0

    @property
    def num_free_tokens(self) -> int:
        return self._engine.num_free_tokens

    @property
    def silent_s(self) -> float:
        """Seconds since the last turn, i.e. the age of the running step."""
        return time.monotonic() - self._turned_at_s

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    @property
    def in_flight(self) -> frozenset[str]:
        """Requests in the engine. Callable from any thread."""
        return frozenset(sequence.request_id for sequence in self._engine.running)

    def start(self) -> None:
        self._turned_at_s = time.monotonic()
        self._thread.start()

    def set_watched(self, is_watched: bool) -> None:
        """Start or stop rendering. Callable from any thread."""
        self._is_watched = is_watched
        if is_watched:
            self.send(Render())

    def _render(self, now_s: float) -> None:
        if not self._is_watched:
            self.blocks, self.host_blocks, self.tables = b"", b"", ()
        elif now_s > self._blocks_due_s:
            self.blocks, self.host_blocks = self._engine.render_blocks(), self._engine.render_host_blocks()
            self.tables = self._engine.view_tables()
            self._blocks_due_s = now_s + RENDER_EVERY_S

    def send(self, command: Command) -> None:
        """Queue a command to run before the next step. Callable from any thread."""
        self._inbox.put(command)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._engine.step()
                self._report()
        except BaseException as error:
            self._report()
            self._on_death(error)

    def _run_commands(self) -> bool:
        """Run queued commands; without work, wait for one. Return False after Stop."""
        self._turn()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                if self._engine.has_work:
                    return True
                self._engine.check_idle()
                self._stats_due_s = 0.0
                self._report()
                command = self._await_command()
            match command:
                case Render():
                    pass
                case Add(request):
                    self._engine.add_request(request)
                case Cancel(request_id, reason, branch):
                    self._engine.cancel(request_id, reason, branch)
                case Stop(reason):
                    self._engine.cancel_all(reason)
                    self._report()
                    return False

    def _await_command(self) -> Command:
        while True:
            try:
                return self._inbox.get(timeout=IDLE_TURN_S)
            except queue.Empty:
                self._turn()

    def _turn(self) -> None:
        self._turned_at_s = time.monotonic()
        self._on_turn(self._turned_at_s)

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s > self._stats_due_s:
            self.stats, self._stats_due_s = self._engine.stats(), now_s + STATS_EVERY_S
            self._render(now_s)
        outputs = self._engine.drain_outputs()
        if outputs:
            self._on_outputs(outputs)
