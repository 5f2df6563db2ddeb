"""The shape of a model, read from `config.json`; unsupported fields are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.config_fields import MAX_TOKEN_ID, Fields
from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.gguf_config import gguf_config
from model.gguf_file import find_gguf, read_gguf
from model.json_files import parse_json_object, read_json_object
from model.ops.interface import NO_WINDOW

CONFIG_BYTES = 1 << 20
SAMPLING_FIELDS = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MAX_POSITION = 1 << 24
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` is the scaling; only its own fields are set."""

    kind: str  # "default" | "linear" | "dynamic" | "llama3" | "yarn"
    theta: float
    factor: float = 1.0
    original_max_position: int = 0  # dynamic, llama3, yarn
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama-family model. Sizes are counts of elements."""

    family: str  # model_type: "llama" | "mistral" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # longest sequence in tokens, after rope scaling
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # o_proj
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...]  # per layer; NO_WINDOW for full attention
    dtype: str  # "float32" | "float16" | "bfloat16", as stored
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of matrix elements, without norms and biases."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings

    @staticmethod
    def read(directory: Path) -> ModelConfig:
        """Read a Hugging Face folder; generation_config.json may add EOS ids. Raises ModelError."""
        path = Path(directory) / "config.json"
        gguf = None if path.exists() else find_gguf(Path(directory))
        if gguf is None:
            config = ModelConfig.from_dict(read_json_object(path, CONFIG_BYTES), str(path))
        else:
            config = ModelConfig.from_dict(gguf_config(read_gguf(gguf)), str(gguf))
        generation = Path(directory) / "generation_config.json"
        if not generation.exists():
            return config
        more = Fields(read_json_object(generation, CONFIG_BYTES), str(generation)).token_ids("eos_token_id")
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @staticmethod
    def from_dict(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a parsed config.json, in the spelling of transformers 4 or 5. Raises ModelError."""
        fields = Fields(raw, source)
        family = _family(fields)
        _refuse_unserved(fields)
        num_layers = fields.integer("num_hidden_layers", high=1 << 10)
        num_heads, num_kv_heads, head_dim = _heads(fields, family)
        rope, max_position = _rope(fields)
        attention_bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
        return ModelConfig(
            family=family,
            vocab_size=fields.integer("vocab_size", high=1 << 24),
            hidden_size=fields.integer("hidden_size", high=1 << 17),
            intermediate_size=fields.integer("intermediate_size", high=1 << 20),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", above=0, high=1),
            rope=rope,
            max_position=max_position,
            tied_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
            qk_norm=family == "qwen3",
            windows=_windows(fields, family, num_layers),
            dtype=_dtype(fields),
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )


def generation_defaults(directory: Path) -> dict[str, float | int]:
    """Return generation_config.json's sampling defaults, {} without the file. Raises ModelError.

    Keys: temperature, top_p, top_k, min_p, repetition_penalty; neutral values are left out. `do_sample: false` means
    temperature 0 only without a temperature, as in vLLM: many files carry both by accident.
    """
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return {}
    return _sampling(Fields(read_json_object(path, CONFIG_BYTES), str(path)))


def overriding_defaults(text: str, source: str) -> dict[str, float | int]:
    """Return the sampling defaults in a JSON text; `source` names it in errors. Raises ModelError."""
    raw = parse_json_object(text.encode(), source)
    unknown = sorted(raw.keys() - SAMPLING_FIELDS)
    if unknown:
        raise ModelError(f"{source}: {unknown[0]} is not supported ({', '.join(sorted(SAMPLING_FIELDS))})")
    return _sampling(Fields(raw, source))


def _sampling(fields: Fields) -> dict[str, float | int]:
    defaults: dict[str, float | int | None] = {
        "temperature": fields.number("temperature", None, low=0, high=100),
        "top_p": fields.number("top_p", None, above=0, high=1),
        "top_k": fields.integer("top_k", None, low=-1, high=MAX_TOKEN_ID),
        "min_p": fields.number("min_p", None, low=0, high=1),
        "repetition_penalty": fields.number("repetition_penalty", None, above=0, high=10),
    }
    if defaults["temperature"] is None and not fields.boolean("do_sample", True):
        defaults["temperature"] = 0.0
    if defaults["top_k"] in (0, -1):
        defaults["top_k"] = None
    return {name: value for name, value in defaults.items() if value is not None}


def _family(fields: Fields) -> str:
    family: str = fields.text("model_type")
    if family not in ARCHITECTURES:
        raise fields.error("model_type", f"{family!r} is not supported (known: {', '.join(ARCHITECTURES)})")
    architectures = fields.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURES[family]]:
        raise fields.error("architectures", f"{architectures!r} is not supported (known: {ARCHITECTURES[family]})")
    return family


