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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
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


WRAPPER = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 127,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
        "num_channels": 3,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
}
EXPERT_NAMES = {
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj"), "down_proj"),
    "mellum": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj"), "down_proj"),
    "olmoe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj"), "down_proj"),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3"), "w2"),
}
"""Names in the files of (router, experts, an expert's gate and up, down); transformers 5 stacks experts in memory."""

GRANITE_MULTIPLIERS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.22,
}
GRANITE_MOE_NAMES = {
    "moe.experts.gate_up_proj": "moe.input_linear.weight",
    "moe.experts.down_proj": "moe.output_linear.weight",
    "moe.router.weight": "moe.router.layer.weight",
}
"""Ends of names in memory -> in the files."""

PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "pad_token_id": 0}
OLD_WRAPPER_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def named(model_type: str, architecture: str) -> dict:
    return {"model_type": model_type, "architectures": [architecture], "torch_dtype": "bfloat16"}


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
    "qwen3_moe_bf16": {**SHAPE, **heads(4, 2, 32), **QWEN3_MOE},
    "qwen3_moe_dense_layer_bf16": {
        **SHAPE,
        **heads(4, 1, 32),
        **QWEN3_MOE,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
    "mixtral_bf16": {
        **SHAPE,
        **heads(4, 2, 16),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    # Qwen3-Embedding is stored as a base model: names without "model.", no head
    "qwen3_embedding_base_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    "ministral_layer_types_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
    },
    # Mistral Small 3.1 and 3.2, in the spelling of transformers 4
    "mistral3_wrapped4_sharded_bf16": {
        **WRAPPER,
        "torch_dtype": "bfloat16",
        "text_config": {
            **SHAPE,
            **heads(4, 2, 32),
            "model_type": "mistral",
            "sliding_window": None,
            "rope_theta": 1000000000.0,
        },
    },
    # Ministral 3, in the spelling of transformers 5
    "ministral3_wrapped5_bf16": {
        **WRAPPER,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": {
            **SHAPE,
            **heads(4, 2, 32),
            "model_type": "ministral3",
            "sliding_window": None,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    },
    "smollm3_tied_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "num_hidden_layers": 3,
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "no_rope_layers": [1, 0, 1],
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "max_window_layers": 28,
        "rope_theta": 5000000.0,
        "torch_dtype": "bfloat16",
    },
    "granite_tied_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        **GRANITE_MULTIPLIERS,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    # Phi-4 and Phi-3-mini-4k: fused matrices
    "phi3_window_fp16": {
        **SHAPE,
        **PHI3,
        **{name: value for name, value in heads(4, 2, 32).items() if name != "head_dim"},
        "hidden_size": 128,
        "sliding_window": 24,
        "rope_theta": 250000.0,
        "rope_scaling": None,
        "torch_dtype": "float16",
    },
    # Phi-4-mini: longrope of three quarters of each head
    "phi4_mini_longrope_bf16": {
        **SHAPE,
        **PHI3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "sliding_window": 262144,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1, 1.05, 1.1, 1.2, 1.3, 1.4],
            "long_factor": [1, 1.2, 1.6, 2.5, 4.0, 6.0],
        },
        "torch_dtype": "bfloat16",
    },
    "olmo2_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    "seed_oss_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "model_type": "seed_oss",
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "torch_dtype": "bfloat16",
    },
    # layers that slide rotate, the others do not
    "exaone4_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "num_hidden_layers": 3,
        "model_type": "exaone4",
        "architectures": ["Exaone4ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "rope_scaling": {**LLAMA3_SCALING, "factor": 16.0},
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    # half of each head rotates, in pairs of neighbours
    "glm_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "model_type": "glm",
        "architectures": ["GlmForCausalLM"],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 0,
        "eos_token_id": [2, 3],
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    "ernie4_5_tied_bf16": {
        **{name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"},
        **heads(4, 2, 32),
        "model_type": "ernie4_5",
        "architectures": ["Ernie4_5ForCausalLM"],
        "pad_token_id": 0,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_bias": True,
    },
    # the first of four layers has full attention
    "cwm_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        **named("cwm", "CwmForCausalLM"),
        "sliding_window": 24,
        "rope_scaling": {**LLAMA3_SCALING, "factor": 16.0},
        "rope_theta": 1000000.0,
    },
    "helium_bf16": {
        **SHAPE,
        **heads(4, 2, 16),
        **named("helium", "HeliumForCausalLM"),
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    },
    "internlm3_dynamic_bf16": {
        **SHAPE,
        **heads(4, 2, 16),
        **named("internlm3", "InternLM3ForCausalLM"),
        "qkv_bias": True,
        "bias": True,
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        "rope_theta": 50000000.0,
    },
    "iquestcoder_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        **named("iquestcoder", "IQuestCoderForCausalLM"),
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
    },
    # Granite 4 without Mamba: the MLP is that of a shared expert
    "granite4_tied_bf16": {
        **SHAPE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **named("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        "tie_word_embeddings": True,
        **GRANITE_MULTIPLIERS,
        "layer_types": ["full_attention", "full_attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "rope_theta": 10000000.0,
    },
    "granitemoe_tied_bf16": {
        **SHAPE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **named("granitemoe", "GraniteMoeForCausalLM"),
        "tie_word_embeddings": True,
        **GRANITE_MULTIPLIERS,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_theta": 10000.0,
    },
    "mellum_bf16": {
        **SHAPE,
        **heads(4, 2, 32),
        "num_hidden_layers": 3,
        **named("mellum", "MellumForCausalLM"),
        "attention_bias": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "olmoe_bf16": {
        **SHAPE,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        **named("olmoe", "OlmoeForCausalLM"),
        "intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "rope_theta": 10000.0,
    },
    # plain frequencies in layers that slide, yarn in the others
    "olmo3_bf16": {
        **SHAPE,
        **heads(4, 4, 32),
        "num_hidden_layers": 3,
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "torch_dtype": "bfloat16",
    },
}


def make_case(name: str, raw: dict) -> None:
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    dtype = getattr(torch, raw.get("dtype") or raw["torch_dtype"])
    auto = AutoModelForImageTextToText if "text_config" in raw else AutoModelForCausalLM
    vocab_size = raw.get("text_config", raw)["vocab_size"]
    for seed in range(100):
        tensors = random_weights(auto, folder, dtype, seed)
        stored = {stored_name(name, key): t for key, t in split_experts(tensors, raw["model_type"]).items()}
        save_weights(folder, stored, sharded="sharded" in name)
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        prompt = torch.randint(4, vocab_size, (NUM_PROMPT,), generator=torch.Generator().manual_seed(seed))
        token_ids, logits, gap = greedy(model, prompt.tolist(), is_dynamic="dynamic" in name)
        if gap > MIN_GAP and len(set(token_ids[NUM_PROMPT:])) > 15:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy continuation")
    arrays = {"token_ids": np.array(token_ids, np.int32), "logits": logits, "num_prompt": NUM_PROMPT}
    if "embedding" in name:
        hidden = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        arrays["embedding"] = torch.nn.functional.normalize(hidden, dim=0).detach().numpy()
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(f"{name}: seed {seed}, least gap {gap:.3f}, {len(set(token_ids[NUM_PROMPT:]))} different tokens")


def stored_name(case: str, name: str) -> str:
    if "base" in case:
        return name.removeprefix("model.")
    if "granitemoe" in case:
        for old, new in GRANITE_MOE_NAMES.items():
            name = name.replace(old, new)
        return name
    prefix = next((old for old in OLD_WRAPPER_NAMES if name.startswith(old)), "") if "wrapped4" in case else ""
    return OLD_WRAPPER_NAMES.get(prefix, "") + name.removeprefix(prefix)


def split_experts(tensors: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Stacks of experts as a tensor for each, as files hold them."""
    if model_type not in EXPERT_NAMES:
        return tensors
    router, experts, (gate, up), down = EXPERT_NAMES[model_type]
    split = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".mlp.")
        if rest == "gate.weight":
            split[f"{layer}.{router}.weight"] = tensor
        elif not rest.startswith("experts."):
            split[name] = tensor
        for expert, matrix in enumerate(tensor if rest.startswith("experts.") else ()):
            prefix = f"{layer}.{experts}.{expert}"
            if rest == "experts.down_proj":
                split[f"{prefix}.{down}.weight"] = matrix.contiguous()
            else:
                halves = (half.contiguous() for half in matrix.chunk(2))
                split |= {f"{prefix}.{part}.weight": half for part, half in zip((gate, up), halves, strict=True)}
    return split


def stacked_experts(tensors: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """`split_experts` undone."""
    if model_type not in EXPERT_NAMES:
        return tensors
    router, experts, (gate, up), down = EXPERT_NAMES[model_type]
    stacked, of_layers = {}, {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(f".{experts}.")
        if rest:
            of_layers.setdefault(layer, {})[rest] = tensor
        else:
            stacked[name.replace(f".{router}.", ".mlp.gate.")] = tensor
    for layer, own in of_layers.items():
        numbers = range(len(own) // 3)
        halves = [torch.cat([own[f"{n}.{part}.weight"] for part in (gate, up)]) for n in numbers]
        stacked[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(halves)
        stacked[f"{layer}.mlp.experts.down_proj"] = torch.stack([own[f"{n}.{down}.weight"] for n in numbers])
    return stacked


def random_weights(auto: type, folder: Path, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Weights that keep activations near 1 and spread the logits by about 4."""
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.from_pretrained(folder))
    is_tied = model.config.get_text_config().tie_word_embeddings
    # Granite multiplies its embedding by 12 and the layers' outputs by 0.22
    quiet, louder = (4, 3) if model.config.model_type.startswith("granite") else (1, 1)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and is_tied:
            continue
        noise = torch.randn(tensor.shape)
        if tensor.ndim == 1 and name.endswith("weight"):
            value = 1 + 0.2 * noise
            if is_tied and name in ("model.norm.weight", "model.language_model.norm.weight"):
                value *= 6 * quiet  # makes up for the quiet embedding
        elif is_tied and "embed_tokens" in name:
            value = 0.1 / quiet * noise  # a louder embedding would only repeat its own token
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.5 * noise
        else:
            value = noise * tensor.shape[-1] ** -0.5
            if is_tied and any(module in name for module in ("o_proj", "down_proj", "output_linear")):
                value *= 3 * louder
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
