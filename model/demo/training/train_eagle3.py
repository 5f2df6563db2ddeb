"""Trains the demo model's EAGLE-3 head on the CPU and writes its folder, in the layout of the speculators library.

    python -m model.demo.training.train_eagle3 --out FOLDER
    python -m model.demo.training.train_eagle3 --begin FOLDER --first-seed 9100 --out FOLDER   # train it further

Needs NumPy only. The head learns the model's own next-token distributions on documents of unseen seeds, over
DRAFT_STEPS steps: the first from the model's states, each later one from the head's own output. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from documents import HERE, NOT_LEARNED, rendered_documents, targets_of
from gradients import (
    Tensor,
    add,
    attention,
    concat,
    cross_entropy,
    heads,
    joined_heads,
    later,
    linear,
    propagate,
    rms_norm,
    rotate,
    silu_mul,
)

from model.batch import Batch
from model.config import ModelConfig
from model.families.llama import Llama
from model.kv_cache import allocate
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model
from model.weights.safetensors_file import read_safetensors

STATE_LAYERS = (1, 3, 5)
DRAFT_VOCAB_SIZE = 1408
INTERMEDIATE_SIZE = 128
DRAFT_STEPS = 3
STEP_WEIGHTS = (1.0, 0.8, 0.6)
WINDOW = 192  # tokens
WINDOWS_PER_STEP = 6
BLOCK_SIZE = 16
FIRST_SEED = 9000
HELD_OUT_SEED = 8999
DOCUMENTS_PER_SEED = 2000
PEAK_LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 15


class Target:
    """The demo model: its states and next-token logits over whole windows."""

    def __init__(self) -> None:
        self.config = ModelConfig.read(HERE)
        self.ops = NumpyOps()
        self.model: Llama = load_model(HERE, self.config, self.ops, WINDOW)
        num_blocks = WINDOWS_PER_STEP * WINDOW // BLOCK_SIZE
        self._kv = allocate(self.ops, self.config, num_blocks, BLOCK_SIZE)
        self._tables = np.arange(num_blocks, dtype=np.int32).reshape(WINDOWS_PER_STEP, -1)

    def run(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """windows [N, T] -> states [N, T, 3 H], logits [N, T, V]."""
        n, t = windows.shape
        positions = np.tile(np.arange(t, dtype=np.int32), n)
        blocks = self._tables[np.repeat(np.arange(n), t), positions // BLOCK_SIZE].astype(np.int64)
        batch = Batch(
            token_ids=windows.ravel().astype(np.int32),
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=self._tables[:n],
            context_lens=np.full(n, t, np.int32),
            query_start=np.arange(0, n * t + 1, t, dtype=np.int32),
            logit_rows=None,
            num_decodes=0,
            num_tokens=n * t,
            num_sequences=n,
            max_query_len=t,
        )
        states = np.empty((n * t, len(STATE_LAYERS) * self.config.hidden_size), np.float32)
        hidden = self.model.hidden(batch, self._kv, STATE_LAYERS, states)
        return states.reshape(n, t, -1), self.model.logits(hidden, None).reshape(n, t, -1)


class Head:
    """Weights by their names in the file."""

    def __init__(self, target: Target, draft_ids: np.ndarray):
        config, rng = target.config, np.random.default_rng(0)
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        shapes = {
            "fc": (hidden, 3 * hidden),
            "layers.0.self_attn.q_proj": (width, 2 * hidden),
            "layers.0.self_attn.k_proj": (config.num_kv_heads * config.head_dim, 2 * hidden),
            "layers.0.self_attn.v_proj": (config.num_kv_heads * config.head_dim, 2 * hidden),
            "layers.0.self_attn.o_proj": (hidden, width),
            "layers.0.mlp.gate_proj": (INTERMEDIATE_SIZE, hidden),
            "layers.0.mlp.up_proj": (INTERMEDIATE_SIZE, hidden),
            "layers.0.mlp.down_proj": (hidden, INTERMEDIATE_SIZE),
        }
        weights = {name: rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        weights |= {f"layers.0.{name}": np.ones(hidden) for name in norms} | {"norm": np.ones(hidden)}
        weights["fc"] *= 0.3
        weights["fc"][:, -hidden:] += np.eye(hidden)  # begin with the last state
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"layers.0.{name}"] *= 0.3
        weights["norm"] = np.array(target.model.weights.final_norm, np.float32)
        weights["lm_head"] = np.array(target.model.weights.lm_head.data[draft_ids], np.float32)
        self.weights = {f"{name}.weight": Tensor(np.array(value, np.float32)) for name, value in weights.items()}
        self.config = config
        self.embedding = np.array(target.model.weights.embedding, np.float32)
        self._cos, self._sin = (np.array(table, np.float32) for table in _rotation(target))

    def losses(self, tokens: np.ndarray, states: np.ndarray, wanted: np.ndarray, weight: np.ndarray) -> list[Tensor]:
        """Return each step's loss, and keep its logits. tokens int [N, T + 1]; the rest as `examples` yields it."""
        embedded = Tensor(self.embedding[tokens[:, 1:]])
        hidden = linear(Tensor(states), self.weights["fc.weight"])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        losses = []
        self.logits: list[np.ndarray] = []
        for step in range(DRAFT_STEPS):
            hidden, logits, key, value = self._step(embedded, hidden, keys, values)
            # A later step's row sees drafted states one row earlier each.
            keys = [*keys[:1], *(later(one, 2) for one in keys[1:]), key]
            values = [*values[:1], *(later(one, 2) for one in values[1:]), value]
            is_drafted = np.arange(weight.shape[1]) >= step
            losses.append(cross_entropy(logits, wanted, weight * is_drafted * np.float32(STEP_WEIGHTS[step])))
            self.logits.append(logits.value)
            hidden = later(hidden)
        return losses

    def _step(
        self, embedded: Tensor, hidden: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights, layer = self.weights, "layers.0."
        normed = rms_norm(embedded, weights[layer + "input_layernorm.weight"])
        x = concat(normed, rms_norm(hidden, weights[layer + "hidden_norm.weight"]))
        projected = [linear(x, weights[f"{layer}self_attn.{name}_proj.weight"]) for name in "qkv"]
        q = rotate(heads(projected[0], self.config.num_heads, 1), self._cos, self._sin)
        groups = self.config.num_heads // self.config.num_kv_heads
        k = rotate(heads(projected[1], self.config.num_kv_heads, groups), self._cos, self._sin)
        v = heads(projected[2], self.config.num_kv_heads, groups)
        shifted_k = [*keys[:1], *(later(one, 2) for one in keys[1:]), k]
        shifted_v = [*values[:1], *(later(one, 2) for one in values[1:]), v]
        attended = joined_heads(attention(q, shifted_k, shifted_v))
        residual = add(hidden, linear(attended, weights[layer + "self_attn.o_proj.weight"]))
        normed = rms_norm(residual, weights[layer + "post_attention_layernorm.weight"])
        gate, up = (linear(normed, weights[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        out = add(residual, linear(silu_mul(gate, up), weights[layer + "mlp.down_proj.weight"]))
        return out, linear(rms_norm(out, weights["norm.weight"]), weights["lm_head.weight"]), k, v


def _rotation(target: Target) -> tuple[np.ndarray, np.ndarray]:
    count = WINDOW - 2
    rotation = target.model.weights.layers[0].rotation
    return rotation.cos[:count], rotation.sin[:count]


def windows_of(seed: int, num_documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets [windows, WINDOW]; `targets` at t is the token at t + 1 or NOT_LEARNED."""
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    encodings = tokenizer.encode_batch_fast(list(rendered_documents(seed, num_documents)), add_special_tokens=False)
    tokens = np.concatenate([np.asarray(encoding.ids, np.uint16) for encoding in encodings])
    targets = targets_of(tokens)
    count = len(targets) // WINDOW * WINDOW
    return tokens[:count].reshape(-1, WINDOW), targets[:count].reshape(-1, WINDOW)


def examples(target: Target, draft_ids: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield batches: tokens [N, T + 1], states [N, T, 3 H], the model's distributions of the token after next over the
    draft vocabulary [N, T, Vd], weights [N, T], and its likeliest tokens [N, T]."""
    tokens, targets = windows_of(seed, DOCUMENTS_PER_SEED)
    order = np.random.default_rng(seed).permutation(len(tokens))
    for start in range(0, len(order) - WINDOWS_PER_STEP + 1, WINDOWS_PER_STEP):
        picked = order[start : start + WINDOWS_PER_STEP]
        states, logits = target.run(tokens[picked])
        logits = logits[:, 1:-1]
        best = logits.argmax(axis=-1)
        total = np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
        wanted = np.exp(logits[..., draft_ids] - logits.max(axis=-1, keepdims=True)) / total
        weight = (targets[picked][:, 1:-1] != NOT_LEARNED).astype(np.float32)
        yield tokens[picked][:, : WINDOW - 1].astype(np.int64), states[:, : WINDOW - 2], wanted, weight, best


def draft_vocabulary() -> np.ndarray:
    """Return the ids that the model says most often, ascending."""
    targets = windows_of(FIRST_SEED - 2, DOCUMENTS_PER_SEED)[1]
    counts = np.bincount(targets[targets != NOT_LEARNED], minlength=1)
    return np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB_SIZE])


def learning_rate(step: int, num_steps: int) -> float:
    if step < NUM_WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / NUM_WARMUP_STEPS
    progress = (step - NUM_WARMUP_STEPS) / (num_steps - NUM_WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(target: Target, head: Head, draft_ids: np.ndarray, num_steps: int, seed: int) -> None:
    """Adam over batches of new documents, of `seed` and the next ones."""
    moments = {name: (np.zeros_like(one.value), np.zeros_like(one.value)) for name, one in head.weights.items()}
    started_s, step = time.monotonic(), 0
    while step < num_steps:
        for tokens, states, wanted, weight, _ in examples(target, draft_ids, seed):
            losses = head.losses(tokens, states, wanted, weight / weight.sum())
            total = losses[0]
            for loss in losses[1:]:
                total = add(total, loss)
            propagate(total)
            _adam(head, moments, step, learning_rate(step, num_steps))
            if step % 20 == 0:
                shown = " ".join(f"{float(loss.value):.3f}" for loss in losses)
                print(f"step {step} losses {shown} after {time.monotonic() - started_s:.0f} s", flush=True)
            step += 1
            if step == num_steps:
                return
        seed += 1


def _adam(head: Head, moments: dict[str, tuple[np.ndarray, np.ndarray]], step: int, rate: float) -> None:
    norm = math.sqrt(sum(float(np.sum(one.gradient**2)) for one in head.weights.values()))
    for name, tensor in head.weights.items():
        gradient = tensor.gradient * np.float32(min(1.0, 1.0 / norm))
        first, second = moments[name]
        first += 0.1 * (gradient - first)
        second += 0.05 * (gradient**2 - second)
        corrected = first / (1 - 0.9 ** (step + 1)) / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8)
        tensor.value -= np.float32(rate) * corrected
        tensor.gradient = None


def held_out_acceptance(target: Target, head: Head, draft_ids: np.ndarray) -> list[float]:
    """Return how often each draft step's best token is the model's."""
    right, count = np.zeros(DRAFT_STEPS), np.zeros(DRAFT_STEPS)
    for number, (tokens, states, wanted, weight, best) in enumerate(examples(target, draft_ids, HELD_OUT_SEED)):
        head.losses(tokens, states, wanted, weight)
        for step, logits in enumerate(head.logits):
            rows = (weight > 0) & (np.arange(weight.shape[1]) >= step)
            right[step] += np.sum(draft_ids[logits.argmax(axis=-1)][rows] == best[rows])
            count[step] += rows.sum()
        if number == 15:
            break
    return (right / count).tolist()


def write_folder(head: Head, draft_ids: np.ndarray, folder: Path) -> None:
    """Write bfloat16 weights and the config."""
    target = head.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, tensor in head.weights.items():
        bits = np.ascontiguousarray(tensor.value, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tensors[name] = "BF16", rounded.astype(np.uint16)
    known = np.zeros(target.vocab_size, np.bool_)
    known[draft_ids] = True
    tensors["d2t"] = "I64", (draft_ids - np.arange(len(draft_ids))).astype(np.int64)
    tensors["t2d"] = "BOOL", known
    header, offset = {}, 0
    for name, (dtype, values) in sorted(tensors.items(), key=lambda pair: -pair[1][1].itemsize):
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": (offset, offset + values.nbytes)}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            file.write(tensors[name][1].tobytes())
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(draft_ids),
        "norm_before_residual": False,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": STATE_LAYERS,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": target.hidden_size,
            "intermediate_size": INTERMEDIATE_SIZE,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFT_STEPS}],
            "verifier": {"name_or_path": "..", "architectures": ["LlamaForCausalLM"]},
        },
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "eagle3")
    parser.add_argument("--begin", type=Path, help="folder of a head to train further (default: a new head)")
    parser.add_argument("--steps", type=int, default=560, help="batches to train on (default: 560)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of the documents (default: 9000)")
    arguments = parser.parse_args()
    target, draft_ids = Target(), draft_vocabulary()
    head = Head(target, draft_ids)
    if arguments.begin is not None:
        stored = read_safetensors(arguments.begin / "model.safetensors")
        for name, tensor in head.weights.items():
            tensor.value = stored[name].values().astype(np.float32)
    train(target, head, draft_ids, arguments.steps, arguments.first_seed)
    write_folder(head, draft_ids, arguments.out)
    shares = " ".join(f"{share:.3f}" for share in held_out_acceptance(target, head, draft_ids))
    print(f"drafts that are the model's likeliest token, by step: {shares}")


if __name__ == "__main__":
    main()
