"""EAGLE-3 draft heads (Li et al.): one layer that continues a model's states.

At position p the head takes the embedding of token p + 1 and a hidden state. If the model has computed p, this is a
projection by `fc` of some (mostly three) of the model's states, else the head's own output at p - 1. In NumPy, with few
calls, which take most of a small model's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.dtypes import all_finite
from model.errors import ModelError
from model.families.eagle3_config import LAYER, Eagle3Config
from model.rope import rope_tables
from model.weights.safetensors_file import StoredTensor, read_safetensors

FLOATS = ("float32", "float16", "bfloat16")
RANDOM_TILE = 1_000_003
"""Number of random values that dummy weights repeat."""
EAGLES_LAYER = "midlayer."
"""`LAYER` in EAGLE's own layout."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules whose rows a file may stack in one matrix."""
TRAINING_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "mask_hidden")


class Eagle3Head:
    """Weights of a head, float32 and transposed, with the norms' weights and the attention's scale folded in.
    Dimensions i and i + D / 2 of an attention head are adjacent, so that a rotation is a complex product."""

    def __init__(
        self,
        config: Eagle3Config,
        weights: dict[str, np.ndarray],
        token_ids: np.ndarray,
        embedding: np.ndarray,
        max_model_len: int,
    ):
        """`weights`: float32, as in Eagle3Tensors; `token_ids` int64[draft vocabulary]; `embedding` [V, H]."""
        self.config = config
        attention = {name: weights[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkvo"}
        input_norm = np.concatenate([weights[f"{LAYER}{name}.weight"] for name in ("input_layernorm", "hidden_norm")])
        q_scale = np.float32(config.head_dim**-0.5)
        q, k = (_paired(attention[name], config.head_dim) for name in "qk")
        qkv = np.concatenate([q if config.has_qk_norms else q * q_scale, k, attention["v"]]) * input_norm
        self._set_biases(weights, np.float32(1) if config.has_qk_norms else q_scale)
        self._qk_norm = _qk_norm(config, weights, q_scale) if config.has_qk_norms else None
        gate_up = np.concatenate([weights[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        self._fc, self._qkv, self._output = (
            _transposed(each) for each in (folded_fc(config, weights), qkv, attention["o"])
        )
        self._gate_up = _transposed(gate_up * weights[f"{LAYER}post_attention_layernorm.weight"])
        self._down = _transposed(weights[f"{LAYER}mlp.down_proj.weight"])
        self._lm_head = _transposed(weights["lm_head.weight"] * weights["norm.weight"])
        self._norms_states = bool(config.state_norms)
        self._hidden_norm = weights[f"{LAYER}hidden_norm.weight"] if config.norm_before_residual else None
        self._output_norm = weights["norm.weight"] if config.norm_output else None
        self.token_ids = token_ids
        self._embedding = embedding
        self._embedding_scale = self._norm_scale(embedding.astype(np.float32, copy=False))
        cos, sin = rope_tables(config.rope, config.head_dim, max_model_len)
        self._rotation = (cos + 1j * sin).astype(np.complex64)[:, None]

    def _set_biases(self, weights: dict[str, np.ndarray], q_scale: np.float32) -> None:
        """Store each product's bias, or None; q's and k's in the order of `_paired`."""
        self._output_bias = stacked_bias(weights, "self_attn.o_proj")
        self._gate_up_bias = stacked_bias(weights, "mlp.gate_proj", "mlp.up_proj")
        self._down_bias = stacked_bias(weights, "mlp.down_proj")
        qkv = stacked_bias(weights, *(f"self_attn.{name}_proj" for name in "qkv"))
        if qkv is not None:
            widths = self.config.num_heads, self.config.num_heads + self.config.num_kv_heads
            q, k, v = np.split(qkv[:, None], [width * self.config.head_dim for width in widths])
            qkv = np.concatenate([_paired(q * q_scale, self.config.head_dim), _paired(k, self.config.head_dim), v])[
                :, 0
            ]
        self._qkv_bias = qkv

    def hidden(self, states: np.ndarray) -> np.ndarray:
        """states [T, n H] -> float32[T, H]."""
        states = states.astype(np.float32, copy=False)
        if self._norms_states:
            parts = states.reshape(-1, self.config.state_norm_width)
            states = (parts * self._norm_scale(parts)).reshape(states.shape)
        projected: np.ndarray = states @ self._fc
        return projected

    def project(
        self, hidden: np.ndarray, token_ids: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """hidden [T, H], the tokens after `positions` -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]."""
        config, count = self.config, len(hidden)
        normed = np.empty((count, 2 * config.hidden_size), np.float32)
        np.multiply(self._embedding[token_ids], self._embedding_scale[token_ids], out=normed[:, : config.hidden_size])
        np.multiply(hidden, self._norm_scale(hidden), out=normed[:, config.hidden_size :])
        qkv = normed @ self._qkv
        if self._qkv_bias is not None:
            qkv += self._qkv_bias
        heads = qkv.reshape(count, -1, config.head_dim)
        qk = heads[:, : -config.num_kv_heads]
        if self._qk_norm is not None:
            scale = self._norm_scale(qk.reshape(-1, config.head_dim)).reshape(count, -1, 1)
            qk = qk * scale * self._qk_norm
        rotated = qk.view(np.complex64) * self._rotation[positions]
        qk = rotated.view(np.float32)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], heads[:, -config.num_kv_heads :]

    def attend(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """q [S, Hq, D], keys and values [S, Hkv, C, D], mask float32[S, 1, 1, C] (0 or -inf) -> [S, Hq * D]."""
        count = len(q)
        scores = q.reshape(count, self.config.num_kv_heads, -1, self.config.head_dim) @ keys.swapaxes(-1, -2)
        scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ values
        out /= scores.sum(axis=-1, keepdims=True)
        attended: np.ndarray = out.reshape(count, -1)
        return attended

    def finish(self, hidden: np.ndarray, attended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """hidden [S, H], attended [S, Hq * D] -> output [S, H], the next step's hidden state, and logits float32[S, V]
        of `token_ids`."""
        if self._hidden_norm is not None:
            hidden = hidden * self._norm_scale(hidden) * self._hidden_norm
        out = attended @ self._output
        out += hidden
        if self._output_bias is not None:
            out += self._output_bias
        gate_up = (out @ self._gate_up) * self._norm_scale(out)
        if self._gate_up_bias is not None:
            gate_up += self._gate_up_bias
        gate, up = gate_up[:, : self.config.intermediate_size], gate_up[:, self.config.intermediate_size :]
        up /= 1 + np.exp(-gate)
        up *= gate
        out += up @ self._down
        if self._down_bias is not None:
            out += self._down_bias
        logits: np.ndarray = out @ self._lm_head
        scale = self._norm_scale(out)
        logits *= scale
        return out if self._output_norm is None else out * scale * self._output_norm, logits

    def _norm_scale(self, x: np.ndarray) -> np.ndarray:
        """x [T, H] -> [T, 1]."""
        mean = np.vecdot(x, x) / np.float32(x.shape[1])
        mean += np.float32(self.config.eps)
        scale: np.ndarray = (1 / np.sqrt(mean))[:, None]
        return scale


@dataclass(frozen=True)
class Eagle3Tensors:
    """Tensors of a head, by `Eagle3Config.shapes`, with its biases, in the dtypes of its file."""

    config: Eagle3Config
    weights: dict[str, np.ndarray]
    token_ids: np.ndarray  # int64[draft vocabulary]
    embedding: np.ndarray | None  # [V, H]; None: the model's


def load_eagle3(folder: Path, target: ModelConfig, embedding: np.ndarray, max_model_len: int) -> Eagle3Head:
    """Read the head of a model with this `embedding` [V, H]. Raises ModelError with one line."""
    stored = read_eagle3(folder, target)
    own = embedding if stored.embedding is None else stored.embedding.astype(np.float32)
    weights = {name: values.astype(np.float32, copy=False) for name, values in stored.weights.items()}
    return Eagle3Head(stored.config, weights, stored.token_ids, own, max_model_len)


def read_eagle3(folder: Path, target: ModelConfig) -> Eagle3Tensors:
    """Read the head of a model. Raises ModelError with one line."""
    config, path = Eagle3Config.read(folder, target), folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(
            f"{folder}: no model.safetensors (pickles are never loaded; the speculators library converts them)"
        )
    stored = {_common_name(name): tensor for name, tensor in read_safetensors(path).items()}
    shapes, biases = config.shapes(), config.bias_shapes()
    weights = _read_fused(stored, {**shapes, **biases}, path)
    unknown = sorted(stored.keys() - {*shapes, *biases, "d2t", "embed_tokens.weight", *TRAINING_TENSORS})
    if unknown:
        raise ModelError(f"{path}: {unknown[0]} is not a tensor of a head with this config")
    shapes |= {name: shape for name, shape in biases.items() if name in stored}
    weights |= {name: _read(stored, name, shape, path) for name, shape in shapes.items() if name not in weights}
    embedding = None
    if "embed_tokens.weight" in stored:
        embedding = _read(stored, "embed_tokens.weight", (target.vocab_size, target.hidden_size), path)
    return Eagle3Tensors(
        config, weights, _token_ids(stored, config.draft_vocab_size, target.vocab_size, path), embedding
    )


def dummy_eagle3(folder: Path, target: ModelConfig, dtype: np.dtype) -> Eagle3Tensors:
    """Return random weights of the config's shapes in `dtype`, for measuring; every norm is 1."""
    config = Eagle3Config.read(folder, target)
    tile = np.random.default_rng(1).standard_normal(RANDOM_TILE, np.float32) * np.float32(config.hidden_size**-0.5)
    tile = tile.astype(dtype)
    weights = {
        name: np.ones(shape, dtype) if len(shape) == 1 else np.resize(tile, shape)
        for name, shape in config.shapes().items()
    }
    token_ids = np.arange(config.draft_vocab_size) * (target.vocab_size // config.draft_vocab_size)
    return Eagle3Tensors(config, weights, token_ids, None)


def _read(stored: dict[str, StoredTensor], name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    if name not in stored:
        raise ModelError(f"{path}: {name} is missing")
    if stored[name].shape != shape:
        raise stored[name].error(f"its shape is {stored[name].shape} (this model and config need {shape})")
    if stored[name].dtype.name not in FLOATS:
        raise stored[name].error(f"{stored[name].dtype} is not supported ({', '.join(FLOATS)})")
    values = stored[name].values()
    if not all_finite(values):
        raise stored[name].error("not all values are finite")
    return values


def _read_fused(
    stored: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], path: Path
) -> dict[str, np.ndarray]:
    """Remove the matrices and biases of FUSED from `stored`; return their parts."""
    parts: dict[str, np.ndarray] = {}
    for fused in [name for name in stored if name.startswith(LAYER) and name.split(".")[-2] in FUSED]:
        module, kind = fused.removeprefix(LAYER).rsplit(".", 2)[0], fused.split(".")[-2:]
        names = [f"{LAYER}{module}.{own}.{kind[1]}" for own in FUSED[kind[0]]]
        if not all(name in shapes for name in names):
            continue
        ends = np.cumsum([shapes[name][0] for name in names]).tolist()
        values = _read(stored, fused, (ends[-1], *shapes[names[0]][1:]), path)
        parts |= zip(names, np.split(values, ends[:-1]), strict=True)
        del stored[fused]
    return parts


def stacked_bias(weights: dict[str, np.ndarray], *modules: str) -> np.ndarray | None:
    """Concatenate the float32 biases of the layer's modules, zeros where a module has none; None if none has any."""
    names = [f"{LAYER}{module}.bias" for module in modules]
    if not any(name in weights for name in names):
        return None
    sizes = [len(weights[f"{LAYER}{module}.weight"]) for module in modules]
    biases = [weights.get(name, np.zeros(size)) for name, size in zip(names, sizes, strict=True)]
    stacked: np.ndarray = np.concatenate(biases)
    return stacked.astype(np.float32)


def _token_ids(stored: dict[str, StoredTensor], count: int, vocab_size: int, path: Path) -> np.ndarray:
    """Return int64[count]. The file has each id's distance from its index, or nothing if all ids are drafted."""
    if "d2t" not in stored and count == vocab_size:
        return np.arange(count)
    if "d2t" not in stored or stored["d2t"].shape != (count,) or stored["d2t"].dtype.kind != "i":
        raise ModelError(f"{path}: d2t is not a list of {count} integers")
    token_ids = stored["d2t"].values().astype(np.int64) + np.arange(count)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ModelError(f"{path}: d2t has ids beyond the model's vocabulary of {vocab_size}")
    return token_ids


def folded_fc(config: Eagle3Config, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Return float32 `fc.weight` times the weights of the states' norms, or without norms, which cancel it, times the
    states' scale."""
    fc = weights["fc.weight"].astype(np.float32, copy=False)
    if not config.state_norms:
        return fc if config.state_scale == 1 else fc * np.float32(config.state_scale)
    folded: np.ndarray = fc * np.concatenate(
        [weights[name].astype(np.float32, copy=False) for name in config.state_norms]
    )
    return folded


def _qk_norm(config: Eagle3Config, weights: dict[str, np.ndarray], q_scale: np.float32) -> np.ndarray:
    """Return [Hq + Hkv, D]."""
    q, k = (_paired(weights[f"{LAYER}self_attn.{name}_norm.weight"][:, None], config.head_dim)[:, 0] for name in "qk")
    return np.concatenate([np.tile(q * q_scale, (config.num_heads, 1)), np.tile(k, (config.num_kv_heads, 1))])


def _common_name(name: str) -> str:
    return LAYER + name.removeprefix(EAGLES_LAYER) if name.startswith(EAGLES_LAYER) else name


def _paired(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of each head: i, i + D / 2, i + 1, ..."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _transposed(weight: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(weight.T)
