"""Makes a config.json from GGUF metadata."""

from __future__ import annotations

from typing import Any

from model.errors import ModelError
from model.gguf_file import GgufHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3")

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
"""Fields of config.json -> metadata keys after the architecture's name."""


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields that `ModelConfig.from_dict` reads, unchecked. Raises ModelError."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: general.architecture: {str(architecture)[:60]!r} is not supported ({known})")
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in header.tensors:
        raise ModelError(f"{header.path}: scales its rotary frequencies: put the original config.json beside it")
    raw = {field: metadata.get(f"{architecture}.{name}") for field, name in FIELDS.items()}
    embedding = header.tensors.get("token_embd.weight")
    return raw | {
        "model_type": architecture,
        "vocab_size": None if embedding is None else embedding.shape[0],
        "rope_theta": raw["rope_theta"] or 10000.0,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
