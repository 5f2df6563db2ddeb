"""Shape of a model, read from `config.json`; unsupported fields are rejected by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.config_fields import MAX_TOKEN_ID, Fields
from model.errors import ModelError
from model.families.configs.family import ExpertsConfig, Family, LayerTensors, Multipliers
from model.families.configs.mistral import DEFAULT_TOKEN_IDS, WRAPPED, WRAPPER, WRAPPER_ARCHITECTURE
from model.families.configs.registry import FAMILIES, TWISTS
from model.gguf_config import gguf_config
from model.gguf_file import find_gguf, read_gguf
from model.json_files import parse_json_object, read_json_object
from model.rope_config import RopeConfig, read_rope, with_overrides
from model.stored_names import is_base_model

CONFIG_BYTES = 1 << 20
DTYPES = ("float32", "float16", "bfloat16")
SAMPLING_FIELDS = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a model. Sizes are counts of elements."""

    family: str  # model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # longest sequence in tokens, after rope scaling
    tied_embeddings: bool = False
    has_head: bool = True  # False: a base model, which gives hidden states but no logits
    qkv_bias: bool = False
    output_bias: bool = False  # o_proj
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads of q, and of k
    norm_after: bool = False  # normalises the outputs of attention and MLP, not their inputs
    layer_ropes: tuple[RopeConfig, ...] = ()  # per layer; (): `rope` in every layer
    multipliers: Multipliers = Multipliers()
    experts: ExpertsConfig | None = None
    tensors: LayerTensors = LayerTensors()
    is_wrapped: bool = False  # the files also hold a vision encoder, which is not loaded
    windows: tuple[int, ...]  # per layer; NO_WINDOW for full attention
    dtype: str  # "float32" | "float16" | "bfloat16", as stored
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of matrix elements, without norms and biases."""
        return self._num_parameters(0 if self.experts is None else self.experts.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of matrix elements that a token uses; equals `num_parameters` without experts."""
        return self._num_parameters(0 if self.experts is None else self.experts.num_used)

    def _num_parameters(self, num_experts: int) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings or not self.has_head else 2)
        total, num_dense = self.num_layers * attention + embeddings, self.num_layers
        if (experts := self.experts) is not None:
            each = experts.num_experts + 3 * num_experts * experts.intermediate_size  # the router's rows too
            num_dense -= sum(experts.layers)
            total += sum(experts.layers) * self.hidden_size * each
        return total + num_dense * 3 * self.hidden_size * self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.multipliers.attention is None else self.multipliers.attention

    @property
    def embedding_factor(self) -> float:
        """Factor folded into the embedding; the residual stream is divided by `multipliers.residual`."""
        return self.multipliers.embedding / self.multipliers.residual

    @property
    def residual_eps(self) -> float:
        """Epsilon of norms of the divided residual stream."""
        return self.rms_norm_eps / self.multipliers.residual**2

    @property
    def shares_embedding(self) -> bool:
        """True if the head is the embedding's array, which also replaces a missing head."""
        return not self.has_head or (self.tied_embeddings and self.embedding_factor == 1)

    @staticmethod
    def read(directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a Hugging Face folder; generation_config.json may add EOS ids. Raises ModelError.

        `overrides` replace fields of config.json, as in `with_overrides`.
        """
        path = Path(directory) / "config.json"
        gguf = None if path.exists() else find_gguf(Path(directory))
        if gguf is None:
            raw, source = read_json_object(path, CONFIG_BYTES), path
        else:
            raw, source = gguf_config(read_gguf(gguf)), gguf
        config = ModelConfig.from_dict(with_overrides(raw, overrides or {}), str(source))
        if gguf is None and not config.tied_embeddings and is_base_model(Path(directory)):
            config = replace(config, has_head=False)
        generation = Path(directory) / "generation_config.json"
        if not generation.exists():
            return config
        more = Fields(read_json_object(generation, CONFIG_BYTES), str(generation)).token_ids("eos_token_id")
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @staticmethod
    def from_dict(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a parsed config.json in the spelling of transformers 4 or 5. Raises ModelError."""
        whole = Fields(raw, source)
        fields = _text_fields(whole)
        family = _family(fields)
        if (activation := fields.text("hidden_act", "silu")) != "silu":
            raise fields.error("hidden_act", f"{activation!r} is not supported (known: silu)")
        num_layers = fields.integer("num_hidden_layers", high=1 << 10)
        num_heads, num_kv_heads, head_dim = _heads(fields, family)
        windows = family.windows(fields, num_layers)
        rope, max_position = read_rope(fields, family.scaling(fields), head_dim, family.rope_rules)
        biases = family.biases(fields)
        return ModelConfig(
            family=family.model_type,
            vocab_size=fields.integer("vocab_size", high=1 << 24),
            hidden_size=fields.integer("hidden_size", high=1 << 17),
            intermediate_size=fields.integer(family.intermediate_field, high=1 << 20),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", above=0, high=1),
            rope=rope,
            max_position=max_position,
            tied_embeddings=fields.boolean("tie_word_embeddings", family.ties_embeddings),
            qkv_bias=biases.qkv,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            qk_norm=family.qk_norm,
            qk_norm_whole=family.qk_norm_whole,
            norm_after=family.norm_after,
            layer_ropes=family.ropes(fields, rope, windows),
            multipliers=family.multipliers(fields),
            experts=family.experts(fields, num_layers),
            tensors=family.tensors,
            is_wrapped=fields is not whole,
            windows=windows,
            dtype=_dtype(fields),
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a wrapper's language model; return other configs unchanged."""
    if raw.get("model_type") != WRAPPER or not isinstance(inner := raw.get("text_config"), dict):
        return raw
    kind = inner.get("model_type")
    outer = ("dtype", "torch_dtype", "tie_word_embeddings", *DEFAULT_TOKEN_IDS)
    inherited = DEFAULT_TOKEN_IDS | {name: raw[name] for name in outer if raw.get(name) is not None}
    own = {name: value for name, value in inner.items() if value is not None}
    architectures = [FAMILIES[kind].architecture] if kind in WRAPPED else None
    return inner | inherited | own | {"architectures": architectures}


def generation_defaults(directory: Path) -> dict[str, float | int]:
    """Return the sampling defaults of generation_config.json, {} without the file. Raises ModelError.

    Keys: temperature, top_p, top_k, min_p, repetition_penalty; neutral values are omitted. `do_sample: false` means
    temperature 0 only without a temperature, as in vLLM: many files have both by accident.
    """
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return {}
    return _sampling(Fields(read_json_object(path, CONFIG_BYTES), str(path)))


def overriding_defaults(text: str, source: str) -> dict[str, float | int]:
    """Return the sampling defaults in a JSON text. Raises ModelError, which names `source`."""
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


def _text_fields(fields: Fields) -> Fields:
    """Return the language model's fields: `fields`, unless it is a wrapper."""
    if fields.get("model_type") != WRAPPER:
        return fields
    architectures, inner = fields.get("architectures"), fields.section("text_config")
    if architectures not in (None, [WRAPPER_ARCHITECTURE]):
        raise fields.error("architectures", f"{architectures!r} is not supported (known: {WRAPPER_ARCHITECTURE})")
    if inner is None:
        raise fields.error("text_config", "missing")
    if (kind := inner.text("model_type")) not in WRAPPED:
        raise inner.error("model_type", f"{kind!r} is not supported (known: {', '.join(WRAPPED)})")
    return Fields(text_config(fields.raw), inner.source)


def _family(fields: Fields) -> Family:
    name: str = fields.text("model_type")
    if name not in FAMILIES:
        reason = f": it has {TWISTS[name]}" if name in TWISTS else ""
        known = ", ".join([*FAMILIES, WRAPPER])
        raise fields.error("model_type", f"{name!r} is not supported{reason} (known: {known})")
    family, architectures = FAMILIES[name], fields.get("architectures")
    if architectures not in (None, [family.architecture], [family.saved_as]):
        raise fields.error("architectures", f"{architectures!r} is not supported (known: {family.architecture})")
    return family


def _heads(fields: Fields, family: Family) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head_dim), with absent fields derived as in transformers."""
    hidden_size = fields.integer("hidden_size", high=1 << 17)
    num_heads = fields.integer("num_attention_heads", high=1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, high=1 << 12)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", f"{num_heads} is not divisible by num_key_value_heads {num_kv_heads}")
    head_dim = fields.integer("head_dim", family.default_head_dim, high=1 << 10)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"{hidden_size} is not divisible by num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim < 8:
        raise fields.error("head_dim", f"{head_dim} is odd or below 8")
    return num_heads, num_kv_heads, head_dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype: str = fields.text(name, "float32")
    if dtype not in DTYPES:
        raise fields.error(name, f"{dtype!r} is not supported (known: {', '.join(DTYPES)})")
    return dtype
