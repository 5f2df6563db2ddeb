"""The settings section of `service/README.md`, made from `service/config/settings.py`:
`python -m tests.support.settings_table` rewrites it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from service.config.settings import VERBS, Settings
from tests.support.source_tree import ROOT

PAGE = ROOT / "service" / "README.md"
HEAD = """## Settings

`python -m tests.support.settings_table` writes this section from `service/config/settings.py`. A setting is a flag
`--max-num-seqs`, a variable `QUIRE_MAX_NUM_SEQS`, and a line `max_num_seqs = 64` of the TOML file that `--config` or
`QUIRE_CONFIG` names: the flag wins over the variable, the variable over the file. A wrong value, or an unknown `QUIRE_`
variable, is one line and exit status 2. A switch is turned off by `--no-NAME`. `all` means {verbs}.

Three more variables: `QUIRE_CACHE_DIR` is the folder of compiled kernels; `QUIRE_URL` is the service that `quire chat`,
`complete` and `top` use; OpenTelemetry's own variables turn spans on (see `deploy/README.md`).
"""


def settings_section() -> str:
    parts = [HEAD.format(verbs=", ".join(f"`{verb}`" for verb in VERBS))]
    for title, names in _sections().items():
        parts.append(f"### {title}\n\n| flag | default | allowed | verbs | meaning |\n|---|---|---|---|---|")
        fields = {field.name: field for field in dataclasses.fields(Settings)}
        parts[-1] += "".join(f"\n{_row(fields[name])}" for name in names)
        parts[-1] += "\n"
    return "\n".join(parts)


def _sections() -> dict[str, list[str]]:
    """Return the names of the settings by the comment above them."""
    found: dict[str, list[str]] = {}
    body = (ROOT / "service" / "config" / "settings.py").read_text().partition("class Settings:")[2]
    for comment, name in re.findall(r"^    # (\w+)$|^    (\w+): ", body, re.M):
        if comment:
            found[comment] = []
        else:
            found[list(found)[-1]].append(name)
    return found


def _row(field: dataclasses.Field[Any]) -> str:
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
    PAGE.write_text(PAGE.read_text().partition("## Settings\n")[0] + settings_section())
