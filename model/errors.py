"""Errors for models and grammars."""

from __future__ import annotations


class ModelError(ValueError):
    """A model or device cannot be served. The message is one line that names the file and the problem."""


class GrammarError(ValueError):
    """A grammar cannot be compiled or is too large. The text may be shown to the client."""
