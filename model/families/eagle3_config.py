"""config.json of an EAGLE-3 draft head, in the layout of the speculators library or of EAGLE and SpecForge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.config_fields import NO_WINDOW, Fields
from model.families.configs.family import llama_scaling
from model.json_files import read_json_object
from model.rope_config import RopeConfig, RopeRules, read_rope

LAYER = "layers.0."
MAX_CONFIG_BYTES = 1 << 20
MAX_SIZE = 1 << 20
MAX_STATES = 8
MAX_DRAFTS = 16
NOT_BUILT = ("parallel_drafting",)
MODEL_TYPES = ("llama", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    state_layers: tuple[int, ...]  # layers whose inputs `fc` takes; the model's number of layers: the last's output
    state_scale: float  # the model's states are divided by it
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    eps: float
    rope: RopeConfig
    window: int  # a query at p sees keys from p - window + 1 on
    has_qk_norms: bool
    norm_before_fc: bool  # over all states together
    fc_norm: bool  # per state
    norm_before_residual: bool
    norm_output: bool  # the next step's hidden state is the normed one
    num_speculative_tokens: int | None  # proposed by its makers

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> Eagle3Config:
        """Read a head's config. Raises ModelError for another layout, or a head of another model's shape."""
        path = folder / "config.json"
        fields = Fields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
        layer = _layer(fields)
        _check_built(fields, layer)
        hidden_size, num_heads, num_kv_heads, head_dim = _sizes(fields, layer, target)
        norm_before_fc, fc_norm = fields.boolean("norm_before_fc", False), fields.boolean("fc_norm", False)
        if norm_before_fc and fc_norm:
            raise fields.error("fc_norm", "not supported with norm_before_fc")
        return cls(
            state_layers=_state_layers(fields, target.num_layers),
            state_scale=target.multipliers.residual,
            hidden_size=hidden_size,
            intermediate_size=layer.integer("intermediate_size", high=MAX_SIZE),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            draft_vocab_size=fields.integer("draft_vocab_size", target.vocab_size, high=target.vocab_size),
            eps=layer.number("rms_norm_eps", 1e-6, high=1.0),
            rope=read_rope(layer, llama_scaling(layer), head_dim, RopeRules())[0],
            window=_window(layer),
            has_qk_norms=layer.text("model_type", "llama") == "qwen3",
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            norm_before_residual=fields.boolean("norm_before_residual", False),
            norm_output=fields.boolean("norm_output", False),
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
            **{f"{attention}{name}_norm.weight": (self.head_dim,) for name in "qk" if self.has_qk_norms},
            **dict.fromkeys(self.state_norms, (self.state_norm_width,)),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }

    def bias_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every bias that a file may have. Configs are no help: those of heads without biases name
        the model's."""
        names = [name for name in self.shapes() if name.startswith(LAYER) and name.endswith("_proj.weight")]
        return {name.removesuffix("weight") + "bias": self.shapes()[name][:1] for name in names}

    @property
    def state_norms(self) -> tuple[str, ...]:
        """Names of the norms of the states, in their order."""
        if self.norm_before_fc:
            return ("input_norm.weight",)
        return tuple(f"fc_norm.{index}.weight" for index in range(len(self.state_layers))) if self.fc_norm else ()

    @property
    def state_norm_width(self) -> int:
        """Elements of the states normalised together."""
        return self.hidden_size * (len(self.state_layers) if self.norm_before_fc else 1)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head."""
    if (kind := raw.get("speculators_model_type")) is not None:
        return bool(kind == "eagle3")
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return "draft_vocab_size" in raw or any("eagle3" in str(name).lower() for name in names)


def _layer(fields: Fields) -> Fields:
    """Return the fields of the head's layer; in EAGLE's own layout, all fields."""
    kind = fields.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise fields.error("speculators_model_type", f"{kind!r} is not supported (eagle3)")
    layer = fields if kind is None else fields.section("transformer_layer_config")
    if layer is None or not is_eagle3(fields.raw):
        raise fields.error("speculators_model_type", "not an EAGLE-3 head, in the layout of speculators or of EAGLE")
    return layer


def _check_built(fields: Fields, layer: Fields) -> None:
    for section in (fields, layer):
        for name in NOT_BUILT:
            if section.boolean(name, False):
                raise section.error(name, "not supported")
    eagle = fields.section("eagle_config")
    if eagle is not None and not eagle.boolean("use_aux_hidden_state", True):
        raise eagle.error("use_aux_hidden_state", "false is not supported (true)")
    if (activation := layer.text("hidden_act", "silu")) != "silu":
        raise layer.error("hidden_act", f"{activation!r} is not supported (silu)")
    if (num_layers := layer.integer("num_hidden_layers", 1, high=MAX_SIZE)) != 1:
        raise layer.error("num_hidden_layers", f"{num_layers} is not supported (1)")
    if (kind := layer.text("model_type", "llama")) not in MODEL_TYPES:
        raise layer.error("model_type", f"{kind!r} is not supported ({', '.join(MODEL_TYPES)})")


def _sizes(fields: Fields, layer: Fields, target: ModelConfig) -> tuple[int, int, int, int]:
    """Return (hidden size, heads, KV heads, head_dim), checked against the model's."""
    if target.norm_after:
        raise fields.error("architectures", "models with norms after their layers have no such states")
    wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for section, name, size in (
        (layer, "hidden_size", layer.integer("hidden_size", high=MAX_SIZE)),
        (fields, "target_hidden_size", fields.integer("target_hidden_size", None, high=MAX_SIZE)),
        (layer, "vocab_size", layer.integer("vocab_size", None, high=1 << 31)),
    ):
        models = wanted[name.removeprefix("target_")]
        if size not in (None, models):
            raise section.error(name, f"{size} is not the model's ({models})")
    num_heads = layer.integer("num_attention_heads", high=MAX_SIZE)
    num_kv_heads = layer.integer("num_key_value_heads", num_heads, high=MAX_SIZE)
    head_dim = layer.integer("head_dim", None, high=MAX_SIZE) or target.hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2 or head_dim == 0:
        raise layer.error("num_key_value_heads", f"{num_heads} heads of {head_dim} on {num_kv_heads} do not work")
    return target.hidden_size, num_heads, num_kv_heads, head_dim


def _state_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are states. SpecForge's `eagle_config` names layers by their outputs."""
    eagle, name = fields.section("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    outputs = eagle.get(name) if eagle is not None else None
    given = fields.get(name) or outputs or [2, num_layers // 2, num_layers - 3]
    offset = 1 if given is outputs else 0
    known = isinstance(given, list) and all(type(each) is int and 0 <= each <= num_layers - offset for each in given)
    if not known or len(set(given)) != len(given) or len(given) > MAX_STATES:
        raise fields.error(name, f"{given!r} are not 1 to {MAX_STATES} of {num_layers} layers")
    return tuple(each + offset for each in given)


def _window(layer: Fields) -> int:
    kinds = layer.get("layer_types") or ["full_attention"]
    if kinds not in (["full_attention"], ["sliding_attention"]):
        raise layer.error(
            "layer_types", f"{kinds!r} is not supported (full_attention or sliding_attention of one layer)"
        )
    if kinds == ["full_attention"]:
        return NO_WINDOW
    window: int = layer.integer("sliding_window", high=NO_WINDOW)
    return window


def _proposed_tokens(fields: Fields) -> int | None:
    methods = fields.raw.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return count if type(count) is int and 1 <= count <= MAX_DRAFTS else None
