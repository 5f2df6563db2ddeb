"""`service/README.md`, made from the page of settings: `python -m tests.support.settings_table > service/README.md`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from service.config.settings import VERBS, Settings
from tests.support.source_tree import ROOT

HEAD = """# Settings

Made from `service/config/settings.py` by `python -m tests.support.settings_table`; a test holds both together. Each
setting is a flag `--max-num-seqs`, a variable `QUIRE_MAX_NUM_SEQS`, and a line `max_num_seqs = 64` of the TOML file
that `--config` or `QUIRE_CONFIG` names: the flag wins over the variable, the variable over the file. A wrong value is
one line and exit status 2; so is an unknown `QUIRE_` variable. A switch is off as `--no-NAME` too. `all` are {verbs}.

Beside these: `QUIRE_CACHE_DIR` is where compiled kernels are kept, `QUIRE_URL` where `quire chat`, `complete` and `top`
find a service. OpenTelemetry's own variables turn spans on: see `deploy/README.md`.
"""


def settings_page() -> str:
    parts = [HEAD.format(verbs=", ".join(f"`{verb}`" for verb in VERBS))]
    for title, names in _sections().items():
        parts.append(f"## {title}\n\n| flag | default | bounds | of | is |\n|---|---|---|---|---|")
        fields = {field.name: field for field in dataclasses.fields(Settings)}
        parts[-1] += "".join(f"\n{_row(fields[name])}" for name in names)
        parts[-1] += "\n"
    return "\n".join(parts)


def _sections() -> dict[str, list[str]]:
    """The names of the settings under the comments that part them."""
    found: dict[str, list[str]] = {}
    body = (ROOT / "service" / "config" / "settings.py").read_text().partition("class Settings:")[2]
    for comment, name in re.findall(r"^    # (\w+)$|^    (\w+): ", body, re.M):
        if comment:
            found[comment] = []
        else:
            found[list(found)[-1]].append(name)
    return found


def _row(field: dataclasses.Field) -> str:
    metadata = field.metadata
    verbs = "all" if set(metadata["verbs"]) == set(VERBS) else ", ".join(metadata["verbs"])
    cells = (f"`--{field.name.replace('_', '-')}`", _default(field.default), _bounds(metadata), verbs, metadata["help"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    if value in (None, ()):
        return ""
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _bounds(metadata: Any) -> str:
    if metadata["choices"]:
        return ", ".join(f"`{str(choice).lower()}`" for choice in metadata["choices"])
    return "" if metadata["low"] is None else f"{metadata['low']} to {metadata['high']}"


if __name__ == "__main__":
    print(settings_page(), end="")
