"""Errors for models and grammars."""

from __future__ import annotations


class ModelError(ValueError):
    """Unusable model or device; one line that names the file and the problem."""


class GrammarError(ValueError):
    """Unusable grammar; the text may be shown to the client."""
