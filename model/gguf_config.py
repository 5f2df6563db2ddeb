"""Builds a config.json from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.errors import ModelError
from model.gguf_file import GgufHeader


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A `general.architecture` of llama.cpp."""

    families: tuple[str, ...]  # the first if there is no config.json
    pairs_rows: bool = False  # rows of q and k are in pairs, for an interleaved rotation
    needs_config: bool = False  # the metadata lack fields of config.json


ARCHITECTURES = {
    "llama": Architecture(families=("llama", "mistral", "ministral", "mixtral"), pairs_rows=True),
    "qwen2": Architecture(families=("qwen2",)),
    "qwen3": Architecture(families=("qwen3",)),
    "qwen3moe": Architecture(families=("qwen3_moe",)),
    "granite": Architecture(families=("granite",), pairs_rows=True, needs_config=True),
    "smollm3": Architecture(families=("smollm3",), pairs_rows=True, needs_config=True),
    "ernie4_5": Architecture(families=("ernie4_5",), needs_config=True),
}

FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
"""Fields of config.json -> metadata keys, after the architecture's name."""

EXPERT_FIELDS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields that `ModelConfig.from_dict` reads, unchecked. Raises ModelError."""
    metadata, architecture = header.metadata, _name(header)
    if ARCHITECTURES[architecture].needs_config:
        raise ModelError(
            f"{header.path}: general.architecture: {architecture!r} needs the original config.json next to it"
        )
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in header.tensors:
        raise ModelError(f"{header.path}: scales its rotary frequencies: put the original config.json next to it")
    raw = {field: metadata.get(f"{architecture}.{name}") for field, name in (FIELDS | EXPERT_FIELDS).items()}
    embedding = header.tensors.get("token_embd.weight")
    has_llama_experts = architecture == "llama" and raw["num_local_experts"]
    return raw | {
        "model_type": "mixtral" if has_llama_experts else ARCHITECTURES[architecture].families[0],
        "norm_topk_prob": True,
        "vocab_size": None if embedding is None else embedding.shape[0],
        "rope_theta": raw["rope_theta"] or 10000.0,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def check_architecture(header: GgufHeader, family: str) -> Architecture:
    """Return the file's architecture. Raises ModelError unless it holds `family`."""
    name = _name(header)
    architecture = ARCHITECTURES[name]
    if family not in architecture.families:
        known = ", ".join(architecture.families)
        problem = f"{name!r} does not hold config.json's {family!r} ({known})"
        raise ModelError(f"{header.path}: general.architecture: {problem}")
    return architecture


def _name(header: GgufHeader) -> str:
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: general.architecture: {str(name)[:60]!r} is not supported ({known})")
    return str(name)
