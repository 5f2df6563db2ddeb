"""Description of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from model.config_fields import NO_WINDOW, Fields
from model.rope_config import RopeConfig, RopeRules, read_rope

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    """Names of a layer's modules in the files; the tensors of a tuple are stacked into one matrix."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_gate_up: tuple[str, str] = ("gate_proj", "up_proj")  # of each expert
    expert_down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()  # (parts of names in transformers 5, those here)
    left_out: tuple[str, ...] = ()  # prefixes of tensors that are not loaded
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"

    def of_expert(self, index: int) -> tuple[list[str], str]:
        """Return the names of an expert's (gate and up, down)."""
        prefix = f"{self.experts}.{index}."
        return [prefix + name for name in self.expert_gate_up], prefix + self.expert_down


NORM_AFTER = LayerTensors(attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
"""Names in OLMo 2 and 3 and EXAONE 4, which normalise the outputs of attention and MLP."""


@dataclass(frozen=True, kw_only=True)
class Biases:
    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constants of a forward pass (Granite)."""

    embedding: float = 1.0
    residual: float = 1.0  # of the outputs of attention and MLP
    attention: float | None = None  # of the scores; None: head_dim ** -0.5
    logits_divisor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts that replace the MLP in some layers."""

    num_experts: int
    num_used: int  # per token
    intermediate_size: int  # per expert
    renormalises: bool  # the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  # per layer: experts, or a dense MLP


def no_biases(fields: Fields) -> Biases:
    return Biases()


def attention_biases(fields: Fields) -> Biases:
    """Read `attention_bias`, for q, k, v and o."""
    has_biases = fields.boolean("attention_bias", False)
    return Biases(qkv=has_biases, output=has_biases)


def llama_biases(fields: Fields) -> Biases:
    return replace(attention_biases(fields), mlp=fields.boolean("mlp_bias", False))


def no_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    return None


def experts_in_every_layer(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Read Mixtral's fields: the chosen experts are weighted by a softmax among themselves."""
    num_experts = fields.integer("num_local_experts", 8, high=1 << 10)
    return ExpertsConfig(
        num_experts=num_experts,
        num_used=fields.integer("num_experts_per_tok", 2, high=num_experts),
        intermediate_size=fields.integer("intermediate_size", high=1 << 20),
        renormalises=True,
        layers=(True,) * num_layers,
    )


def no_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return full attention. Raises ModelError if layer_types is mixed."""
    if len(set(layer_types(fields, num_layers) or ())) > 1:
        raise fields.error("layer_types", f"mixed attention is not supported for {fields.text('model_type')}")
    return (NO_WINDOW,) * num_layers


def window_of_all(fields: Fields, num_layers: int) -> tuple[int, ...]:
    no_windows(fields, num_layers)
    return (fields.integer("sliding_window", None, high=NO_WINDOW) or NO_WINDOW,) * num_layers


def one_rope(fields: Fields, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig, ...]:
    """Return (): every layer has the model's rope."""
    return ()


def no_multipliers(fields: Fields) -> Multipliers:
    return Multipliers()


def llama_scaling(fields: Fields) -> Fields:
    return fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.source)


def full_attention_scaling(fields: Fields) -> Fields:
    """Return the section of layers with full attention, if each type of layer has its own rope."""
    section = fields.section("rope_parameters")
    if section is None:
        return llama_scaling(fields)
    return section.section("full_attention") or Fields({}, section.source)


def ropes_of_types(
    fields: Fields, rope: RopeConfig, windows: tuple[int, ...], rules: RopeRules, default_theta: float
) -> tuple[RopeConfig, ...]:
    """Return `rope` for layers with full attention, for others that of `sliding_attention` (plain if absent)."""
    section = fields.section("rope_parameters")
    sliding = None if section is None else section.section("sliding_attention")
    if sliding is None:
        sliding = Fields({"rope_theta": default_theta}, fields.source)
    of_window, _ = read_rope(fields, sliding, 2, rules)
    return tuple(rope if window == NO_WINDOW else of_window for window in windows)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Differences of a model family from Llama. Readers raise ModelError for unsupported values."""

    model_type: str
    architecture: str
    saved_as: str | None = None  # architecture that transformers writes, if different
    tensors: LayerTensors = LayerTensors()
    intermediate_field: str = "intermediate_size"  # of a dense MLP
    biases: Callable[[Fields], Biases] = attention_biases
    ties_embeddings: bool = False  # if tie_word_embeddings is absent
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads, not per head
    norm_after: bool = False  # normalises the outputs of attention and MLP, not their inputs
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_rules: RopeRules = RopeRules()
    scaling: Callable[[Fields], Fields] = llama_scaling
    windows: Callable[[Fields, int], tuple[int, ...]] = no_windows
    ropes: Callable[[Fields, RopeConfig, tuple[int, ...]], tuple[RopeConfig, ...]] = one_rope
    multipliers: Callable[[Fields], Multipliers] = no_multipliers
    experts: Callable[[Fields, int], ExpertsConfig | None] = no_experts


def layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """Read the attention type of each layer; None if absent. Raises ModelError."""
    kinds: list[str] | None = fields.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds)
    ):
        raise fields.error("layer_types", f"not {num_layers} times one of {', '.join(LAYER_TYPES)}")
    return kinds


def full_attention_every(period: int, num_layers: int) -> list[str]:
    """Return layer types where every `period`th layer has full attention."""
    return [LAYER_TYPES[(layer + 1) % period != 0] for layer in range(num_layers)]


def windows_of_types(kinds: list[str], window: int) -> tuple[int, ...]:
    return tuple(window if kind == "sliding_attention" else NO_WINDOW for kind in kinds)
