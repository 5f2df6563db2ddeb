"""How a model is refused."""

from __future__ import annotations


class ModelError(ValueError):
    """A model or a device this code cannot serve. The message is one line that names the file and what is wrong."""
