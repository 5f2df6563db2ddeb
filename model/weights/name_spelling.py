"""Spellings of tensor names: plain, base models, wrappers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from model.config import ModelConfig

BODY, HEAD = "model.", "lm_head."


@dataclass(frozen=True)
class NameSpelling:
    """Prefixes in place of "model." and "lm_head.", prefixes of tensors not loaded, and renamed parts of layer
    names."""

    body: str = BODY
    head: str = HEAD
    left_out: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()  # (stored, plain)

    def known(self, name: str) -> str | None:
        """Return a tensor's plain name; None if it is not loaded."""
        if self.left_out and name.startswith(self.left_out):
            return None
        if name.startswith(self.head):
            return HEAD + name.removeprefix(self.head)
        if name.startswith(self.body):
            return _renamed(BODY + name.removeprefix(self.body), self.renamed)
        return name

    def stored(self, module: str) -> str:
        """Return a module's name in the files."""
        if f"{module}.".startswith(HEAD):
            return (self.head + f"{module}.".removeprefix(HEAD)).removesuffix(".")
        known = _renamed(f"{module}.", tuple((plain, stored) for stored, plain in self.renamed))
        return self.body + known.removesuffix(".").removeprefix(BODY)


def _renamed(name: str, parts: tuple[tuple[str, str], ...]) -> str:
    for old, new in parts:
        name = name.replace(f".{old}.", f".{new}.")
    return name


BASE = NameSpelling(body="")
WRAPPED = (
    NameSpelling("language_model.model.", "language_model.lm_head.", ("vision_tower.", "multi_modal_projector.")),
    NameSpelling("model.language_model.", left_out=("model.vision_tower.", "model.multi_modal_projector.")),
)
"""Spellings of transformers 4 and 5."""


def find_spelling(names: Collection[str], config: ModelConfig) -> NameSpelling:
    """Return the spelling by its embedding, else plain, with the renamed parts that occur."""
    spellings: tuple[NameSpelling, ...] = (*WRAPPED, BASE) if config.is_wrapped else (BASE,)
    found = next((each for each in spellings if f"{each.body}embed_tokens.weight" in names), NameSpelling())
    renamed = tuple(pair for pair in config.tensors.renamed if any(f".{pair[0]}." in name for name in names))
    return replace(found, renamed=renamed, left_out=found.left_out + config.tensors.left_out)
