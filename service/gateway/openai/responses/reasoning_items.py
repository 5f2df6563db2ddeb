"""Reasoning items of `/v1/responses`: options, input and output."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from service.gateway.core.refusals import refusal
from service.gateway.openai.json_objects import Json

SUMMARIES = ("auto", "concise", "detailed")
ENCRYPTED_CONTENT = "reasoning.encrypted_content"
PACKED_PREFIX = "quire1."
"""Prefix of `encrypted_content`; the reasoning follows in base64."""


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # former name of `summary`


class ReasoningPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    text: str


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str
    summary: list[ReasoningPart] = []
    content: list[ReasoningPart] = []
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


@dataclass(frozen=True)
class ReasoningForm:
    """Fields of a reasoning item that contain its text."""

    is_summary: bool = False  # in `summary` rather than `content`
    is_packed: bool = False  # also in `encrypted_content`

    @classmethod
    def of(cls, config: ReasoningConfig, include: Sequence[str]) -> ReasoningForm:
        """Read the options. Raises RequestError (400)."""
        for name in ("summary", "generate_summary"):
            if getattr(config, name) not in (None, *SUMMARIES):
                raise refusal(f"reasoning.{name}", f"must be one of {', '.join(SUMMARIES)}")
        is_summary = (config.summary or config.generate_summary) is not None
        return cls(is_summary, ENCRYPTED_CONTENT in include)

    @property
    def place(self) -> str:
        return "summary" if self.is_summary else "content"

    @property
    def part_type(self) -> str:
        return "summary_text" if self.is_summary else "reasoning_text"

    def closed(self, item: Json) -> Json:
        """Return the fields that are added when the item ends."""
        if not self.is_packed:
            return {}
        text = "".join(part["text"] for part in item[self.place])
        return {"encrypted_content": PACKED_PREFIX + base64.b64encode(text.encode()).decode()}


def check_reasoning(item: Json, param: str) -> None:
    """Raises RequestError (400) for parts of the wrong type, or content encrypted by another service."""
    for place, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        for i, part in enumerate(item[place]):
            if part["type"] != kind:
                raise refusal(f"{param}.{place}[{i}].type", f"must be {kind}")
    if item["encrypted_content"] is not None and not item["content"] and _unpacked(item) is None:
        raise refusal(f"{param}.encrypted_content", "is not from this service, which cannot read it")


def reasoning_text(item: Mapping[str, Any]) -> str:
    if not item["content"] and item["encrypted_content"] is not None:
        return _unpacked(item) or ""
    return "\n\n".join(part["text"] for part in item["content"] or item["summary"])


def _unpacked(item: Mapping[str, Any]) -> str | None:
    packed = item["encrypted_content"]
    try:
        data = base64.b64decode(packed.removeprefix(PACKED_PREFIX), validate=True)
        return data.decode() if packed.startswith(PACKED_PREFIX) else None
    except ValueError:
        return None
