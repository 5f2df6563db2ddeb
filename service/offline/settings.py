"""Turns keywords of `LLM` into settings: flags of `quire serve` with "_", or vLLM's engine arguments."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from service.cli.models import with_model
from service.cli.vllm_flags import VLLM_FLAGS
from service.cli.vllm_words import translate, with_stored_format
from service.config.settings import SERVE, Settings
from service.config.sources import add_flags, read_settings
from service.errors import StartupError

log = logging.getLogger("quire.offline")

KEYWORDS = (
    "model", "revision", "download_dir", "served_model_name", "chat_template", "default_chat_template_kwargs",
    "generation_config", "override_generation_config", "dtype", "max_model_len", "load_format", "quantization",
    "kv_cache_dtype", "device", "block_size", "gpu_memory_utilization", "num_gpu_blocks", "swap_space",
    "preemption_mode", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk",
    "speculative_config", "tensor_parallel_size", "pooling", "enable_lora", "max_loras", "max_lora_rank",
    "lora_experts", "max_cpu_loras", "hf_overrides",
)  # fmt: skip
"""Settings that apply to an engine without a service."""

EMBEDDING = {"task": ("embed", "embedding"), "runner": ("pooling",), "convert": ("embed",)}
"""vLLM's keywords for an embedding model, without effect: every model here generates and embeds."""

MAX_BRANCHES = 128
NO_LIMIT = 1 << 31


def read_keywords(keywords: Mapping[str, Any]) -> Settings:
    """Return the settings with the model's folder, downloading if needed. None means the default.

    Ignores QUIRE_ variables and settings files. Raises ValueError that names the keyword.
    """
    try:
        return _settings({name: value for name, value in keywords.items() if not _says_nothing(name, value)})
    except StartupError as error:
        raise in_keywords(error) from None


def in_keywords(error: StartupError) -> ValueError:
    """Return the error with keywords in place of flags."""
    return ValueError(re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), str(error)))


def _says_nothing(name: str, value: Any) -> bool:
    return value is None or value in EMBEDDING.get(name, ())


def _settings(keywords: Mapping[str, Any]) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_flags(parser, SERVE)
    allowed = {f"--{name.replace('_', '-')}" for name in KEYWORDS}
    flags = {flag: action for flag, action in parser._option_string_actions.items() if flag in allowed}
    translation = translate([f"--{name.replace('_', '-')}={_text(value)}" for name, value in keywords.items()], flags)
    found, unknown = parser.parse_known_args([word for word in translation.argv if word.partition("=")[0] in allowed])
    unknown += [word for word in translation.argv if word.partition("=")[0] not in allowed]
    if unknown:
        raise StartupError(_unknown(unknown[0].partition("=")[0], parser))
    for note in translation.notes:
        log.info("%s", note)
    settings = read_settings(SERVE, found, {})
    settings = with_stored_format(with_model(settings), translation.stored_format)
    return replace(settings, max_n=MAX_BRANCHES, max_request_tokens=NO_LIMIT)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _unknown(flag: str, parser: argparse.ArgumentParser) -> str:
    if flag in parser._option_string_actions:
        return f"{flag}: is of `quire serve`, not of LLM"
    alike = get_close_matches(flag, [*(f"--{name.replace('_', '-')}" for name in KEYWORDS), *_vllm_flags()], n=1)
    return f"{flag}: unknown argument" + (f" (did you mean {alike[0]}?)" if alike else "")


def _vllm_flags() -> list[str]:
    return [f"--{name}" for name, flag in VLLM_FLAGS.items() if flag.note]
