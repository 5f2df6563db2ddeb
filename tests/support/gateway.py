"""A gateway for tests: a small tokenizer, a chat template, a memory queue, a scripted worker, a real port."""

from __future__ import annotations

import functools
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from model.text.grammar_matcher import GrammarCompiler
from service.config.settings import Settings
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from tests.fakes.kept_grammar_process import kept_grammar_processes
from tests.fakes.queue.gateway import MemoryGatewayQueue, MemoryIngress
from tests.fakes.queue.queue_data import QueueData
from tests.fakes.queue.worker import MemoryWorkerQueue
from tests.fakes.scripted_worker import Script, ScriptedWorker
from tests.support.make_tokenizers import qwen_style

MODEL = "scripted"
MAX_POSITION = 512
VOCAB_PADDING = 3  # logits without a token
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write a model folder without weights: config, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    qwen_style(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    vocab = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in vocab["added_tokens"]}
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": max(*vocab["model"]["vocab"].values(), *ids.values()) + 1 + VOCAB_PADDING,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITION,
        "torch_dtype": "float32",
        "eos_token_id": ids["<|im_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    return folder


def read_served_model(settings: Settings) -> ServedModel:
    """Read the model, or return the one kept from the same settings and files.

    It is immutable, and compiling its chat template takes longer than most tests.
    """
    folder = settings.model
    outside = settings.chat_template, settings.lora_modules.modules, settings.generation_config != "auto"
    if folder is None or any(outside):  # other files are read
        return ServedModel.read(settings)
    stats = ((str(path), path.stat()) for path in sorted(folder.iterdir()))
    return _kept_model(settings, tuple((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats))


@functools.lru_cache(maxsize=32)
def _kept_model(settings: Settings, files: tuple[tuple[str, int, int, int], ...]) -> ServedModel:
    return ServedModel.read(settings)


def speech(model: ServedModel, text: str, *, per_step: int = 1, **how) -> Script:
    """Return a script that generates `text` and EOS."""
    ids = [*model.tokenizer.encode(text), model.eos_token_ids[0]]
    return Script([ids[i : i + per_step] for i in range(0, len(ids), per_step)], **how)


def compiler_of(model: ServedModel) -> GrammarCompiler:
    """Return the grammar compiler of a worker of this model."""
    return GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)


class QuickQueue(MemoryGatewayQueue):
    """Queue that waits for ingress entries in short steps, so that a gateway closes at once."""

    def __init__(self, data: QueueData | None = None, ingress: type[QuickIngress] | None = None) -> None:
        super().__init__(data)
        self.ingress = (ingress or QuickIngress)(self.data)


class QuickIngress(MemoryIngress):
    async def fetch_entries(self, producers, max_entries, wait_s):
        return await super().fetch_entries(producers, max_entries, min(wait_s, 0.02))


@dataclass(frozen=True)
class Gateway:
    """An open gateway with its queue, worker and HTTP client."""

    url: str
    http: aiohttp.ClientSession
    queue: MemoryGatewayQueue
    worker: ScriptedWorker
    model: ServedModel

    async def post(self, path: str, body: object, **how) -> tuple[int, dict]:
        """Return status and JSON of a POST; bytes are sent unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **how.pop("headers", {})}
        async with self.http.post(self.url + path, data=data, headers=headers, **how) as response:
            return response.status, await response.json()

    async def get(self, path: str, **how) -> tuple[int, dict]:
        async with self.http.get(self.url + path, **how) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict) -> list[str]:
        """Return the data of all events of a stream."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        return [line[len("data: ") :] for line in text.split("\n") if line.startswith("data: ")]


@asynccontextmanager
async def beside(gateway: Gateway, folder: Path, **settings):
    """Open another gateway on the same queue and worker."""
    chosen = Settings(**{"model": folder, "served_model_name": MODEL, "port": 0, "drain_timeout": 0.2, **settings})
    with kept_grammar_processes():
        async with serving(chosen, read_served_model(chosen), gateway.queue) as url:
            yield replace(gateway, url=url)


@asynccontextmanager
async def open_gateway(folder: Path, queue: MemoryGatewayQueue | None = None, **settings):
    """Open a Gateway over a folder of `write_model`; its worker answers "Hello world." to everything."""
    chosen = Settings(**{"model": folder, "served_model_name": MODEL, "port": 0, "drain_timeout": 0.2, **settings})
    queue = queue or QuickQueue()
    model = read_served_model(chosen)
    worker = ScriptedWorker(MemoryWorkerQueue(queue.data), MODEL, lambda job: speech(model, "Hello world."))
    with kept_grammar_processes():
        async with worker.working(), serving(chosen, model, queue) as url, aiohttp.ClientSession() as http:
            yield Gateway(url, http, queue, worker, model)
    await queue.close()
