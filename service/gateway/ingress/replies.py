"""Answers as the replies that a foreign producer reads: text as it comes, calls and the cost at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.errors import RequestError
from service.gateway.core.service import InferenceService
from service.gateway.generation.response_assembler import ChoiceDelta
from service.gateway.generation.response_stream import Outcome
from service.gateway.openai.answers import error_object
from service.gateway.openai.calls import ToolCallWriter, gather_calls
from service.queue.codec import decode, encode
from service.queue.interface import IngressEntry, QueueUnavailable, Standing
from service.queue.messages import Reply, Usage

RETRY_S = 1.0
MAX_REPLY_CHARS = 128 << 10
"""A reply message is bounded in bytes; a longer text is told in several."""
IN_USE = "id: is the name of another job that has not ended (a new one, or the same after the job's last reply)."


@dataclass
class ChoiceReply:
    """What is yet to be told of one choice."""

    index: int
    writer: ToolCallWriter | None  # None: it calls nothing
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def push(self, delta: ChoiceDelta) -> None:
        is_last = delta.finish_reason is not None
        if self.writer is None:
            self.text += delta.text
            self.finish_reason = delta.finish_reason
            return
        for json_delta in self.writer.json_deltas(self.index, delta.text, is_last=is_last):
            self.text += json_delta.get("content", "")
            gather_calls(self.calls, json_delta)
        if is_last:
            self.finish_reason = self.writer.finish_reason(self.index, delta.finish_reason)

    def take(self) -> str:
        text, self.text = self.text, ""
        return text


class EntryTaken(Exception):
    """Another gateway has the entry now: nothing more is told of it here."""


class ReplyWriter:
    """The replies to one entry, numbered from 1. Each is written once, whatever answers are lost and whichever gateway
    goes on with the entry."""

    def __init__(self, service: InferenceService, entry: IngressEntry, reply_id: str) -> None:
        self._service = service
        self._entry = entry
        self._id = reply_id
        self._num_sent = 0
        self._num_sent_chars: dict[int, int] = {}  # by choice, in all replies
        self._num_read_chars: dict[int, int] = {}  # by choice, since `start_over`
        self._ended: set[int] = set()  # choices whose end was told

    async def begin(self) -> bool:
        """Whether there is anything to tell. Raises RequestError (409) where the id is another job's, to be told under
        the entry's own id. Raises EntryTaken, and QueueUnavailable where the queue stays away."""
        queue, found = self._service.queue, None

        async def ask() -> None:
            nonlocal found
            found = await queue.begin_replies(self._entry, self._id)

        await persist(ask, self._service.settings.request_timeout)
        if found.standing is Standing.TAKEN:
            raise EntryTaken
        if found.standing is Standing.IN_USE:
            self._id = self._entry.entry_id
            raise RequestError(409, IN_USE, param="id", code="id_in_use")
        # A producer that has heard no answer to its XADD writes the same again: the first entry is the one that counts.
        return found.standing is Standing.OURS and not self._has_ended(found.replies)

    def _has_ended(self, replies: Sequence[bytes]) -> bool:
        """Whether a gateway that is gone has told all. What it has told of it is not told again: the same events give
        the same text, wherever they are read."""
        for payload in replies:
            reply = decode(Reply, payload)
            self._count(reply)
            if reply.done:
                return True
        return False

    def start_over(self) -> None:
        """The answer is heard again from its beginning."""
        self._num_read_chars.clear()

    async def send_text(self, index: int, text: str) -> None:
        """Some more text of a choice. Raises EntryTaken, and QueueUnavailable where the queue stays away."""
        await self._send_text(index, self._unsent(index, text))

    async def _send_text(self, index: int, text: str) -> None:
        for start in range(0, len(text), MAX_REPLY_CHARS):
            part = text[start : start + MAX_REPLY_CHARS]
            await self._send(Reply(id=self._id, number=self._num_sent + 1, index=index, text=part))

    async def finish(self, choices: Sequence[ChoiceReply], outcome: Outcome) -> None:
        """The last text of each choice, its calls, and how it ended; what it cost, with the last. Raises RequestError
        (400) where the calls are too long to be told."""
        usage = Usage(
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
            cached_tokens=outcome.cached_tokens,
        )
        if sum(len(call["function"]["arguments"]) for choice in choices for call in choice.calls) > MAX_REPLY_CHARS:
            raise RequestError(400, "The calls are too long for a reply.", param="tools", code="reply_too_large")
        for choice in choices:
            if choice.index in self._ended:
                continue
            text = self._unsent(choice.index, choice.take())
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

    def _unsent(self, index: int, text: str) -> str:
        heard = self._num_read_chars.get(index, 0)
        self._num_read_chars[index] = heard + len(text)
        return text[max(0, self._num_sent_chars.get(index, 0) - heard) :]

    async def fail(self, error: RequestError) -> None:
        await self._send(Reply(id=self._id, number=self._num_sent + 1, error=error_object(error), done=True))

    async def _send(self, reply: Reply) -> None:
        payload, queue = encode(reply), self._service.queue

        async def write() -> None:
            if not await queue.reply(self._entry, self._id, reply.number, payload, is_last=reply.done):
                raise EntryTaken

        await persist(write, self._service.settings.request_timeout)
        self._count(reply)

    def _count(self, reply: Reply) -> None:
        self._num_sent = reply.number
        self._num_sent_chars[reply.index] = self._num_sent_chars.get(reply.index, 0) + len(reply.text)
        if reply.finish_reason is not None:
            self._ended.add(reply.index)


async def persist(attempt: Callable[[], Awaitable[None]], give_up_after_s: float) -> None:
    """`attempt` until the queue takes it. Raises QueueUnavailable when the time is up."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + give_up_after_s
    while True:
        try:
            return await attempt()
        except QueueUnavailable:
            if loop.time() + RETRY_S > give_up_at_s:
                raise
            await asyncio.sleep(RETRY_S)
