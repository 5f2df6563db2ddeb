"""Turns a request's tokens from the engine into the caller's outputs, with the HTTP API's text stages."""

from __future__ import annotations

from service.errors import ENDINGS, EndReason
from service.gateway.core.refusals import failure
from service.gateway.core.response_assembler import ResponseAssembler
from service.gateway.openai.logprobs import TokenWords
from service.offline.engine import Mailbox, OfflineEngine, PreparedRequest
from service.offline.outputs import OutputBuilder, RequestOutput
from service.offline.sampling_params import RequestOutputKind
from service.worker.events import event_of

CALLERS_FAULTS = (EndReason.TOO_LARGE, EndReason.GRAMMAR, EndReason.INVALID)


class Generation:
    """An open request. Not thread-safe."""

    def __init__(
        self,
        engine: OfflineEngine,
        prepared: PreparedRequest,
        mailbox: Mailbox,
        *,
        prompt: str | None,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        has_text: bool = True,
    ) -> None:
        """Start the request. `prompt`: its text, for the outputs."""
        request = prepared.request
        self.request_id = prepared.engine_request.request_id
        self.prompt_token_ids = list(prepared.engine_request.prompt)
        self.is_finished = False
        self._prompt = prompt
        self._lora = prepared.lora
        self._kind = kind
        self._engine = engine
        self._assembler = ResponseAssembler(request, engine.model)
        self._builder = OutputBuilder(request, TokenWords(engine.model.tokenizer, False), kind, has_text=has_text)
        self._num_events = 0
        streams = kind is not RequestOutputKind.FINAL_ONLY or bool(request.stop)
        self._opened = engine.open(prepared.engine_request, mailbox, streams=streams)

    @property
    def embedding(self) -> bytes:
        """float32[H], set at the end."""
        return self._assembler.embedding

    @property
    def num_tokens(self) -> int:
        return self._assembler.num_tokens

    def advance(self) -> RequestOutput | None:
        """Take the engine's new outputs. Return an output if there is anything new.

        Raises ValueError if the engine refused the request, RuntimeError if it failed.
        """
        new = self._opened.drain()
        if new is None:
            if not self.is_finished:
                self._engine.check()
            return None
        self._num_events += 1
        deltas, stopped = self._assembler.push(event_of(self.request_id, self._num_events, [new]))
        reason = self._assembler.reason
        if reason is None:
            for branch in stopped:
                self._engine.end_branch(self.request_id, branch)
        elif ENDINGS[reason].finish_reason is None:
            self._raise(reason)
        self._builder.add(deltas)
        self.is_finished = reason is not None
        if self.is_finished:
            self.close()
        if not self.is_finished and (self._kind is RequestOutputKind.FINAL_ONLY or not deltas):
            return None
        output = self._builder.output(self.request_id, self._prompt, self.prompt_token_ids, finished=self.is_finished)
        output.num_cached_tokens = self._assembler.cached_tokens
        output.lora_request = self._lora
        return output

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self._engine.close(self.request_id)

    def _raise(self, reason: EndReason) -> None:
        self.is_finished = True
        if reason in CALLERS_FAULTS:
            raise ValueError(f"request {self.request_id}: {failure(reason).message}")
        raise RuntimeError(f"request {self.request_id}: {failure(reason).message}")
