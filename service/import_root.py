"""The folder that this installation is imported from, for the Python path of child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

IMPORT_ROOT = Path(__file__).resolve().parents[len(__name__.split(".")) - 1]
"""The checkout, or the folder that holds `quire` of a wheel."""


def python_path(environ: Mapping[str, str]) -> str:
    """Return a PYTHONPATH with IMPORT_ROOT first: the working directory may hold another `model`."""
    return os.pathsep.join(filter(None, (str(IMPORT_ROOT), environ.get("PYTHONPATH"))))
