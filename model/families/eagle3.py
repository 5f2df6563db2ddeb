"""EAGLE-3 draft heads (Li et al.) in the layout of the speculators library: one layer that continues a model's states.

At position p the head takes the embedding of token p + 1 and a hidden state: three states of the model, projected by
`fc`, where the model has computed p, else its own output at p - 1. In NumPy, with few calls, most of a small model's
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.config_fields import Fields
from model.dtypes import all_finite
from model.errors import ModelError
from model.json_files import read_json_object
from model.rope import rope_tables
from model.rope_config import RopeConfig, RopeRules, read_rope
from model.weights.safetensors_file import StoredTensor, read_safetensors

LAYER = "layers.0."
MAX_CONFIG_BYTES = 1 << 20
MAX_SIZE = 1 << 20
MAX_DRAFTS = 16
FLOATS = ("float32", "float16", "bfloat16")
RANDOM_TILE = 1_000_003
"""Random numbers that dummy weights repeat."""
NOT_BUILT = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
TRAINING_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "mask_hidden")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    state_layers: tuple[int, ...]  # the layers whose inputs `fc` takes
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    eps: float
    rope: RopeConfig
    norm_before_residual: bool
    num_speculative_tokens: int | None  # as its makers propose

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> Eagle3Config:
        """Raises ModelError for another layout, or a head of another model's shape."""
        path = folder / "config.json"
        fields = Fields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
        layer = fields.section("transformer_layer_config")
        if fields.get("speculators_model_type") != "eagle3" or layer is None:
            raise fields.error("speculators_model_type", "no EAGLE-3 head of the speculators library (eagle3)")
        for section in (fields, layer):
            for name in NOT_BUILT:
                if section.boolean(name, False):
                    raise section.error(name, "not supported")
        if layer.text("hidden_act", "silu") != "silu" or layer.integer("num_hidden_layers", 1, high=MAX_SIZE) != 1:
            raise layer.error("num_hidden_layers", "only one layer with silu is supported")
        if target.norm_after:
            raise fields.error("transformer_layer_config", "models with norms after their layers have no such states")
        hidden_size = layer.integer("hidden_size", high=MAX_SIZE)
        if hidden_size != target.hidden_size:
            raise layer.error("hidden_size", f"{hidden_size} is not the model's ({target.hidden_size})")
        num_heads = layer.integer("num_attention_heads", high=MAX_SIZE)
        num_kv_heads = layer.integer("num_key_value_heads", num_heads, high=MAX_SIZE)
        head_dim = layer.integer("head_dim", None, high=MAX_SIZE) or hidden_size // num_heads
        if num_heads % num_kv_heads or head_dim % 2 or head_dim == 0:
            raise layer.error("num_key_value_heads", f"{num_heads} heads of {head_dim} on {num_kv_heads} do not work")
        scaling = layer.section("rope_parameters") or layer.section("rope_scaling") or Fields({}, layer.source)
        return cls(
            state_layers=_state_layers(fields, target.num_layers),
            hidden_size=hidden_size,
            intermediate_size=layer.integer("intermediate_size", high=MAX_SIZE),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            draft_vocab_size=fields.integer("draft_vocab_size", high=target.vocab_size),
            eps=layer.number("rms_norm_eps", 1e-5, high=1.0),
            rope=read_rope(layer, scaling, head_dim, RopeRules())[0],
            norm_before_residual=fields.boolean("norm_before_residual", False),
            num_speculative_tokens=_proposed_tokens(fields),
        )

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return [1, 2 (keys, values), Hkv, B, D]."""
        return 1, 2, self.num_kv_heads, block_size, self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every stored matrix and norm."""
        hidden, attention, mlp = self.hidden_size, LAYER + "self_attn.", LAYER + "mlp."
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        return {
            "fc.weight": (hidden, len(self.state_layers) * hidden),
            f"{attention}q_proj.weight": (width, 2 * hidden),
            f"{attention}k_proj.weight": (kv_width, 2 * hidden),
            f"{attention}v_proj.weight": (kv_width, 2 * hidden),
            f"{attention}o_proj.weight": (hidden, width),
            f"{mlp}gate_proj.weight": (self.intermediate_size, hidden),
            f"{mlp}up_proj.weight": (self.intermediate_size, hidden),
            f"{mlp}down_proj.weight": (hidden, self.intermediate_size),
            **{f"{LAYER}{name}.weight": (hidden,) for name in norms},
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }

    def num_bytes(self, dtype: np.dtype) -> int:
        return dtype.itemsize * sum(int(np.prod(shape)) for shape in self.shapes().values())


