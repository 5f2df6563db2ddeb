"""The engine's own thread: obeys commands between steps, never awaits, and is the only one to touch the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.engine.engine import Engine
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
    branch: int | None = None  # only this one


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything that is left with this reason, then the thread."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class Show:
    """Somebody looks at the blocks: an idle engine draws them too."""


STATS_EVERY_S = 0.1
"""Statistics are for people: a step need not pay for them."""

IDLE_TURN_S = 0.5
"""How often a thread without work shows that it would do some."""

DRAW_EVERY_S = 0.9
"""A picture of the blocks costs milliseconds, and a heartbeat carries one."""

Command = Add | Cancel | Stop | Show


class EngineThread:
    """`deliver` gets each step's outputs, `on_death` the exception that ended the thread, `on_turn` the monotonic time
    between two steps; all on this thread."""

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
        self._is_looked_at = False
        self.blocks = self.host_blocks = b""
        self._blocks_due_s = 0.0

    @property
    def num_free_tokens(self) -> int:
        """Tokens for which the engine has blocks, up to date."""
        return self._engine.num_free_tokens

    @property
    def silent_s(self) -> float:
        """Seconds since the thread last came round: those of the step under way, growing for ever if it hangs."""
        return time.monotonic() - self._turned_at_s

    @property
    def ident(self) -> int | None:
        """The thread's, as Python numbers threads."""
        return self._thread.ident

    @property
    def in_flight(self) -> frozenset[str]:
        """Requests that the engine runs: who is to be asked when it has died. Callable from any thread."""
        return frozenset(sequence.request_id for sequence in self._engine.running)

    def start(self) -> None:
        self._turned_at_s = time.monotonic()
        self._thread.start()

    def show(self, is_looked_at: bool) -> None:
        """Keep `blocks` and `host_blocks` fresh from now on, or no longer. Callable from any thread."""
        self._is_looked_at = is_looked_at
        if is_looked_at:
            self.send(Show())

    def _draw(self, now_s: float) -> None:
        if not self._is_looked_at:
            self.blocks = self.host_blocks = b""
        elif now_s > self._blocks_due_s:
            self.blocks, self.host_blocks = self._engine.render_blocks(), self._engine.render_host_blocks()
            self._blocks_due_s = now_s + DRAW_EVERY_S

    def send(self, command: Command) -> None:
        """Obeyed before the next step, in the order sent. Callable from any thread."""
        self._inbox.put(command)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._obey():
                self._engine.step()
                self._report()
        except BaseException as error:
            self._report()
            self._on_death(error)

    def _obey(self) -> bool:
        """Carry out all commands at hand, waiting for one while there is no work. False once told to stop."""
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
                case Show():
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
            self._draw(now_s)
        outputs = self._engine.drain_outputs()
        if outputs:
            self._on_outputs(outputs)
