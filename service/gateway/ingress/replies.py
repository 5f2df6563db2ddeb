"""Replies to a foreign producer: text as it is generated, tool calls and usage at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from service.errors import RequestError
from service.gateway.core.response_assembler import ChoiceDelta, Outcome
from service.gateway.core.service import InferenceService
from service.gateway.openai.json_objects import error_object, prediction_json
from service.gateway.openai.tool_calls import ToolCallWriter, gather_calls
from service.queue.codec import WireError, decode, encode
from service.queue.interface import IngressEntry, QueueUnavailable, Standing
from service.queue.messages import Reply, Usage

Result = TypeVar("Result")

RETRY_S = 1.0
MAX_REPLY_CHARS = 128 << 10
"""A longer text is split into several replies, which are bounded in bytes."""
IN_USE = "id: is the name of another job that has not ended (a new one, or the same after the job's last reply)."

NOT_REPLIES = "id: its reply stream has entries that are no replies (another id; only gateways may write there)."


@dataclass
class ChoiceReply:
    """The unsent part of one choice."""

    index: int
    writer: ToolCallWriter | None  # None: no tool calls
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def push(self, delta: ChoiceDelta) -> None:
        is_last = delta.finish_reason is not None
        self.reasoning += delta.reasoning
        if self.writer is None:
            self.text += delta.text
            self.finish_reason = delta.finish_reason
            return
        for json_delta in self.writer.json_deltas(self.index, delta.text, is_last=is_last):
            self.text += json_delta.get("content", "")
            gather_calls(self.calls, json_delta)
        if is_last:
            self.finish_reason = self.writer.finish_reason(self.index, delta.finish_reason)

    def take_text(self) -> str:
        text, self.text = self.text, ""
        return text

    def take_reasoning(self) -> str:
        reasoning, self.reasoning = self.reasoning, ""
        return reasoning


class EntryTaken(Exception):
    """Another gateway took over the entry."""


class ReplyWriter:
    """Writes the replies to one entry, numbered from 1. Each is written exactly once, even by several gateways."""

    def __init__(self, service: InferenceService, entry: IngressEntry, reply_id: str) -> None:
        self._service = service
        self._entry = entry
        self._id = reply_id
        self._num_sent = 0
        self._num_sent_chars: Counter[tuple[int, str]] = Counter()  # by choice and field, in all replies
        self._num_read_chars: Counter[tuple[int, str]] = Counter()  # the same, since `start_over`
        self._ended: set[int] = set()  # choices whose end was sent

    async def begin(self) -> bool:
        """Return whether any reply is missing. Raises EntryTaken, QueueUnavailable.

        Raises RequestError (409), to be sent under the entry's own id, if another open job has the id or its stream has
        other entries.
        """
        queue = self._service.queue
        found = await persist(
            lambda: queue.ingress.begin_replies(self._entry, self._id), self._service.settings.request_timeout
        )
        if found.standing is Standing.TAKEN:
            raise EntryTaken
        if found.standing is Standing.IN_USE:
            self._id = self._entry.entry_id
            raise RequestError(409, IN_USE, param="id", code="id_in_use")
        # A producer that got no answer to its XADD writes the job again; the first entry counts.
        try:
            return found.standing is Standing.OURS and not self._has_ended(found.replies)
        except WireError:
            self._id = self._entry.entry_id
            raise RequestError(409, NOT_REPLIES, param="id", code="id_in_use") from None

    def _has_ended(self, replies: Sequence[bytes]) -> bool:
        """Return whether an earlier gateway sent the last reply.

        Equal events give equal text, so text that was already sent is skipped.
        """
        for payload in replies:
            reply = decode(Reply, payload)
            self._count(reply)
            if reply.done:
                return True
        return False

    def start_over(self) -> None:
        """Expect the response's text again from the beginning."""
        self._num_read_chars.clear()

    async def send_next(self, choice: ChoiceReply) -> None:
        """Send a choice's next reasoning and text, unless already sent. Raises EntryTaken, QueueUnavailable."""
        await self._send_reasoning(choice)
        await self._send_text(choice.index, self._unsent(choice.index, "text", choice.take_text()))

    async def _send_reasoning(self, choice: ChoiceReply) -> None:
        text = self._unsent(choice.index, "reasoning", choice.take_reasoning())
        for part in _parts_of(text):
            await self._send(Reply(id=self._id, number=self._num_sent + 1, index=choice.index, reasoning=part))

    async def _send_text(self, index: int, text: str) -> None:
        for part in _parts_of(text):
            await self._send(Reply(id=self._id, number=self._num_sent + 1, index=index, text=part))

    async def finish(self, choices: Sequence[ChoiceReply], outcome: Outcome) -> None:
        """Send the rest of each choice; the last carries the usage. Raises RequestError (400) if calls are too long."""
        usage = Usage(
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
            cached_tokens=outcome.cached_tokens,
            **prediction_json(outcome),
        )
        if sum(len(call["function"]["arguments"]) for choice in choices for call in choice.calls) > MAX_REPLY_CHARS:
            raise RequestError(400, "The calls are too long for a reply.", param="tools", code="reply_too_large")
        for choice in choices:
            if choice.index in self._ended:
                continue
            await self._send_reasoning(choice)
            text = self._unsent(choice.index, "text", choice.take_text())
            cut = len(text) - len(text) % MAX_REPLY_CHARS if len(text) > MAX_REPLY_CHARS else 0
            await self._send_text(choice.index, text[:cut])
            is_last = choice is choices[-1]
            await self._send(
                Reply(
                    id=self._id,
                    number=self._num_sent + 1,
                    index=choice.index,
                    text=text[cut:],
                    finish_reason=choice.finish_reason,
                    tool_calls=choice.calls or None,
                    usage=usage if is_last else None,
                    done=is_last,
                )
            )

    def _unsent(self, index: int, name: str, text: str) -> str:
        num_read = self._num_read_chars[index, name]
        self._num_read_chars[index, name] += len(text)
        return text[max(0, self._num_sent_chars[index, name] - num_read) :]

    async def fail(self, error: RequestError) -> None:
        await self._send(Reply(id=self._id, number=self._num_sent + 1, error=error_object(error), done=True))

    async def _send(self, reply: Reply) -> None:
        payload, queue = encode(reply), self._service.queue

        async def write() -> None:
            if not await queue.ingress.reply(self._entry, self._id, reply.number, payload, is_last=reply.done):
                raise EntryTaken

        await persist(write, self._service.settings.request_timeout)
        self._count(reply)

    def _count(self, reply: Reply) -> None:
        self._num_sent = reply.number
        self._num_sent_chars[reply.index, "text"] += len(reply.text)
        self._num_sent_chars[reply.index, "reasoning"] += len(reply.reasoning)
        if reply.finish_reason is not None:
            self._ended.add(reply.index)


def _parts_of(text: str) -> list[str]:
    return [text[start : start + MAX_REPLY_CHARS] for start in range(0, len(text), MAX_REPLY_CHARS)]


async def persist(attempt: Callable[[], Awaitable[Result]], give_up_after_s: float) -> Result:
    """Repeat an idempotent call until the queue answers. Raises QueueUnavailable after `give_up_after_s`."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + give_up_after_s
    while True:
        try:
            return await attempt()
        except QueueUnavailable:
            if loop.time() + RETRY_S > give_up_at_s:
                raise
            await asyncio.sleep(RETRY_S)
