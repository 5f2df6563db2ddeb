"""Spellings of tensors' names: plain, base models, wrappers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from model.config import ModelConfig

BODY, HEAD = "model.", "lm_head."


@dataclass(frozen=True)
class NameSpelling:
    """Prefixes in place of "model." and "lm_head.", and of tensors that are not loaded."""

    body: str = BODY
    head: str = HEAD
    left_out: tuple[str, ...] = ()

    def known(self, name: str) -> str | None:
        """Return a tensor's plain name, None if it is not loaded."""
        if self.left_out and name.startswith(self.left_out):
            return None
        if name.startswith(self.head):
            return HEAD + name.removeprefix(self.head)
        if name.startswith(self.body):
            return BODY + name.removeprefix(self.body)
        return name

    def stored(self, module: str) -> str:
        """Return a module's name in the files."""
        if f"{module}.".startswith(HEAD):
            return (self.head + f"{module}.".removeprefix(HEAD)).removesuffix(".")
        return self.body + module.removeprefix(BODY)


BASE = NameSpelling(body="")
WRAPPED = (
    NameSpelling("language_model.model.", "language_model.lm_head.", ("vision_tower.", "multi_modal_projector.")),
    NameSpelling("model.language_model.", left_out=("model.vision_tower.", "model.multi_modal_projector.")),
)
"""Spellings of transformers 4 and 5."""


def find_spelling(names: Collection[str], config: ModelConfig) -> NameSpelling:
    """Return the spelling by its embedding, else plain."""
    spellings: tuple[NameSpelling, ...] = (*WRAPPED, BASE) if config.is_wrapped else (BASE,)
    for spelling in spellings:
        if f"{spelling.body}embed_tokens.weight" in names:
            return spelling
    return NameSpelling()