class Eagle3Head:
    """Weights, in float32 and transposed, with the norms' weights and the attention's scale folded in; a head's
    dimensions i and i + D / 2 lie side by side, so that a rotation is a complex product."""

    def __init__(
        self,
        config: Eagle3Config,
        weights: dict[str, np.ndarray],
        token_ids: np.ndarray,
        embedding: np.ndarray,
        max_model_len: int,
    ):
        """`weights`: float32 by `Eagle3Config.shapes`; `token_ids` int64[draft vocabulary]; `embedding` [V, H]."""
        self.config = config
        attention = {name: weights[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkvo"}
        input_norm = np.concatenate([weights[f"{LAYER}{name}.weight"] for name in ("input_layernorm", "hidden_norm")])
        q = _paired(attention["q"], config.head_dim) * np.float32(config.head_dim**-0.5)
        qkv = np.concatenate([q, _paired(attention["k"], config.head_dim), attention["v"]]) * input_norm
        gate_up = np.concatenate([weights[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        self._fc, self._qkv, self._output = (_transposed(each) for each in (weights["fc.weight"], qkv, attention["o"]))
        self._gate_up = _transposed(gate_up * weights[f"{LAYER}post_attention_layernorm.weight"])
        self._down = _transposed(weights[f"{LAYER}mlp.down_proj.weight"])
        self._lm_head = _transposed(weights["lm_head.weight"] * weights["norm.weight"])
        self._hidden_norm = weights[f"{LAYER}hidden_norm.weight"] if config.norm_before_residual else None
        self.token_ids = token_ids
        self._embedding = embedding
        self._embedding_scale = self._norm_scale(embedding.astype(np.float32, copy=False))
        cos, sin = rope_tables(config.rope, config.head_dim, max_model_len)
        self._rotation = (cos + 1j * sin).astype(np.complex64)[:, None]

    def hidden(self, states: np.ndarray) -> np.ndarray:
        """states [T, 3 H] -> float32[T, H]."""
        projected: np.ndarray = states.astype(np.float32, copy=False) @ self._fc
        return projected

    def project(
        self, hidden: np.ndarray, token_ids: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """hidden [T, H], the tokens after `positions` -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]."""
        config, count = self.config, len(hidden)
        normed = np.empty((count, 2 * config.hidden_size), np.float32)
        np.multiply(self._embedding[token_ids], self._embedding_scale[token_ids], out=normed[:, : config.hidden_size])
        np.multiply(hidden, self._norm_scale(hidden), out=normed[:, config.hidden_size :])
        heads = (normed @ self._qkv).reshape(count, -1, config.head_dim)
        rotated = heads[:, : -config.num_kv_heads].view(np.complex64) * self._rotation[positions]
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
        gate_up = (out @ self._gate_up) * self._norm_scale(out)
        gate, up = gate_up[:, : self.config.intermediate_size], gate_up[:, self.config.intermediate_size :]
        up /= 1 + np.exp(-gate)
        up *= gate
        out += up @ self._down
        logits: np.ndarray = out @ self._lm_head
        logits *= self._norm_scale(out)
        return out, logits

    def _norm_scale(self, x: np.ndarray) -> np.ndarray:
        """x [T, H] -> [T, 1]."""
        mean = np.vecdot(x, x) / np.float32(x.shape[1])
        mean += np.float32(self.config.eps)
        scale: np.ndarray = (1 / np.sqrt(mean))[:, None]
        return scale


@dataclass(frozen=True)
class Eagle3Tensors:
    """A head by `Eagle3Config.shapes`, in the types of its file."""

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
    """Raises ModelError with one line."""
    config, path = Eagle3Config.read(folder, target), folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder}: no model.safetensors (the speculators library converts other heads)")
    stored = read_safetensors(path)
    shapes = config.shapes()
    unknown = sorted(stored.keys() - {*shapes, "d2t", "embed_tokens.weight", *TRAINING_TENSORS})
    if unknown:
        raise ModelError(f"{path}: {unknown[0]} is not a tensor of an EAGLE-3 head of the speculators library")
    weights = {name: _read(stored, name, shape, path) for name, shape in shapes.items()}
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
        raise ModelError(f"{path}: {name} is missing (an EAGLE-3 head of the speculators library)")
    if stored[name].shape != shape:
        raise stored[name].error(f"its shape is {stored[name].shape} (this model and config need {shape})")
    if stored[name].dtype.name not in FLOATS:
        raise stored[name].error(f"{stored[name].dtype} is not supported ({', '.join(FLOATS)})")
    values = stored[name].values()
    if not all_finite(values):
        raise stored[name].error("not all values are finite")
    return values


def _token_ids(stored: dict[str, StoredTensor], count: int, vocab_size: int, path: Path) -> np.ndarray:
    """Return int64[count]; the file has each id's distance from its index, or nothing if all ids are drafted."""
    if "d2t" not in stored and count == vocab_size:
        return np.arange(count)
    if "d2t" not in stored or stored["d2t"].shape != (count,) or stored["d2t"].dtype.kind != "i":
        raise ModelError(f"{path}: d2t is not a list of {count} integers")
    token_ids = stored["d2t"].values().astype(np.int64) + np.arange(count)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ModelError(f"{path}: d2t has ids beyond the model's vocabulary of {vocab_size}")
    return token_ids


def _state_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    given = fields.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    known = isinstance(given, list) and all(type(each) is int and 0 <= each < num_layers for each in given)
    if not known or len(set(given)) != 3:
        raise fields.error("eagle_aux_hidden_state_layer_ids", f"{given!r} are not 3 of {num_layers} layers")
    return tuple(given)


def _proposed_tokens(fields: Fields) -> int | None:
    methods = fields.raw.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return count if type(count) is int and 1 <= count <= MAX_DRAFTS else None


def _paired(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of each head: i, i + D / 2, i + 1, ..."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _transposed(weight: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(weight.T)
