"""The folder that this installation is imported from, for PYTHONPATH of child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

IMPORT_ROOT = Path(__file__).resolve().parents[len(__name__.split(".")) - 1]
"""The checkout, or the folder that contains `quire` in a wheel."""


def python_path(environ: Mapping[str, str]) -> str:
    """Return a PYTHONPATH that starts with IMPORT_ROOT: the working directory may contain another `model`."""
    return os.pathsep.join(filter(None, (str(IMPORT_ROOT), environ.get("PYTHONPATH"))))
