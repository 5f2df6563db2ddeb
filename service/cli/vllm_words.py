"""Translates a vLLM command line into Quire's: spellings, values, and the flags of `vllm_flags`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.weights.formats.method import find_method
from service.cli.help import SectionHelp
from service.cli.vllm_flags import LOCAL_WORKERS, RENAMED, TOKENIZER, VARIABLES, VLLM_FLAGS, Values, VllmFlag
from service.cli.yaml_files import with_yaml_files
from service.config.settings import Settings
from service.errors import StartupError

SWITCH_WORDS = ("true", "false", "1", "0")
LISTS = ("--served-model-name", "--api-key", "--lora-modules")
"""Settings for which vLLM takes several words."""

OBJECTS = (
    *("--speculative-config", "--override-generation-config", "--default-chat-template-kwargs", "--hf-overrides"),
)
"""Settings that are JSON objects, for which vLLM also takes `--flag.key value`."""

GUARDS = ("--api-key", "--api-key-file")
"""Settings for which `None` is a literal value: dropping them would admit every client."""

COUNTS = ("--max-model-len", "--max-num-batched-tokens", "--max-num-seqs")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

VALUES: dict[str, dict[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--load-format": dict.fromkeys(
        ("auto", "hf", "gguf", "mistral", "bitsandbytes", "fastsafetensors", "runai_streamer", "instanttensor"),
        "safetensors",
    ),
    "--max-model-len": {"auto": "", "-1": ""},
    "--log-level": {"critical": "error", "trace": "debug"},
    "--reasoning-parser": {"olmo3": "deepseek_r1"},
    "--tool-call-parser": {
        "granite4": "hermes",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "olmo3": "pythonic",
        "qwen3_xml": "qwen3_coder",
    },
}
"""vLLM's values and their Quire equivalents; "" drops the flag."""

STORED_FORMATS = {
    "awq": ("awq",),
    "auto_awq": ("awq",),
    "awq_marlin": ("awq",),
    "gptq": ("gptq",),
    "auto_gptq": ("gptq",),
    "gptq_marlin": ("gptq",),
    "moe_wna16": ("awq", "gptq"),
    "compressed-tensors": ("compressed-tensors",),
    "modelopt": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
    "bitsandbytes": ("bitsandbytes",),
    "gguf": ("gguf",),
}
"""Values of --quantization that name the folder's storage format, and the matching methods in its config."""


@dataclass
class Translation:
    argv: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the log
    stored_format: str | None = None  # --quantization, if it names the folder's format
    num_local_workers: str | None = None
    tokenizer: str | None = None
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)  # from OBJECTS, by flag


