"""Output tokens per second of CPU time with drafts and without, of the demo model.

    python -m tests.bench.drafting --config '{"method": "eagle3"}' --batch 1,8 --temperature 0
    python -m tests.bench.drafting --draft-layers 2

Rounds alternate in one process; CPU time, since others may use the machine. Texts are compared. `--draft-layers` drafts
with the model's own first layers, the only smaller model of its vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from model.sampling_params import SamplingParams
from model.text.tokenizer import Tokenizer
from model.weights.safetensors_file import read_safetensors
from service.config.settings import Settings
from service.config.speculative import parse_speculative_config
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.request import EngineRequest
from tests.support.demo_engine import DEMO
from tests.support.safetensors_bytes import save

QUESTIONS = (
    "Tell me a story about a fox and a lantern.",
    "how r u",
    "Tell me a story about a plumber and a chandelier.",
    "What is my name?",
    "Tell me a joke",
    "Count to ten",
    "Write a poem about the sea",
    "Tell me a short story about a bear",
    "What is the opposite of hot?",
    "My name is Gustavo. Tell me a story about a robot and a cake.",
    "List three animals",
    "What colour is the sky?",
    "Tell me a story about a wizard and a train.",
    "Explain how a transformer works",
    "Tell me a long story about two friends",
    "What is 7 plus 8?",
)
BEGIN, END, USER, ASSISTANT = 0, 1, 3, 4
MAX_TOKENS = 120


def answers(engine: Engine, requests: list[EngineRequest], batch: int) -> tuple[float, dict[str, list[int]]]:
    """Return tokens per second of CPU time, and each request's tokens."""
    received: dict[str, list[int]] = {}
    start_s = time.process_time()
    for first in range(0, len(requests), batch):
        for request in requests[first : first + batch]:
            engine.add_request(request)
        while engine.has_work:
            engine.step()
            for output in engine.drain_request_outputs():
                for part in output.parts:
                    received.setdefault(output.request_id, []).extend(part.token_ids)
    return sum(map(len, received.values())) / (time.process_time() - start_s), received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default='{"method": "eagle3"}', help="--speculative-config (default: eagle3)")
    parser.add_argument("--batch", default="1,8", help="sequences at once (default: 1,8)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--draft-layers", type=int, help="layers of the model as draft model (default: none)")
    flags = parser.parse_args()
    with TemporaryDirectory() as folder:
        compare(flags, flags.config if flags.draft_layers is None else draft_config(Path(folder), flags.draft_layers))


def draft_config(folder: Path, num_layers: int) -> str:
    """Write the demo model's first layers; return --speculative-config."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    stored = read_safetensors(DEMO / "model.safetensors")
    later = tuple(f"model.layers.{number}." for number in range(num_layers, config["num_hidden_layers"]))
    kept = {name: one.values().astype(np.float32) for name, one in stored.items() if not name.startswith(later)}
    save(folder / "model.safetensors", kept)
    return json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4})


def compare(flags: argparse.Namespace, config: str) -> None:
    tokenizer = Tokenizer.read(DEMO)
    requests = []
    for number, question in enumerate(QUESTIONS):
        prompt = (BEGIN, USER, *tokenizer.encode(question, add_special_tokens=False), END, ASSISTANT)
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=flags.temperature, seed=number)
        requests.append(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
    settings = Settings(model=DEMO, device="cpu", max_model_len=1024, num_gpu_blocks=1500, enable_prefix_caching=False)
    plain = build_engine(settings, progress=False).engine
    drafting = build_engine(
        replace(settings, speculative_config=parse_speculative_config(config)), progress=False
    ).engine
    for batch in map(int, flags.batch.split(",")):
        ratios, before = [], drafting.stats()
        for _ in range(flags.rounds):
            (without, wanted), (with_drafts, received) = (answers(one, requests, batch) for one in (plain, drafting))
            if received != wanted:
                raise SystemExit("texts differ")
            ratios.append(with_drafts / without)
        after = drafting.stats()
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, num_drafted)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"batch {batch}: {statistics.median(ratios):.2f} x ({spread}), {accepted:.0%} of drafts accepted",
            flush=True,
        )


if __name__ == "__main__":
    main()
