"""Runs many requests at once until all have ended, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

from tqdm import tqdm

from service.gateway.core.request import GenerationRequest
from service.gateway.core.served_model import ServedModel
from service.offline.engine import OfflineEngine, OpenRequest
from service.offline.generation import Generation
from service.offline.lora import LoRARequest
from service.offline.outputs import RequestOutput

SHOW_EVERY_S = 0.1
"""Minimum interval between redraws of the bar."""

Progress = bool | Callable[..., Any]
"""True: show a bar; or a class like tqdm."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests of one call. The sequences are parallel."""

    requests: Sequence[GenerationRequest]  # one prompt each
    request_ids: Sequence[str]
    texts: Sequence[str | None]  # the prompts' texts, for the outputs
    has_text: Sequence[bool]  # whether outputs have text
    order: Sequence[int]  # indices in start order
    adapters: Sequence[LoRARequest | None]
    model: ServedModel | None = None  # with another chat template


class Finished(NamedTuple):
    output: RequestOutput
    embedding: bytes  # float32[H]


class _Inbox:
    """Queue of requests that have new outputs."""

    def __init__(self) -> None:
        self._ready: SimpleQueue[Sequence[OpenRequest]] = SimpleQueue()

    def put(self, ready: Sequence[OpenRequest]) -> None:
        self._ready.put(ready)

    def get(self) -> Sequence[OpenRequest]:
        return self._ready.get()


def run_all(engine: OfflineEngine, work: Work, progress: Progress) -> list[Finished]:
    """Return the results in request order. An error or Ctrl-C cancels the other requests.

    Raises ValueError for an invalid request, RuntimeError if one failed.
    """
    inbox, bar = _Inbox(), _Bar(len(work.requests), progress)
    running: dict[str, Generation] = {}
    finished: dict[str, Finished] = {}
    try:
        for index in work.order:  # the engine runs the first while others are tokenized
            generation = _start(engine, work, index, inbox)
            running[generation.request_id] = generation
        while running:
            for opened in inbox.get():
                if opened.request_id not in running:
                    continue
                generation = running[opened.request_id]
                output = generation.advance()
                if output is not None:
                    finished[opened.request_id] = Finished(output, generation.embedding)
                    del running[opened.request_id]
                    bar.add(len(output.prompt_token_ids), generation.num_tokens)
    finally:
        bar.close()
        for generation in running.values():
            generation.close()
    return [finished[request_id] for request_id in work.request_ids]


def _start(engine: OfflineEngine, work: Work, index: int, inbox: _Inbox) -> Generation:
    prepared = engine.prepare(work.requests[index], work.request_ids[index], work.adapters[index], work.model)
    return Generation(engine, prepared, inbox, prompt=work.texts[index], has_text=work.has_text[index])


class _Bar:
    def __init__(self, total: int, progress: Progress) -> None:
        make = tqdm if progress is True else progress
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True) if make and total else None
        self._started_s = self._shown_s = monotonic()
        self._num_in = self._num_out = 0

    def add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if self._bar is None:
            return
        self._num_in += num_prompt_tokens
        self._num_out += num_output_tokens
        now_s = monotonic()
        if now_s - self._shown_s > SHOW_EVERY_S:
            self._shown_s = now_s
            self._show_rates(self._bar, now_s)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._show_rates(self._bar, monotonic())
            self._bar.close()

    def _show_rates(self, bar: Any, now_s: float) -> None:
        elapsed_s = max(now_s - self._started_s, 1e-9)
        rates = f"input: {self._num_in / elapsed_s:.1f} tok/s, output: {self._num_out / elapsed_s:.1f} tok/s"
        bar.set_postfix_str(rates, refresh=False)