def _refuse_unserved(fields: Fields) -> None:
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported (known: silu)")


def _heads(fields: Fields, family: str) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head_dim), absent fields derived as in transformers."""
    hidden_size = fields.integer("hidden_size", high=1 << 17)
    num_heads = fields.integer("num_attention_heads", high=1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, high=1 << 12)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", f"{num_heads} is not divisible by num_key_value_heads {num_kv_heads}")
    head_dim = fields.integer("head_dim", 128 if family == "qwen3" else None, high=1 << 10)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"{hidden_size} is not divisible by num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim < 8:
        raise fields.error("head_dim", f"{head_dim} is odd or below 8")
    return num_heads, num_kv_heads, head_dim


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Read windows: Mistral's on every layer, Qwen's by layer_types, else from max_window_layers on."""
    layer_types = fields.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(kind not in LAYER_TYPES for kind in layer_types)
    ):
        raise fields.error("layer_types", f"not {num_layers} times one of {', '.join(LAYER_TYPES)}")
    if family in ("llama", "mistral"):
        if layer_types is not None and len(set(layer_types)) > 1:
            raise fields.error("layer_types", f"mixed attention is not supported for {family}")
        window = fields.integer("sliding_window", None, high=NO_WINDOW) if family == "mistral" else None
        return (window or NO_WINDOW,) * num_layers
    if not fields.boolean("use_sliding_window", False):
        return (NO_WINDOW,) * num_layers
    window = fields.integer("sliding_window", 4096, high=NO_WINDOW)
    if layer_types is None:
        first = fields.integer("max_window_layers", 28, low=0, high=1 << 10)
        layer_types = [LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else NO_WINDOW for kind in layer_types)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype: str = fields.text(name, "float32")
    if dtype not in NUMPY_DTYPES:
        raise fields.error(name, f"{dtype!r} is not supported (known: {', '.join(NUMPY_DTYPES)})")
    return dtype


def _rope(fields: Fields) -> tuple[RopeConfig, int]:
    """Return the rotary embedding and the longest sequence. Raises ModelError.

    Linear and dynamic scaling multiply max_position_embeddings by their factor, yarn its original length; llama3's
    max_position_embeddings is already scaled.
    """
    max_position = fields.integer("max_position_embeddings", high=MAX_POSITION)
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.source)
    if any(isinstance(value, dict) for value in scaling.raw.values()):
        raise scaling.error("rope_parameters", "rotary parameters per layer type are not supported")
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", 1.0, high=1) != 1.0:
            raise section.error("partial_rotary_factor", "only 1 is supported")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    theta = scaling.number("rope_theta", None, above=1, high=1e12) or fields.number(
        "rope_theta", 10000.0, above=1, high=1e12
    )
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta), max_position
    if kind not in ROPE_KINDS:
        raise scaling.error("rope_type", f"{kind!r} is not supported (known: {', '.join(ROPE_KINDS)})")
    original = fields.integer("original_max_position_embeddings", None, high=MAX_POSITION) or scaling.integer(
        "original_max_position_embeddings", max_position, high=MAX_POSITION
    )
    if kind == "yarn":
        return _yarn(scaling, theta, max_position, original)
    factor = scaling.number("factor", low=1, high=1e4)
    if kind == "llama3":
        return _llama3(scaling, theta, factor, original), max_position
    rope = RopeConfig(kind=kind, theta=theta, factor=factor, original_max_position=max_position)
    return rope, min(int(max_position * factor), MAX_POSITION)


def _llama3(scaling: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    low = scaling.number("low_freq_factor", above=0, high=1e6)
    high = scaling.number("high_freq_factor", above=0, high=1e6)
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, max_position: int, original: int) -> tuple[RopeConfig, int]:
    factor = scaling.number("factor", max(max_position / original, 1.0), low=1, high=1e4)
    beta_fast = scaling.number("beta_fast", 32.0, above=0, high=1e6)
    beta_slow = scaling.number("beta_slow", 1.0, above=0, high=1e6)
    if beta_fast < beta_slow:
        raise scaling.error("beta_fast", f"{beta_fast:g} is below beta_slow {beta_slow:g}")
    rope = RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=scaling.number("attention_factor", None, above=0, high=1e3),
        mscale=scaling.number("mscale", None, high=1e3),
        mscale_all_dim=scaling.number("mscale_all_dim", None, high=1e3),
        truncate=scaling.boolean("truncate", True),
    )
    return rope, min(int(original * factor), MAX_POSITION)
