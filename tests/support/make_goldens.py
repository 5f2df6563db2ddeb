"""Makes tests/unit/model/goldens: tiny random models of every family with what transformers computes from them.

Needs torch and transformers, which the repository does not install; the folders it writes are checked in. Run it as
`python tests/support/make_goldens.py [case ...]` in an environment with torch 2.13, transformers 5.17 and safetensors.

Each folder holds a model (config.json by hand, as transformers 4 or 5 spells it, and safetensors) and golden.npz:
    token_ids  int32[T], a prompt of `num_prompt` tokens and its greedy continuation in float32
    logits     float32[T, V], of one float32 forward pass over all of token_ids
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDENS = Path(__file__).parents[1] / "unit" / "model" / "goldens"
NUM_PROMPT, NUM_GREEDY = 40, 64
NUM_TOKENS = NUM_PROMPT + NUM_GREEDY
MIN_GAP = 0.02
"""Between the best and the second logit of every greedy step: far above what float32 can be off by."""

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}


def heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


CASES: dict[str, dict] = {
    # transformers 4, nothing of rope or kv heads spelled out, head_dim derived
    "llama2_fp16": {**SHAPE, **LLAMA, "num_attention_heads": 4, "torch_dtype": "float16", "rope_scaling": None},
    "llama3_gqa_bf16": {**SHAPE, **LLAMA, **heads(4, 1, 64), "rope_theta": 500000.0, "torch_dtype": "bfloat16"},
    "llama31_bf16": {
        **SHAPE,
        **LLAMA,
        **heads(4, 2, 64),
        "eos_token_id": [2, 3],
        "dtype": "bfloat16",
        "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
    },
    "llama32_tied_bf16": {
        **SHAPE,
        **LLAMA,
        **heads(4, 2, 64),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
    },
    "llama_linear_fp16": {
        **SHAPE,
        **LLAMA,
        **heads(4, 2, 80),
        "torch_dtype": "float16",
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama_dynamic_bf16": {
        **SHAPE,
        **LLAMA,
        **heads(2, 2, 64),
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "llama_yarn_bf16": {
        **SHAPE,
        **LLAMA,
        **heads(2, 1, 128),
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    },
    "llama_head256_bf16": {**SHAPE, **LLAMA, **heads(2, 1, 256), "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "llama_biases_sharded_fp32": {
        **SHAPE,
        **LLAMA,
        **heads(4, 2, 16),
        "attention_bias": True,
        "mlp_bias": True,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mistral_window_bf16": {
        **SHAPE,
        **heads(4, 2, 96),
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 20,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    "qwen2_bf16": {
        **SHAPE,
        **heads(6, 2, 16),
        "hidden_size": 96,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3_bf16": {
        **SHAPE,
        **heads(4, 2, 128),
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}


def make_case(name: str, raw: dict) -> None:
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    dtype = getattr(torch, raw.get("dtype") or raw["torch_dtype"])
    for seed in range(100):
        save_weights(folder, random_weights(folder, dtype, seed), sharded="sharded" in name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        prompt = torch.randint(4, raw["vocab_size"], (NUM_PROMPT,), generator=torch.Generator().manual_seed(seed))
        token_ids, logits, gap = greedy(model, prompt.tolist(), is_dynamic="dynamic" in name)
        if gap > MIN_GAP and len(set(token_ids[NUM_PROMPT:])) > 15:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy continuation")
    np.savez_compressed(
        folder / "golden.npz", token_ids=np.array(token_ids, np.int32), logits=logits, num_prompt=NUM_PROMPT
    )
    print(f"{name}: seed {seed}, least gap {gap:.3f}, {len(set(token_ids[NUM_PROMPT:]))} different tokens")


def random_weights(folder: Path, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Weights that keep activations near 1 and spread the logits by about 4."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        noise = torch.randn(tensor.shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
            if model.config.tie_word_embeddings and name == "model.norm.weight":
                value *= 6  # makes up for the quiet embedding
        elif model.config.tie_word_embeddings and "embed_tokens" in name:
            value = 0.1 * noise  # a louder embedding would only repeat its own token
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.5 * noise
        else:
            value = noise * tensor.shape[1] ** -0.5
            if model.config.tie_word_embeddings and ("o_proj" in name or "down_proj" in name):
                value *= 3
        tensors[name] = value.to(dtype).contiguous()
    return tensors


def save_weights(folder: Path, tensors: dict[str, torch.Tensor], *, sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, num_shards, weight_map = sorted(tensors), 3, {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file_name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], *, is_dynamic: bool) -> tuple[list[int], np.ndarray, float]:
    """(prompt and continuation, their logits [T, V], the least gap between best and second).

    Every step computes the whole sequence anew, so no cache can be at fault. A dynamic rope is held at the frequencies
    of the whole length, which one pass over the whole sequence must agree with.
    """
    if is_dynamic:
        rotary = model.model.rotary_emb
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=NUM_TOKENS)
        rotary.rope_type = "default"
    token_ids, gap = list(prompt), float("inf")
    for _ in range(NUM_GREEDY):
        best = model(torch.tensor([token_ids])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        token_ids.append(int(best.indices[0]))
    logits = model(torch.tensor([token_ids])).logits[0].float()
    if is_dynamic:
        rotary.rope_type, rotary.max_seq_len_cached = "dynamic", model.config.max_position_embeddings
        torch.testing.assert_close(model(torch.tensor([token_ids])).logits[0], logits)
    return token_ids, logits.numpy(), gap


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make_case(case, CASES[case])
