"""Answers as the replies that a foreign producer reads: text as it comes, calls and the cost at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.errors import RequestError
from service.gateway.generation.job_text import Piece
from service.gateway.generation.run import Outcome
from service.gateway.hall.hall import Hall
from service.gateway.openai.answers import error_object
from service.gateway.openai.calls import CallTeller, gather_calls
from service.wire.broker import BrokerUnavailable
from service.wire.codec import decode, encode
from service.wire.messages import Reply, Usage

RETRY_S = 1.0
MAX_REPLY_CHARS = 128 << 10
"""A reply message is bounded in bytes; a longer text is told in several."""


@dataclass
class Choice:
    """What is yet to be told of one choice."""

    index: int
    teller: CallTeller | None  # None: it calls nothing
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def hear(self, piece: Piece) -> None:
        is_last = piece.finish_reason is not None
        if self.teller is None:
            self.text += piece.text
            self.finish_reason = piece.finish_reason
            return
        for delta in self.teller.deltas(self.index, piece.text, is_last=is_last):
            self.text += delta.get("content", "")
            gather_calls(self.calls, delta)
        if is_last:
            self.finish_reason = self.teller.finish_reason(self.index, piece.finish_reason)

    def take(self) -> str:
        text, self.text = self.text, ""
        return text


class Answer:
    """The replies to one job, numbered from 1."""

    def __init__(self, hall: Hall, producer: str, reply_id: str) -> None:
        self._hall = hall
        self._producer = producer
        self._id = reply_id
        self._told_chars: dict[int, int] = {}  # by choice, what another gateway has told and is not to be told again
        self._ended: set[int] = set()  # choices whose end it has told
        self.num_told = 0

    async def tell(self, index: int, text: str) -> None:
        """Some more text of a choice. Raises BrokerUnavailable where the queue stays away."""
        text = self._untold(index, text)
        for start in range(0, len(text), MAX_REPLY_CHARS):
            part = text[start : start + MAX_REPLY_CHARS]
            await self._send(Reply(id=self._id, number=self.num_told + 1, index=index, text=part))

    async def finish(self, choices: Sequence[Choice], outcome: Outcome) -> None:
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
            text = self._untold(choice.index, choice.take())
            cut = len(text) - len(text) % MAX_REPLY_CHARS if len(text) > MAX_REPLY_CHARS else 0
            await self.tell(choice.index, text[:cut])
            is_last = choice is choices[-1]
            await self._send(
                Reply(
                    id=self._id,
                    number=self.num_told + 1,
                    index=choice.index,
                    text=text[cut:],
                    finish_reason=choice.finish_reason,
                    tool_calls=choice.calls or None,
                    usage=usage if is_last else None,
                    done=is_last,
                )
            )

    async def has_ended(self) -> bool:
        """Whether a gateway that is gone has told all. What it has told of it is not told again: the same events give
        the same text, wherever they are read."""
        for payload in await self._hall.broker.read_replies(self._producer, self._id):
            reply = decode(Reply, payload)
            self.num_told = reply.number
            self._told_chars[reply.index] = self._told_chars.get(reply.index, 0) + len(reply.text)
            if reply.finish_reason is not None:
                self._ended.add(reply.index)
            if reply.done:
                return True
        return False

    def _untold(self, index: int, text: str) -> str:
        told = min(len(text), self._told_chars.get(index, 0))
        if told:
            self._told_chars[index] -= told
        return text[told:]

    async def fail(self, error: RequestError) -> None:
        await self._send(Reply(id=self._id, number=self.num_told + 1, error=error_object(error), done=True))

    async def _send(self, reply: Reply) -> None:
        payload = encode(reply)
        broker = self._hall.broker
        await persist(lambda: broker.reply(self._producer, self._id, payload), self._hall.settings.request_timeout)
        self.num_told += 1


async def persist(attempt: Callable[[], Awaitable[None]], give_up_after_s: float) -> None:
    """`attempt` until the queue takes it. Raises BrokerUnavailable when the time is up."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + give_up_after_s
    while True:
        try:
            return await attempt()
        except BrokerUnavailable:
            if loop.time() + RETRY_S > give_up_at_s:
                raise
            await asyncio.sleep(RETRY_S)
