"""What a model is: the numbers of `config.json`, read once, refused by name where this code cannot serve them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.config_fields import MAX_TOKEN_ID, Fields
from model.dtypes import NUMPY_DTYPES
from model.json_files import read_json_object
from model.ops.interface import NO_WINDOW
from model.rope_config import RopeConfig, read_rope

CONFIG_BYTES = 1 << 20
"""Largest config.json or generation_config.json that is read; real ones have a few kilobytes."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family model. Sizes are counts of elements."""

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
    max_position: int  # longest sequence in tokens, what a scaled rope adds included
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # o_proj
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...]  # per layer; NO_WINDOW where the layer sees everything
    dtype: str  # "float32" | "float16" | "bfloat16", as stored
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Of the matrices; norms and biases are left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings

    @staticmethod
    def read(directory: Path) -> ModelConfig:
        """The model in a Hugging Face folder; generation_config.json, where there is one, may add EOS ids.

        Raises ModelError, one line that names the file and the field.
        """
        path = Path(directory) / "config.json"
        config = ModelConfig.from_dict(read_json_object(path, CONFIG_BYTES), str(path))
        generation = Path(directory) / "generation_config.json"
        if not generation.exists():
            return config
        more = Fields(read_json_object(generation, CONFIG_BYTES), str(generation)).token_ids("eos_token_id")
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @staticmethod
    def from_dict(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """The model of a parsed config.json, in the spelling of transformers 4 or 5. Raises ModelError."""
        fields = Fields(raw, source)
        family = _family(fields)
        _refuse_unserved(fields)
        num_layers = fields.integer("num_hidden_layers", high=1 << 10)
        num_heads, num_kv_heads, head_dim = _heads(fields, family)
        rope, max_position = read_rope(fields)
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
    """The sampling a model's makers recommend, for requests that leave it open; {} without generation_config.json.

    Only what the file names is returned: temperature, top_p, top_k, min_p, repetition_penalty, in the ranges of
    SamplingParams. Neutral spellings (top_k 0 or -1) are left out. As in vLLM, `do_sample` does not override a
    temperature that is given (many files carry do_sample false beside one by accident); only `do_sample: false`
    without a temperature means what it says, and gives temperature 0. Raises ModelError.
    """
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return {}
    fields = Fields(read_json_object(path, CONFIG_BYTES), str(path))
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
        raise fields.error("architectures", f"{architectures!r} is not supported (wanted: {ARCHITECTURES[family]})")
    return family


def _refuse_unserved(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized weights are not supported")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported (known: silu)")


def _heads(fields: Fields, family: str) -> tuple[int, int, int]:
    """(query heads, key/value heads, head_dim); what may be left out is what transformers derives or fixes."""
    hidden_size = fields.integer("hidden_size", high=1 << 17)
    num_heads = fields.integer("num_attention_heads", high=1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, high=1 << 12)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", f"{num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_dim = fields.integer("head_dim", 128 if family == "qwen3" else None, high=1 << 10)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim < 8:
        raise fields.error("head_dim", f"{head_dim} is odd or below 8")
    return num_heads, num_kv_heads, head_dim


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Mistral's window is on every layer; a Qwen's where layer_types says, else from max_window_layers on."""
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


def _preset(**shape: Any) -> ModelConfig:
    return ModelConfig(windows=(NO_WINDOW,) * shape["num_layers"], dtype="bfloat16", **shape)


LLAMA31_ROPE = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    original_max_position=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": _preset(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=LLAMA31_ROPE,
        max_position=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "llama-3.2-1b": _preset(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=replace(LLAMA31_ROPE, factor=32.0),
        max_position=131072,
        tied_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "mistral-7b": _preset(
        family="mistral",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(kind="default", theta=1000000.0),
        max_position=32768,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "qwen2.5-7b": _preset(
        family="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=1000000.0),
        max_position=32768,
        qkv_bias=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
    "qwen3-8b": _preset(
        family="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=1000000.0),
        max_position=40960,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    ),
}
"""Shapes known by name, for measuring and planning without a folder."""
