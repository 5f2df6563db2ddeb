"""The corpus as the model sees it: rendered documents, and the tokens that it learns to say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from make_corpus import Corpus

HERE = Path(__file__).parents[1]
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BEGIN, END, *_ = SPECIAL_TOKENS
BEGIN_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL_TOKENS))
NOT_LEARNED = -100


def rendered_documents(seed: int, num_documents: int) -> Iterator[str]:
    """Documents with their control tokens, chats through the very template that the model ships with."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((HERE / "chat_template.jinja").read_text(encoding="utf-8"))
    for document in Corpus().documents(seed, num_documents):
        yield BEGIN + document["text"] + END if "text" in document else template.render(document)


def targets_of(tokens: np.ndarray) -> np.ndarray:
    """What each position should predict: the next token, but nothing of what a user or a system prompt says.

    tokens: (tokens,) uint16. Returns (tokens - 1,) int64 with NOT_LEARNED where no loss is taken.
    """
    is_role = (tokens <= ASSISTANT_ID) & (tokens != END_ID)
    last_role_at = np.maximum.accumulate(np.where(is_role, np.arange(len(tokens)), 0))
    speaker = tokens[last_role_at]
    said_to_model = (speaker == SYSTEM_ID) | (speaker == USER_ID) | (tokens == ASSISTANT_ID)
    return np.where(said_to_model, NOT_LEARNED, tokens.astype(np.int64))[1:]
