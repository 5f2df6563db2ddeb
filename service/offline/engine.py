"""The engine thread of an LLM, its text processing and its open requests."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Protocol

from model.errors import GrammarError
from model.text.grammar_compiler import TextCompiler
from model.text.grammar_task import GrammarTask, write_grammar
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.output_processor import BranchOutput, EngineOutput, NewTokens, RequestOutput
from service.engine.request import EngineRequest
from service.errors import EndReason, RequestError, StartupError
from service.gateway.core.accepted_request import seed_of
from service.gateway.core.prompt_reader import PromptReader
from service.gateway.core.refusals import grammar_refusal
from service.gateway.core.request import GenerationRequest
from service.gateway.core.sampling_resolver import SamplingResolver
from service.gateway.core.served_model import ServedModel
from service.gateway.grammars.pool import PackedTask
from service.offline.lora import AdapterFiles, LoRARequest
from service.offline.settings import in_keywords
from service.worker.engine_thread import Add, Cancel, EngineThread, Stop

MAX_GRAMMARS = 256
JOIN_S = 30.0
NO_HEAD = "this model has no head: it only embeds (LLM.embed)"


@dataclass(frozen=True)
class PreparedRequest:
    request: GenerationRequest
    engine_request: EngineRequest
    lora: LoRARequest | None


class Mailbox(Protocol):
    def put(self, ready: Sequence[OpenRequest]) -> None:
        """Take requests that have new outputs; called on the engine thread."""


class OpenRequest:
    """A request in the engine. The engine thread fills it; one other thread drains it."""

    def __init__(self, request: EngineRequest, mailbox: Mailbox, *, streams: bool) -> None:
        """Without `streams`, the mailbox gets the request only at its end."""
        self.request_id = request.request_id
        self.mailbox = mailbox
        self.streams = streams
        self.arrived: deque[tuple[int, int] | RequestOutput] = deque()  # (branch, plain token), or a full output
        self._num_prompt_tokens = len(request.prompt)

    def drain(self) -> RequestOutput | None:
        """Return the outputs since the last call, merged; None: none."""
        parts: list[BranchOutput] = []
        runs: dict[int, list[int]] = {}  # plain tokens by branch, preceding its next part
        last: RequestOutput | None = None
        while self.arrived:
            output = self.arrived.popleft()
            if isinstance(output, RequestOutput):
                parts += _run_parts(runs)
                runs.clear()
                parts += output.parts
                last = output
            else:
                branch, token_id = output
                if branch in runs:
                    runs[branch].append(token_id)
                else:
                    runs[branch] = [token_id]
        parts += _run_parts(runs)
        if last is not None:
            return last._replace(parts=tuple(parts))
        return RequestOutput(self.request_id, tuple(parts), None, (), self._num_prompt_tokens, 0, 0) if parts else None


class OfflineEngine:
    """An engine with its model. Raises ValueError if the model cannot be read or does not fit."""

    def __init__(self, settings: Settings, seed: int | None) -> None:
        """`seed`: base seed of requests without one, combined with the request's id; None: random."""
        try:
            self.model = ServedModel.read(settings)
            built = build_engine(settings, progress=True)
        except StartupError as error:
            raise in_keywords(error) from None
        self.max_model_len = min(self.model.max_model_len, built.memory.max_model_len)
        self._settings = settings
        self._seed = seed
        self._resolver = SamplingResolver(self.model.defaults, settings)
        self._adapters = AdapterFiles(built.config, settings)
        self._numbers = count()
        self._grammars: dict[bytes, str] = {}
        self._num_resets = 0  # of the prefix cache
        self._open: dict[str, OpenRequest] = {}
        self._death: BaseException | None = None
        self._is_shut_down = False
        self._process = os.getpid()
        self._thread = EngineThread(built.engine, self._on_outputs, self._on_death)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def new_id(self) -> str:
        return str(next(self._numbers))

    def reset_prefix_cache(self) -> bool:
        """Hide cached prefixes from later requests; the blocks are freed when memory is needed. Return True."""
        self._num_resets += 1
        return True

    def prepare(
        self,
        request: GenerationRequest,
        request_id: str,
        lora: LoRARequest | None = None,
        model: ServedModel | None = None,
    ) -> PreparedRequest:
        """Tokenize and resolve a request with one prompt, on any thread. Raises ValueError.

        `model`: the model with another chat template.
        """
        try:
            return self._prepared(request, request_id, lora, model or self.model)
        except RequestError as error:
            raise ValueError(error.message) from None
        except UnicodeEncodeError:
            raise ValueError("'prompt' has a lone surrogate (a text must be valid UTF-8)") from None

    def open(self, request: EngineRequest, mailbox: Mailbox, *, streams: bool) -> OpenRequest:
        """Start a request. Raises ValueError for an id in use, RuntimeError if the engine has ended."""
        self.check()
        if request.request_id in self._open:
            raise ValueError(f"request_id: {request.request_id!r} is in use")
        opened = OpenRequest(request, mailbox, streams=streams)
        self._open[request.request_id] = opened
        self._thread.send(Add(request))
        self.check()  # it may have died before it saw the request
        return opened

    def end_branch(self, request_id: str, branch: int) -> None:
        """End a branch that a stop string completed."""
        self._thread.send(Cancel(request_id, EndReason.STOP, branch))

    def close(self, request_id: str) -> None:
        """Cancel a request unless it has ended; further outputs are dropped."""
        if self._open.pop(request_id, None) is not None:
            self._thread.send(Cancel(request_id, EndReason.CANCELLED))

    def check(self) -> None:
        """Raises RuntimeError if the engine has ended, or belongs to the parent of this process."""
        if os.getpid() != self._process:
            raise RuntimeError("the engine is in the process that made it (after a fork, make an LLM in the child)")
        if self._death is not None:
            raise RuntimeError("the engine died") from self._death
        if self._is_shut_down:
            raise RuntimeError("the engine is shut down")

    def shut_down(self) -> None:
        """End open requests and the thread. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._thread.send(Stop(EndReason.SHUTDOWN))
            self._thread.join(JOIN_S)

    def _prepared(
        self, request: GenerationRequest, request_id: str, lora: LoRARequest | None, model: ServedModel
    ) -> PreparedRequest:
        if not model.generates and not request.sampling.embeds:
            raise ValueError(NO_HEAD)
        reader = PromptReader(model, self._settings)
        reader.check(request)
        read = reader.read(request, self.max_model_len)
        (prompt,) = read.prompts
        params = request.sampling
        seed = self._seed_of(request_id) if params.seed is None else params.seed
        (sampling,) = self._resolver.by_prompt(request, seed, [len(prompt)], self.max_model_len)
        if read.task is not None or read.rules is not None:
            grammar = None if read.task is None else self._grammar(read.task, request)
            sampling = replace(sampling, grammar=grammar, rules=read.rules)
        engine_request = EngineRequest(
            request_id=request_id,
            prompt=tuple(prompt),
            sampling=sampling,
            cache_salt=f"{self._num_resets}/{request.cache_salt}",
            adapter=None if lora is None else self._adapters.source(lora),
        )
        return PreparedRequest(request, engine_request, lora)

    def _seed_of(self, request_id: str) -> int:
        return secrets.randbits(64) if self._seed is None else seed_of(f"{self._seed}/{request_id}")

    def _grammar(self, task: GrammarTask, request: GenerationRequest) -> str:
        """Compile and return a grammar, in this process because it is the caller's own. Raises RequestError."""
        key = PackedTask.of(task).key
        if key not in self._grammars:
            asked = request.sampling.grammar
            try:
                text = write_grammar(task, self.model.tokens)
                self._compiler.compile(text)
            except GrammarError as error:
                raise grammar_refusal(error, "tools" if asked is None else asked.param) from None
            if len(self._grammars) >= MAX_GRAMMARS:
                self._grammars.clear()
            self._grammars[key] = text
        return self._grammars[key]

    @cached_property
    def _compiler(self) -> TextCompiler:
        tokens = self.model.tokens
        return TextCompiler(tokens, len(tokens.pieces), tokens.eos_token_ids)

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        ready: dict[OpenRequest, None] = {}
        for output in outputs:
            if isinstance(output, NewTokens):
                self._on_tokens(output, ready)
                continue
            opened = self._open.get(output.request_id)
            if opened is None:
                continue
            opened.arrived.append(output)
            if output.end is not None:
                self._open.pop(output.request_id, None)
            if opened.streams or output.end is not None:
                ready[opened] = None
        _deliver(list(ready))

    def _on_tokens(self, new: NewTokens, ready: dict[OpenRequest, None]) -> None:
        for branch, token_id in zip(new.branches, new.token_ids, strict=True):
            opened = self._open.get(branch.group.request_id)
            if opened is not None:
                opened.arrived.append((branch.branch, token_id))
                if opened.streams:
                    ready[opened] = None

    def _on_death(self, cause: BaseException) -> None:
        self._death = cause
        _deliver(list(self._open.values()))


def _run_parts(runs: Mapping[int, Sequence[int]]) -> Iterator[BranchOutput]:
    return (BranchOutput(branch, tuple(token_ids), (), None) for branch, token_ids in runs.items())


def _deliver(ready: Sequence[OpenRequest]) -> None:
    by_mailbox: dict[Mailbox, list[OpenRequest]] = {}
    for opened in ready:
        by_mailbox.setdefault(opened.mailbox, []).append(opened)
    for mailbox, own in by_mailbox.items():
        mailbox.put(own)
