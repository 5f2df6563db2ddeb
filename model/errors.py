"""How a model is refused, and a grammar."""

from __future__ import annotations


class ModelError(ValueError):
    """A model or a device this code cannot serve. The message is one line that names the file and what is wrong."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or is too large. Its text may be shown to the client."""
