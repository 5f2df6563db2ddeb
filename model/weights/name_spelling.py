"""Spellings of tensors' names: plain, base models, wrappers."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from model.config import ModelConfig

BODY, HEAD = "model.", "lm_head."
_LAYER = re.compile(r"model\.layers\.[0-9]+\.")


@dataclass(frozen=True)
class NameSpelling:
    """Prefixes in place of "model." and "lm_head.", of tensors that are not loaded, and of a layer's modules."""

    body: str = BODY
    head: str = HEAD
    left_out: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()  # (stored, plain)

    def known(self, name: str) -> str | None:
        """Return a tensor's plain name, None if it is not loaded."""
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
        module = _renamed(module, tuple((stored, plain) for plain, stored in self.renamed))
        return self.body + module.removeprefix(BODY)


def _renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    found = _LAYER.match(name) if prefixes else None
    if found is None:
        return name
    layer, rest = found[0], name[found.end() :]
    return layer + next((new + rest.removeprefix(old) for old, new in prefixes if rest.startswith(old)), rest)


BASE = NameSpelling(body="")
WRAPPED = (
    NameSpelling("language_model.model.", "language_model.lm_head.", ("vision_tower.", "multi_modal_projector.")),
    NameSpelling("model.language_model.", left_out=("model.vision_tower.", "model.multi_modal_projector.")),
)
"""Spellings of transformers 4 and 5."""


def find_spelling(names: Collection[str], config: ModelConfig) -> NameSpelling:
    """Return the spelling by its embedding, else plain, and of layers by their routers."""
    spellings: tuple[NameSpelling, ...] = (*WRAPPED, BASE) if config.is_wrapped else (BASE,)
    found = next((each for each in spellings if f"{each.body}embed_tokens.weight" in names), NameSpelling())
    router = f".{config.tensors.router}.weight"
    is_renamed = bool(config.tensors.renamed) and not any(name.endswith(router) for name in names)
    return replace(found, renamed=config.tensors.renamed) if is_renamed else found
