"""Workloads of `vllm bench serve`: random lengths or a ShareGPT file, with gamma-distributed arrivals."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from service.bench.flag_values import positive_number, whole_number
from service.bench.load_client import random_ids
from service.bench.trace import TracedRequest
from service.errors import StartupError

NAMES = ("random", "sharegpt")
TOKENIZE_AT_ONCE = 16
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048
"""Limits on ShareGPT conversations, as in vLLM; others are skipped."""

MOST = 1 << 24


@dataclass(frozen=True)
class Dataset:
    requests: list[TracedRequest]
    prompts: list[list[int]] | None  # token ids; None: random ids of those lengths


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset-name",
        choices=NAMES,
        help="random lengths or a ShareGPT file, in place of --trace (default: --trace)",
    )
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's JSON (default: none)")
    parser.add_argument("--num-prompts", metavar="N", default="1000", help="requests of the dataset (default: 1000)")
    parser.add_argument("--random-input-len", metavar="N", default="1024", help="tokens of a prompt (default: 1024)")
    parser.add_argument("--random-output-len", metavar="N", default="128", help="tokens of an answer (default: 128)")
    parser.add_argument(
        "--random-range-ratio", metavar="X", default="0", help="lengths vary by this share up and down (default: 0)"
    )
    parser.add_argument("--sharegpt-output-len", metavar="N", help="tokens of an answer (default: as in the file)")
    parser.add_argument(
        "--request-rate", metavar="X", default="inf", help="requests/s; inf: all at once (default: inf)"
    )
    parser.add_argument(
        "--burstiness", metavar="X", default="1", help="shape of the gaps' gamma distribution; 1: Poisson (default: 1)"
    )
    parser.add_argument("--seed", metavar="N", default="0", help="seed of lengths and arrivals (default: 0)")


def read_rate(flags: argparse.Namespace) -> float:
    """Return --request-rate, which may be inf. Raises StartupError."""
    text: str = flags.request_rate
    return math.inf if text.lower() == "inf" else positive_number("--request-rate", text)


async def make_dataset(flags: argparse.Namespace, http: aiohttp.ClientSession, url: str, model: str) -> Dataset:
    """Return the requests that the flags describe; arrivals are in mean gaps. Raises StartupError."""
    generator = np.random.default_rng(whole_number("--seed", flags.seed, low=0, high=MOST))
    num_prompts = whole_number("--num-prompts", flags.num_prompts)
    if flags.dataset_name == "random":
        dataset = _random(flags, num_prompts, generator)
    else:
        dataset = await _sharegpt(flags, num_prompts, http, f"{url}/tokenize", model)
    burstiness = positive_number("--burstiness", flags.burstiness)
    times = arrivals(len(dataset.requests), burstiness, generator)
    requests = [replace(request, arrival=time) for request, time in zip(dataset.requests, times, strict=True)]
    return Dataset(requests, dataset.prompts)


def arrivals(num_requests: int, burstiness: float, generator: np.random.Generator) -> list[float]:
    """Return arrival times in mean gaps, scaled so that the last is `num_requests`, as in vLLM."""
    times = np.cumsum(generator.gamma(burstiness, 1 / burstiness, num_requests))
    scaled: list[float] = (times * (num_requests / times[-1])).tolist()
    return scaled


def _random(flags: argparse.Namespace, num_prompts: int, generator: np.random.Generator) -> Dataset:
    text = flags.random_range_ratio
    ratio = 0.0 if text in ("0", "0.0") else positive_number("--random-range-ratio", text, high=0.999)
    lengths: list[list[int]] = []
    for flag, text in (
        ("--random-input-len", flags.random_input_len),
        ("--random-output-len", flags.random_output_len),
    ):
        mean = whole_number(flag, text, high=MOST)
        low, high = max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio))
        lengths.append(generator.integers(low, high, num_prompts, endpoint=True).tolist())
    return Dataset([TracedRequest(prompt, output, 0.0) for prompt, output in zip(*lengths, strict=True)], None)


async def _sharegpt(
    flags: argparse.Namespace, num_prompts: int, http: aiohttp.ClientSession, url: str, model: str
) -> Dataset:
    if flags.dataset_path is None:
        raise StartupError("--dataset-path: missing (sharegpt needs its JSON file)")
    fixed = flags.sharegpt_output_len
    num_output = None if fixed is None else whole_number("--sharegpt-output-len", fixed, high=MOST)
    pairs = read_sharegpt(flags.dataset_path)
    random.Random(int(flags.seed)).shuffle(pairs)
    requests: list[TracedRequest] = []
    prompts: list[list[int]] = []
    while pairs and len(requests) < num_prompts:
        some, pairs = pairs[:TOKENIZE_AT_ONCE], pairs[TOKENIZE_AT_ONCE:]
        texts = [text for pair in some for text in pair]
        ids = await asyncio.gather(*(_tokenized(http, url, model, text) for text in texts))
        for prompt, answer in zip(ids[::2], ids[1::2], strict=True):
            length = len(answer) if num_output is None else num_output
            if min(len(prompt), length) >= MIN_TOKENS and _fits(len(prompt), length):
                requests.append(TracedRequest(len(prompt), length, 0.0))
                prompts.append(prompt)
    if len(requests) < num_prompts:
        raise StartupError(f"--num-prompts: {flags.dataset_path} has {len(requests)} that fit (at most that)")
    return Dataset(requests[:num_prompts], prompts[:num_prompts])


def _fits(num_prompt: int, num_output: int) -> bool:
    return num_prompt <= MAX_PROMPT_TOKENS and num_prompt + num_output <= MAX_TOKENS


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """Return the first two turns, of any role, of each conversation that has them. Raises StartupError if none has."""
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--dataset-path: {path}: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"--dataset-path: {path}: not ShareGPT's JSON: {error}") from None
    pairs = [_first_turns(entry) for entry in (entries if isinstance(entries, list) else ())]
    whole = [pair for pair in pairs if pair is not None]
    if not whole:
        raise StartupError(f"--dataset-path: {path}: not ShareGPT's JSON: no conversation of two turns")
    return whole


def _first_turns(entry: Any) -> tuple[str, str] | None:
    turns = (entry.get("conversations") or entry.get("conversation")) if isinstance(entry, dict) else None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns] if isinstance(turns, list) else []
    match texts:
        case [str(prompt), str(answer), *_]:
            return prompt, answer
    return None


async def texts_of(dataset: Dataset, http: aiohttp.ClientSession, url: str, model: str, vocab_size: int) -> list[str]:
    """Return the prompts as text. Raises StartupError."""
    lengths = [request.num_prompt_tokens for request in dataset.requests]
    ids = dataset.prompts or [random_ids(number, vocab_size, length) for number, length in enumerate(lengths)]
    texts: list[str] = []
    for first in range(0, len(ids), TOKENIZE_AT_ONCE):
        some = ids[first : first + TOKENIZE_AT_ONCE]
        texts += await asyncio.gather(*(_detokenized(http, f"{url}/detokenize", model, prompt) for prompt in some))
    return texts


async def _detokenized(http: aiohttp.ClientSession, url: str, model: str, ids: list[int]) -> str:
    try:
        async with http.post(url, json={"model": model, "tokens": ids}, allow_redirects=False) as response:
            if response.status != 200:
                raise StartupError(f"--url: {url} answers {response.status} (openai-chat needs it)")
            return str((await response.json())["prompt"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise StartupError(f"--url: {url}: {error or type(error).__name__}") from None


async def _tokenized(http: aiohttp.ClientSession, url: str, model: str, text: str) -> list[int]:
    try:
        async with http.post(url, json={"model": model, "prompt": text}, allow_redirects=False) as response:
            if response.status in (404, 405):
                raise StartupError(f"--url: {url} answers {response.status} (sharegpt needs it)")
            if response.status != 200:
                return []  # too long for the model: skipped like other such prompts
            ids: list[int] = (await response.json())["tokens"]
            return ids
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise StartupError(f"--url: {url}: {error or type(error).__name__}") from None
