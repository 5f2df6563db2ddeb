"""`AsyncLLM`: streams outputs per request, with vLLM's names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from service.config.settings import Settings
from service.gateway.core.request import GenerationRequest
from service.offline.engine import OfflineEngine, OpenRequest, PreparedRequest
from service.offline.generation import Generation
from service.offline.lora import LoRARequest
from service.offline.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from service.offline.prompts import Prompt, text_of, with_prompt
from service.offline.sampling_params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    default_sampling_params,
    each_params,
)
from service.offline.settings import read_keywords
from service.offline.tokenizer import LLMTokenizer
from service.offline.vllm_names import VllmNames, named


class _LoopInbox:
    """Wakes the tasks of one event loop, once per step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.arrived: dict[str, asyncio.Event] = {}  # by request

    def put(self, ready: Sequence[OpenRequest]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            self.loop.call_soon_threadsafe(self._wake, ready)

    def _wake(self, ready: Sequence[OpenRequest]) -> None:
        for opened in ready:
            if opened.request_id in self.arrived:
                self.arrived[opened.request_id].set()


class AsyncLLM(VllmNames):
    """A model in this process, for one event loop at a time. A context manager, plain or async."""

    def __init__(self, model: str | os.PathLike[str] | None = None, *, seed: int | None = 0, **keywords: Any) -> None:
        """Block until the model is ready. Takes the arguments of `LLM`. Raises ValueError."""
        self.settings: Settings = read_keywords({"model": model, **keywords})
        self._engine = OfflineEngine(self.settings, seed)
        self._inbox: _LoopInbox | None = None
        self._aborted: set[str] = set()
        self._finalizer = weakref.finalize(self, self._engine.shut_down)

    @named
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs according to `sampling_params.output_kind`; leaving early cancels the request.

        Raises ValueError for an invalid prompt or adapter or a `request_id` in use, RuntimeError if the engine fails.
        """
        if priority:
            raise ValueError("'priority' is not supported (0)")
        given = await self.get_default_sampling_params() if sampling_params is None else sampling_params
        (params,) = each_params(given, SamplingParams, "sampling_params", 1)
        request = with_prompt(params.request(), prompt)
        prepared = await self._prepared(request, request_id, lora_request)
        opened = self._opened(prepared, text_of(prompt), params.output_kind, has_text=params.detokenize)
        async with contextlib.aclosing(opened) as outputs:
            async for output, _ in outputs:
                yield output

    @named
    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the prompt's pooled hidden states, once. Raises like `generate`."""
        given = PoolingParams() if pooling_params is None else pooling_params
        (params,) = each_params(given, PoolingParams, "pooling_params", 1)
        request = with_prompt(params.request(), prompt)
        prepared = await self._prepared(request, request_id, lora_request)
        opened = self._opened(prepared, None, RequestOutputKind.FINAL_ONLY)
        async with contextlib.aclosing(opened) as outputs:
            async for output, generation in outputs:
                data = PoolingOutput(np.frombuffer(generation.embedding, np.float32))
                yield PoolingRequestOutput(output.request_id, data, output.prompt_token_ids)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests, whose iterations stop. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            arrived = None if self._inbox is None else self._inbox.arrived.get(one)
            if arrived is not None:
                self._aborted.add(one)
                arrived.set()

    async def reset_prefix_cache(self) -> bool:
        """Like `LLM.reset_prefix_cache`."""
        return self._engine.reset_prefix_cache()

    async def get_tokenizer(self) -> LLMTokenizer:
        return LLMTokenizer(self._engine.model)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters recommended in the model's folder."""
        return default_sampling_params(self._engine.model.defaults)

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine has ended."""
        self._engine.check()

    def shutdown(self) -> None:
        """End open requests and the engine's thread."""
        self._finalizer()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _prepared(self, request: GenerationRequest, request_id: str, lora: LoRARequest | None) -> PreparedRequest:
        request_id = request_id or self._engine.new_id()
        return await asyncio.to_thread(self._engine.prepare, request, request_id, lora)

    async def _opened(
        self, prepared: PreparedRequest, text: str | None, kind: RequestOutputKind, *, has_text: bool = True
    ) -> AsyncGenerator[tuple[RequestOutput, Generation], None]:
        request_id = prepared.engine_request.request_id
        inbox = self._own_inbox()
        generation = Generation(self._engine, prepared, inbox, prompt=text, kind=kind, has_text=has_text)
        arrived = inbox.arrived[request_id] = asyncio.Event()
        try:
            while not generation.is_finished:
                await arrived.wait()
                arrived.clear()
                if request_id in self._aborted:
                    return
                output = generation.advance()
                if output is not None:
                    yield output, generation
                if self._engine.is_dead:  # its death may have shared a wake-up with the last outputs
                    arrived.set()
        finally:
            self._aborted.discard(request_id)
            del inbox.arrived[request_id]
            generation.close()

    def _own_inbox(self) -> _LoopInbox:
        loop = asyncio.get_running_loop()
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = _LoopInbox(loop)
        return self._inbox