def translate(argv: Sequence[str], flags: Mapping[str, argparse.Action]) -> Translation:
    """Translate the words after a verb; `flags` are the verb's own. Raises StartupError.

    Quire's own flags keep their meaning. Unknown words pass unchanged; the parser reports them.
    """
    done, words = Translation(), with_yaml_files(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            done.argv += [word, *words]
            break
        flag, value = _spelled(word, flags)
        head, _, key = flag.partition(".")
        if flag in flags:
            _take_setting(flag, value, flags[flag], words, done)
        elif key and head in OBJECTS and head in flags:
            _take_key(flag, value, words, done)
        elif (known := VLLM_FLAGS.get(head[2:])) is not None and flag.startswith("--"):
            _take_vllm_flag(flag, value, known, words, done)
        elif value is None and _is_switch_turned_off(flag):
            continue
        else:
            done.argv.append(word)
    if done.num_local_workers is not None:
        _note_local_workers(done, done.num_local_workers)
    if done.tokenizer is not None:
        _note_tokenizer(done, done.tokenizer)
    done.argv[:0] = [f"{flag}={json.dumps(found)}" for flag, found in done.objects.items()]
    return done


def with_stored_format(settings: Settings, stored_format: str | None) -> Settings:
    """Check that the format named by --quantization is the folder's. Raises StartupError.

    For an fp8 folder, fp8 means as stored.
    """
    if stored_format is None and settings.quantization != "fp8":
        return settings
    folder = settings.model or Path()
    try:
        found = find_method(folder)
    except ModelError as error:
        raise StartupError(str(error)) from None
    if stored_format is None:
        return replace(settings, quantization="auto") if found is not None and found[0] == "fp8" else settings
    is_gguf = found is None and any(folder.glob("*.gguf"))
    label = "gguf" if is_gguf else "16- or 32-bit" if found is None else found[0]
    if label.removesuffix("_fp4") not in STORED_FORMATS[stored_format]:
        raise StartupError(f"--quantization: {stored_format}: the folder's weights are {label} (leave the flag out)")
    return settings


def with_vllm_key(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Use VLLM_API_KEY if no setting has a key: a service locked under vLLM stays locked."""
    key = environ.get("VLLM_API_KEY")
    if not key or settings.api_key or settings.api_key_file is not None:
        return settings
    return replace(settings, api_key=(key,))


def vllm_variables(environ: Mapping[str, str]) -> str | None:
    """Return a note on vLLM's variables that are set, None if there are none. Only VLLM_API_KEY is read."""
    given = sorted(name for name in environ if name.startswith("VLLM_") and name != "VLLM_API_KEY")
    shown = (f"{name} (use {VARIABLES[name]})" if name in VARIABLES else name for name in given)
    return f"variables without effect: {', '.join(shown)}" if given else None


def _spelled(word: str, flags: Mapping[str, argparse.Action]) -> tuple[str, str | None]:
    """Return (flag, value after "=") in Quire's spelling. vLLM allows "_" for "-", and joined -O3 and -tp=2."""
    flag, equals, value = word.partition("=")
    if re.fullmatch(r"-O\d", word):
        flag, equals, value = "-O", "=", word[2:]
    head, dot, key = flag.partition(".")
    if head.startswith("--"):
        head = head.replace("_", "-")
    if head not in flags:
        head = RENAMED.get(head, head)
    return head + dot + key, value if equals else None


def _is_switch_turned_off(flag: str) -> bool:
    known = VLLM_FLAGS.get(flag.removeprefix("--no-")) if flag.startswith("--no-") else None
    return known is not None and known.values is Values.SWITCH


def _take_setting(flag: str, value: str | None, action: argparse.Action, words: list[str], done: Translation) -> None:
    if action.nargs == 0 or isinstance(action, SectionHelp):
        done.argv.append(flag if value is None else f"{flag}={value}")
        return
    if value is None and action.nargs == "?":
        value = words.pop(0) if words and words[0].lower() in SWITCH_WORDS else str(action.const)
    elif value is None:
        taken = _several(words) if flag in LISTS else words[:1]
        if not taken:
            done.argv.append(flag)  # the parser reports the missing value
            return
        value = ",".join(taken)
        del words[: 0 if flag in LISTS else 1]
    typed, value = value, _translated(flag, value, done)
    if flag in OBJECTS and (found := _object(value)) is not None:
        done.objects[flag] = found
    elif value or not typed:  # an empty value, as from a script's unset variable, is left to the parser to refuse
        done.argv.append(f"{flag}={value}")


def _take_key(flag: str, value: str | None, words: list[str], done: Translation) -> None:
    """Handle `--flag.a.b value`, and `--flag.a+ value,value`, which appends to a list."""
    if value is None and not words:
        raise StartupError(f"{flag}: no value")
    text = words.pop(0) if value is None else value
    head, *outer, last = flag.split(".")
    target = done.objects.setdefault(head, {})
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise StartupError(f"{flag}: {key} already has a value")
    if last.endswith("+"):
        target[last[:-1]] = [*target.get(last[:-1], []), *map(_json_or_text, text.split(","))]
    else:
        target[last] = _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _object(text: str) -> dict[str, Any] | None:
    found = _json_or_text(text)
    return found if isinstance(found, dict) else None


def _translated(flag: str, value: str, done: Translation) -> str:
    if flag == "--quantization" and value in STORED_FORMATS:
        done.stored_format = value
        return "auto"
    if value == "None" and flag not in GUARDS:
        return ""  # vLLM's word for the default
    if flag in COUNTS and (count := _COUNT.fullmatch(value)):
        return str(int(float(count[1]) * _FACTORS[count[2]]))
    return VALUES.get(flag, {}).get(value, value)


def _take_vllm_flag(flag: str, value: str | None, known: VllmFlag, words: list[str], done: Translation) -> None:
    if value is None and known.values is Values.ONE and words:
        value = words.pop(0)
    elif value is None and known.values is Values.SEVERAL:
        value = " ".join(_several(words))
    elif value is None and known.values is Values.SWITCH:
        value = words.pop(0) if words and words[0].lower() in SWITCH_WORDS else "true"
    if known.name == LOCAL_WORKERS:
        done.num_local_workers = value
        return
    if known.name == TOKENIZER:
        done.tokenizer = value
        return
    shown = flag if value is None or known.values is not Values.ONE else f"{flag} {value}"
    if known.values is Values.SWITCH and value in ("false", "False", "0") and not known.accepted:
        return  # turned off: no effect
    if not known.is_accepted(value):
        raise StartupError(f"{shown}: {known.reason}")
    done.notes.append(f"{shown} has no effect: {known.note}")


def _note_local_workers(done: Translation, value: str) -> None:
    known, given = VLLM_FLAGS[LOCAL_WORKERS], "--data-parallel-size="
    num_workers = next((word.removeprefix(given) for word in reversed(done.argv) if word.startswith(given)), "1")
    if value != num_workers:
        raise StartupError(f"--{LOCAL_WORKERS} {value}: {known.reason}")
    done.notes.append(f"--{LOCAL_WORKERS} {value} has no effect: {known.note}")


def _note_tokenizer(done: Translation, value: str) -> None:
    if value not in (word.removeprefix("--model=") for word in done.argv):
        raise StartupError(f"--{TOKENIZER} {value}: {VLLM_FLAGS[TOKENIZER].reason}")
    done.notes.append(f"--{TOKENIZER} {value} has no effect: it is the model's")


def _several(words: list[str]) -> list[str]:
    taken = []
    while words and not words[0].startswith("-"):
        taken.append(words.pop(0))
    return taken
