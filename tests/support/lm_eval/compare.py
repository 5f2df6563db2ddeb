"""lm-eval against a running server, and what it measured against a forward pass in plain NumPy that shares no code with
Quire's.

In an environment of its own: `pip install 'lm-eval[api]' transformers`. From the root, while `quire serve` runs:

    lm_eval --model local-completions --tasks quire_endings,quire_stories --include_path tests/support/lm_eval \\
        --model_args model=demo,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=model/demo,max_length=2047 \\
        --log_samples --output_path /tmp/lm_eval
    python tests/support/lm_eval/compare.py /tmp/lm_eval
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

DEMO = Path("model/demo")
TOLERANCE = 1e-3
MAX_NEW_TOKENS = 24


class PlainLlama:
    """The demo model in float32, all positions at once."""

    def __init__(self, folder: Path):
        self._config = json.loads((folder / "config.json").read_text())
        data = (folder / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        self._weights = {name: self._float32(data[start:], entry) for name, entry in header.items()}

    @staticmethod
    def _float32(data: bytes, entry: dict) -> np.ndarray:
        first, last = entry["data_offsets"]
        bits = np.frombuffer(data[first:last], np.uint16).astype(np.uint32) << 16  # bfloat16
        return bits.view(np.float32).reshape(entry["shape"])

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """float32[T, V]"""
        table = self._weights["model.embed_tokens.weight"]
        x = table[token_ids]
        for layer in range(self._config["num_hidden_layers"]):
            x = x + self._attention(layer, self._norm(x, f"model.layers.{layer}.input_layernorm"))
            x = x + self._mlp(layer, self._norm(x, f"model.layers.{layer}.post_attention_layernorm"))
        logits = self._norm(x, "model.norm") @ table.T
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"])
        return x / scale * self._weights[f"{name}.weight"]

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        width, length = self._config["head_dim"], len(x)
        weights = (self._weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo")
        to_q, to_k, to_v, to_out = weights
        q = self._rotated((x @ to_q.T).reshape(length, heads, width))
        k = self._rotated((x @ to_k.T).reshape(length, kv_heads, width)).repeat(heads // kv_heads, axis=1)
        v = (x @ to_v.T).reshape(length, kv_heads, width).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(width)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return np.einsum("hts,shd->thd", shares, v).reshape(length, -1) @ to_out.T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        speeds = self._config["rope_parameters"]["rope_theta"] ** -(np.arange(half) / half)
        angles = (np.arange(len(x))[:, None] * speeds)[:, None].astype(np.float32)
        low, high = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        gate, up, down = (
            self._weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        gated = x @ gate.T
        return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def samples(folder: Path, task: str) -> Iterator[dict]:
    for path in folder.rglob(f"samples_{task}_*.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


def main(folder: Path) -> None:
    model, tokenizer = PlainLlama(DEMO), AutoTokenizer.from_pretrained(DEMO)
    end_id = tokenizer.eos_token_id

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    differences = []
    for sample in samples(folder, "quire_endings"):
        for arguments, [[told, is_greedy]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            start, whole = ids_of(arguments["arg_0"]), ids_of(arguments["arg_0"] + arguments["arg_1"])
            rows = model.logprobs(whole)[len(start) - 1 : -1]
            end = whole[len(start) :]
            differences.append(abs(float(told) - rows[np.arange(len(end)), end].sum()))
            assert (is_greedy == "True") == bool((rows.argmax(axis=-1) == end).all())
    num_stories = 0
    for sample in samples(folder, "quire_stories"):
        start, said = ids_of(sample["arguments"]["gen_args_0"]["arg_0"]), []
        while len(said) < MAX_NEW_TOKENS and "." not in tokenizer.decode(said):
            said.append(int(model.logprobs(start + said)[-1].argmax()))
            if said[-1] == end_id:
                break
        text = tokenizer.decode(start + said, skip_special_tokens=True)[len(tokenizer.decode(start)) :]
        assert sample["resps"][0][0] == text.split(".")[0]
        num_stories += 1
    assert differences, "no samples of quire_endings"
    assert num_stories, "no samples of quire_stories"
    assert max(differences) < TOLERANCE
    print(f"{len(differences)} loglikelihoods, the worst off by {max(differences):.1e}; {num_stories} stories alike")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
