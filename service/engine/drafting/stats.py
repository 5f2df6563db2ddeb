from __future__ import annotations

from dataclasses import dataclass, field

from service.engine.drafting.drafter import MAX_DRAFTS, SOURCES


@dataclass(slots=True)
class DraftStats:
    """Counters since the start."""

    num_drafts: int = 0  # runs of draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    num_drafted_by_source: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    num_accepted_by_source: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    last_mean_length: float = 0.0  # draft tokens per decode of the last step with decodes

    def add(self, source: str, num_accepted: int, num_drafts: int) -> None:
        index = SOURCES.index(source)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_drafted_by_source[index] += num_drafts
        self.num_accepted_by_source[index] += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_pos[position] += 1
