"""What a model is: the numbers of `config.json`, read once, refused by name where this code cannot serve them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` names the scaling; only the fields of that kind are set."""

    kind: str  # "default" | "linear" | "dynamic" | "llama3" | "yarn"
    theta: float
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


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
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # o_proj
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # per layer; NO_WINDOW where the layer sees everything
    dtype: str  # "float32" | "float16" | "bfloat16", as stored
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings
