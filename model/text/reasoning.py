"""Separates a streamed answer into reasoning and content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

BLANKS = " \t\r\n"
MAX_HELD_BLANKS = 256
"""Longest run of blanks that is dropped."""
PROMPT_END_TOKENS = 32
"""Length of a prompt's end, enough for a marker and blanks."""


@dataclass(frozen=True)
class ReasoningFormat:
    start: str
    end: str
    always_thinks: bool = False  # an answer without `start` is reasoning up to `end`


QWEN3 = ReasoningFormat("<think>", "</think>")
DEEPSEEK_R1 = ReasoningFormat("<think>", "</think>", always_thinks=True)
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
SEED_OSS = ReasoningFormat("<seed:think>", "</seed:think>", always_thinks=True)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": DEEPSEEK_R1,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "seed_oss": SEED_OSS,
}
"""Formats by vLLM's --reasoning-parser names."""
DEEPSEEK_TURN = "<｜Assistant｜>"


class ReasoningState(StrEnum):
    """Reasoning state after a prompt. Stored in request records."""

    OFF = ""  # the answer is content only
    OPTIONAL = "optional"  # it may begin with the start marker
    OPEN = "open"  # it begins inside the reasoning


class SplitText(NamedTuple):
    reasoning: str
    content: str


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """Return a chat template's reasoning format, if any."""
    for markers in (MISTRAL, SEED_OSS):
        if markers.end in template:
            return markers
    if QWEN3.end not in template:
        return None
    return DEEPSEEK_R1 if DEEPSEEK_TURN in template else QWEN3


def state_after(markers: ReasoningFormat, prompt: str) -> ReasoningState:
    """Return the state after `prompt`, which may be only its end."""
    prompt = prompt.rstrip()
    if prompt.endswith(markers.end):
        return ReasoningState.OFF
    return ReasoningState.OPEN if prompt.endswith(markers.start) or markers.always_thinks else ReasoningState.OPTIONAL


def state_within(markers: ReasoningFormat, message: str) -> ReasoningState:
    """Return the state for continuing `message`."""
    is_open = message.rfind(markers.start) > message.rfind(markers.end)
    return ReasoningState.OPEN if is_open else ReasoningState.OFF


class ReasoningStream:
    """Linear-time parser of one answer; chunk boundaries do not matter.

    Drops markers and adjacent blanks. Without an end marker, the rest is reasoning.
    """

    def __init__(self, markers: ReasoningFormat, state: ReasoningState) -> None:
        self._format = markers
        self._held = ""
        self._num_dropped = 0  # consecutive blanks
        self._is_started = False  # the start marker was read
        modes = {ReasoningState.OFF: self._in_content, ReasoningState.OPTIONAL: self._at_start}
        self._mode: Callable[[], SplitText | None] = modes.get(state, self._before_reasoning)

    @property
    def is_open(self) -> bool:
        return self._mode in (self._before_reasoning, self._in_reasoning)

    @property
    def is_over(self) -> bool:
        """True once content has begun."""
        return self._mode == self._in_content

    def push(self, text: str) -> SplitText:
        """Parse `text` and return the newly certain output."""
        self._held += text
        reasoning = content = ""
        while (found := self._mode()) is not None:
            reasoning += found.reasoning
            content += found.content
        return SplitText(reasoning, content)

    def flush(self) -> SplitText:
        """End the answer and return the held text."""
        held, self._held = self._held, ""
        if self._mode == self._at_start:
            return SplitText("", held)
        return SplitText(held if held.strip(BLANKS) else "", "")

    # Modes. Each returns None if more text is needed.

    def _at_start(self) -> SplitText | None:
        text = self._held.lstrip(BLANKS)
        is_short = len(self._held) - len(text) <= MAX_HELD_BLANKS
        if is_short and len(text) < len(self._format.start) and self._format.start.startswith(text):
            return None
        if not is_short or not text.startswith(self._format.start):
            self._mode = self._in_content
        else:
            self._read_start(text)
        return SplitText("", "")

    def _before_reasoning(self) -> SplitText | None:
        if not self._drop_blanks():
            return None
        start = self._format.start
        if not self._is_started and len(self._held) < len(start) and start.startswith(self._held):
            return None
        if not self._is_started and self._held.startswith(start):
            self._read_start(self._held)
        else:
            self._mode = self._in_reasoning
        return SplitText("", "")

    def _in_reasoning(self) -> SplitText | None:
        text, end = self._held, self._format.end
        place = text.find(end)
        if place >= 0:
            self._held = text[place + len(end) :]
            self._mode, self._num_dropped = self._before_content, 0
            return SplitText(_without_last_blanks(text[:place]), "")
        num_kept = next(n for n in range(min(len(text), len(end) - 1), -1, -1) if text.endswith(end[:n]))
        sure = _without_last_blanks(text[: len(text) - num_kept])
        self._held = text[len(sure) :]
        return SplitText(sure, "") if sure else None

    def _before_content(self) -> SplitText | None:
        if not self._drop_blanks():
            return None
        self._mode = self._in_content
        return SplitText("", "")

    def _in_content(self) -> SplitText | None:
        text, self._held = self._held, ""
        return SplitText("", text) if text else None

    def _read_start(self, text: str) -> None:
        self._held = text[len(self._format.start) :]
        self._mode, self._is_started, self._num_dropped = self._before_reasoning, True, 0

    def _drop_blanks(self) -> bool:
        """Drop leading blanks; return whether other text follows."""
        stripped = self._held.lstrip(BLANKS)
        num_blanks = min(len(self._held) - len(stripped), MAX_HELD_BLANKS - self._num_dropped)
        self._num_dropped += num_blanks
        self._held = self._held[num_blanks:]
        return bool(self._held)


def _without_last_blanks(text: str) -> str:
    num_blanks = len(text) - len(text.rstrip(BLANKS))
    return text[: len(text) - min(num_blanks, MAX_HELD_BLANKS)]
