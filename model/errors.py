"""Errors for models and grammars."""

from __future__ import annotations


class ModelError(ValueError):
    """Unusable model or device. The message is one line that names the file and the problem."""


class GrammarError(ValueError):
    """Unusable grammar. The message may be shown to the client."""
