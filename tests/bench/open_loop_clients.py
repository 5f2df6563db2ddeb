"""Does the client, or a server's first run, decide the open loop's percentiles?

`python -m tests.bench.open_loop_clients --trace chat.json --rate 60 --order "plain bench plain, bench plain"` starts a
fresh `quire serve` for each comma-separated group (Llama-3.1-8B's shape, random weights, a tokenizer of as many tokens)
and runs the named clients against it, one after the other:

- `plain`: one process, asyncio and aiohttp, that parses every chunk with `json`;
- `bench`: `quire bench serve` with eight processes; `bench1`: with one.

It prints TTFT and gap percentiles of every run, the seconds that its sample covers, the cores that its clients used,
the same percentiles for the first and second half of the requests, and what the run added to the counters of COUNTERS.
`plain` sends other prompts in every run of a server, `bench` always the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.bench import serve as bench_serve
from service.bench.load_client import Answer, Task, body_of
from service.bench.trace import read_trace

VOCAB_SIZE = 128256
COUNTERS = re.compile(r"^(\S*(?:swap|evict|preempt|prefix_cache)\S*_total)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
READY_WITHIN_S = 180.0
REPOSITORY = Path(__file__).resolve().parents[2]

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128009,
    "bos_token_id": 128000,
}


def write_folder(folder: Path) -> None:
    """Write a model folder without weights; every token id is its own word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    vocab |= {f"w{number:x}": number for number in range(len(vocab), VOCAB_SIZE)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))


class Server:
    """Start a fresh `quire serve` of the folder."""

    def __init__(self, folder: Path, data_dir: Path, flags: list[str]):
        command = [sys.executable, "-m", "service.cli.entry", "serve", "--port", "0", "--model", str(folder)]
        self._log = open(data_dir / "log", "w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--load-format", "dummy", "--data-dir", str(data_dir / "redis"), *flags],
            cwd=REPOSITORY,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.url = self._await_url(data_dir / "log")

    def _await_url(self, log: Path) -> str:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if found := re.search(r"Quire serves \S+ at (https?://\S+)", log.read_text(encoding="utf-8")):
                return found[1]
            time.sleep(0.1)
        raise SystemExit(f"quire serve did not become ready:\n{log.read_text(encoding='utf-8')}")

    def stop(self) -> list[str]:
        """Return the slow steps logged with `--log-level debug`."""
        self._process.terminate()
        self._process.wait(60)
        self._log.seek(0)
        with self._log:
            return [line.strip() for line in self._log if "slow step" in line]


async def run_plain(plan: bench_serve.Plan, model: str, first_number: int) -> list[Answer]:
    """Send every request from this process and parse every chunk with `json.loads`."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=plan.max_seconds)
    task = Task(plan.url, None, model, plan.vocab_size, plan.max_seconds, [])
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        start_s = time.monotonic() + 0.5
        return await asyncio.gather(
            *(
                _ask_plainly(http, plan.url, task, number, request, start_s + request.arrival / plan.rate)
                for number, request in enumerate(plan.requests, first_number)
            )
        )


async def _ask_plainly(http, url, task, number, request, due_s) -> Answer:
    body = body_of(task, number, request.num_prompt_tokens, request.num_output_tokens)
    answer = Answer()
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    answer.sent_s = time.monotonic() - due_s
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{url}/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            answer.error = f"HTTP {response.status}"
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if chunk.get("choices"):
                    answer.chunks_s.append(time.monotonic() - due_s)
                if chunk.get("usage"):
                    answer.num_tokens = chunk["usage"]["completion_tokens"]
    answer.end_s = time.monotonic() - due_s
    return answer


def run_client(kind: str, plan: bench_serve.Plan, model: str, number: int) -> tuple[list[Answer], float]:
    """Return the answers, and the clients' CPU seconds."""
    whose = resource.RUSAGE_SELF if kind == "plain" else resource.RUSAGE_CHILDREN
    before = resource.getrusage(whose)
    first_number = (number + 1) * 1_000_000
    drive = run_plain(plan, model, first_number) if kind == "plain" else bench_serve.drive(plan, model)
    answers = asyncio.run(drive)
    after = resource.getrusage(whose)
    return answers, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def counters(url: str) -> dict[str, float]:
    """Return COUNTERS from `/metrics`, summed over labels."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        found = COUNTERS.findall(await response.text())
    sums: dict[str, float] = {}
    for name, value in found:
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def percentiles(values: list[float]) -> list[float]:
    """Return p50, p90, p99."""
    return [round(float(value), 1) for value in np.percentile(values, (50, 90, 99))] if values else []


def figures(plan: bench_serve.Plan, answers: list[Answer], cpu_s: float, num_clients: int) -> dict:
    """Figures of one run, in milliseconds, and the length of its sample."""
    total_s = max(each.arrival / plan.rate + answer.end_s for each, answer in zip(plan.requests, answers, strict=True))
    half = len(answers) // 2
    parts = {"all": answers, "first_half": answers[:half], "second_half": answers[half:]}
    record = {
        "sample_s": round(plan.requests[-1].arrival / plan.rate, 1),
        "total_s": round(total_s, 1),
        "num_errors": sum(answer.error is not None for answer in answers),
        "client_cores": round(cpu_s / total_s, 2),
        "client_processes": num_clients,
        "client_lag_ms": percentiles([1e3 * answer.sent_s for answer in answers]),
    }
    for name, part in parts.items():
        record[name] = {
            "ttft_ms": percentiles([1e3 * answer.chunks_s[0] for answer in part if answer.chunks_s]),
            "gap_ms": percentiles([1e3 * (b - a) for answer in part for a, b in pairwise(answer.chunks_s)]),
        }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--num-requests", type=int, default=900)
    parser.add_argument("--order", default="plain bench plain, bench plain")
    parser.add_argument("--flags", default="--max-num-seqs 512", help="of quire serve, besides the folder")
    parser.add_argument("--url", help="a running service instead; --order is then one group")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    requests = read_trace(flags.trace)[: flags.num_requests]
    runs = []
    for group_number, group in enumerate(flags.order.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "llama-3.1-8b"
            folder.mkdir()
            write_folder(folder)
            server = None if flags.url else Server(folder, Path(name), flags.flags.split())
            try:
                for number, kind in enumerate(group.split()):
                    num_clients = 8 if kind == "bench" else 1
                    plan = bench_serve.Plan(
                        url=flags.url or server.url,
                        api_key=None,
                        rate=flags.rate,
                        num_clients=num_clients,
                        max_seconds=300,
                        slo_ttft_ms=1000,
                        slo_gap_ms=50,
                        vocab_size=4096,
                        requests=requests,
                    )
                    before = asyncio.run(counters(plan.url))
                    answers, cpu_s = run_client(kind, plan, asyncio.run(bench_serve.first_model(plan)), number)
                    after = asyncio.run(counters(plan.url))
                    added = {name: value - before.get(name, 0) for name, value in after.items()}
                    run = {"server": group_number, "run": number, "client": kind, "ended": time.strftime("%H:%M:%S")}
                    run["counters"] = {name: value for name, value in added.items() if value}
                    runs.append(run | figures(plan, answers, cpu_s, num_clients))
                    print(json.dumps(runs[-1]), flush=True)
            finally:
                if server is not None:
                    print("\n".join(server.stop()), flush=True)
    record = {"bench": "open_loop_clients", "rate": flags.rate, "num_requests": len(requests), "runs": runs}
    record |= {"trace": flags.trace.stem, "flags": flags.flags, "cores": os.cpu_count()}
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
