"""`--help` of verbs with settings.

Bare `--help` lists the most used flags, `--help=engine` a section, `--help=len` the flags (also vLLM's) with this word
in their names, `--help=all` all.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from service.cli.vllm_flags import RENAMED, VLLM_FLAGS, VllmFlag
from service.config.settings import SECTIONS, Settings

SHORT = (
    "model", "served_model_name", "dtype", "max_model_len", "quantization", "tool_call_parser",
    "device", "gpu_memory_utilization", "max_num_seqs", "swap_space", "enable_prefix_caching",
    "redis_url", "data_dir", "host", "port", "api_key_file", "log_level",
)  # fmt: skip


def sections() -> dict[str, list[str]]:
    """Return the settings' names by section."""
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(Settings):
        if field.name in SECTIONS:
            found[SECTIONS[field.name]] = []
        found[list(found)[-1]].append(field.name)
    return found


class SectionHelp(argparse.Action):
    """`--help`, `--help=SECTION`, `--help=PART-OF-A-FLAG` and `--help=all`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        names = ", ".join(_topics())
        text = f"the most used flags, a section's ({names}), or flags with a word in their names"
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", const="", metavar="SECTION", help=text)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values == "all":
            parser.print_help()
        elif values == "":
            chosen = {title: [name for name in names if name in SHORT] for title, names in sections().items()}
            print(_text(parser, chosen))
        elif values in _topics():
            print(_text(parser, {title: names for title, names in sections().items() if title.lower() == values}))
        elif found := _found(parser, values):
            print(found)
        else:
            parser.error(f"{option}: {values!r} is no section ({', '.join(_topics())}), and no flag has it in its name")
        parser.exit()


def _found(parser: argparse.ArgumentParser, word: str) -> str:
    """Return help on flags whose names contain `word`; "" if there are none."""
    part = word.lstrip("-").replace("_", "-").lower()
    formatter = argparse.HelpFormatter(parser.prog, max_help_position=32)
    actions = [action for action in parser._actions if any(part in flag for flag in action.option_strings)]
    formatter.start_section("Flags")
    formatter.add_arguments(actions)
    formatter.end_section()
    formatter.start_section("vLLM's")
    renamed = {name: f"same as {target}" for name, target in RENAMED.items() if part in name}
    notes = {f"--{name}": _fate(flag) for name, flag in VLLM_FLAGS.items() if part in name}
    for name, text in (renamed | notes).items():
        formatter.add_argument(argparse.Action([name], "", nargs=0, help=text.replace("%", "%%")))
    formatter.end_section()
    return formatter.format_help() if actions or renamed or notes else ""


def _fate(flag: VllmFlag) -> str:
    if flag.accepted:
        return f"{', '.join(flag.accepted)}: no effect ({flag.note}); refused otherwise: {flag.reason}"
    return f"no effect: {flag.note}" if flag.note else f"refused: {flag.reason}"


def _topics() -> list[str]:
    return [*(title.lower() for title in sections() if title != "All"), "all"]


def _text(parser: argparse.ArgumentParser, shown: dict[str, list[str]]) -> str:
    formatter = argparse.HelpFormatter(parser.prog, max_help_position=32)
    formatter.add_usage(f"{parser.prog} [MODEL] [flags]", [], [])
    formatter.add_text(parser.description)
    for title, names in shown.items():
        settings = [action for action in parser._actions if action.dest in names and action.nargs != 0]
        others = [action for action in parser._actions if action.dest not in Settings.__dataclass_fields__]
        first = title == next(iter(shown))
        formatter.start_section(title)
        formatter.add_arguments([*(others if first and len(shown) > 1 else []), *settings])
        formatter.end_section()
    formatter.add_text(f"More: --help={' --help='.join(_topics())}")
    return formatter.format_help()
