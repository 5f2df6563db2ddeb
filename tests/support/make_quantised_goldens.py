"""Makes tests/unit/model/weights/formats/goldens: tiny random llama models in each quantised format.

Needs torch, transformers, compressed-tensors, gptqmodel, bitsandbytes, gguf and the source of AutoAWQ on PYTHONPATH,
which the repository does not install. Run `python tests/support/make_quantised_goldens.py [case ...]` in an
environment that has them; the folders it writes are checked in. Formats packed here by their specification and not by
their own tool: fp8 (`quant_method: fp8`), ModelOpt's, and the K-quants of GGUF, whose Python package only reads them.

Each folder holds a model and golden.npz, computed by transformers in float32 from the dequantised weights:
    token_ids     int32[T], a prompt of `num_prompt` tokens and its greedy continuation
    logits        float32[T, V] of one pass over token_ids
    rounded_token_ids, rounded_logits: the same with the inputs of quantised layers rounded, if the format asks for it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_goldens import CASES as PLAIN_CASES
from make_goldens import (
    LLAMA,
    NUM_GREEDY,
    NUM_PROMPT,
    SHAPE,
    heads,
    random_weights,
    split_experts,
    stacked_experts,
)
from safetensors.torch import save_file
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

GOLDENS = Path(__file__).parents[1] / "unit" / "model" / "weights" / "formats" / "goldens"
MIN_GAP = 0.02
"""Between the best and the second logit of every greedy step."""

MIN_ROUNDED_GAP = 0.05
"""The same with rounded inputs, where the order of sums may flip a rounding."""

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""(tensors of a module by suffix, the dequantised weight float32[N, K])."""

SMALL = {**SHAPE, **LLAMA, **heads(4, 2, 32), "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
HALF = {**SMALL, "torch_dtype": "float16"}
ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 64}
BLOCKS = {**SMALL, **ONE_LAYER, **heads(4, 4, 32), "hidden_size": 160, "intermediate_size": 256}


@dataclass(frozen=True)
class Case:
    raw: dict[str, Any]
    config: dict[str, Any]  # quantization_config
    pack: Callable[[torch.Tensor, str], Packed]
    dense: tuple[str, ...] = ()  # parts of names of modules left as they are
    rounds: str = ""  # "fp8" | "int8": the inputs of quantised layers
    config_file: str = "config.json"
    extra: Tensors = field(default_factory=dict)


# compressed-tensors


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "format": format}},
    }


def arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def pack_compressed(weight: torch.Tensor, name: str, *, config: dict[str, Any], extra: Tensors | None = None) -> Packed:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    group = dict(config["config_groups"]["group_0"])
    scheme = QuantizationScheme(**group)
    args = scheme.weights
    scale_of = partial(calculate_qparams, quantization_args=args)
    state: Tensors = {"weight": weight}
    if args.strategy == "tensor":
        low, high = weight.min(), weight.max()
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif args.strategy == "block":
        rows, columns = (-size % 128 for size in weight.shape)
        tiles = pad(weight, (0, columns, 0, rows)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = weight.unflatten(1, (-1, args.group_size))
        low, high = groups.amin(2), groups.amax(2)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = scale_of(low, high, global_scale=state["weight_global_scale"])
    else:
        scale, zero = scale_of(low, high)
    if args.num_bits != 4 or args.type != "float":
        scale = scale.to(torch.bfloat16)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    packed = compressor.compress(state, scheme)
    packed = {suffix: value.detach().clone().contiguous() for suffix, value in packed.items() if value is not None}
    if args.type == "float" and args.num_bits == 4:
        values = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape).float()
        if args.strategy == "group":
            scales = decompress_mx_scale(packed["weight_scale"]).float()
        else:
            scales = packed["weight_scale"].float() / packed["weight_global_scale"]
        dequantised = (values.unflatten(1, (-1, args.group_size)) * scales[:, :, None]).flatten(1)
    else:
        widened = {**packed, "weight_scale": packed["weight_scale"].float()}
        dequantised = compressor.decompress(widened, scheme)["weight"].float()
    return packed | (extra or {}), dequantised


# fp8, ModelOpt and fp8 of rows in compressed-tensors' names, by their specification


def pack_fp8_rows(weight: torch.Tensor, name: str) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    data = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale}, data.float() * scale.float()


def pack_fp8_blocks(weight: torch.Tensor, name: str) -> Packed:
    num_outputs, num_inputs = weight.shape
    rows, columns = (-size % 128 for size in weight.shape)
    tiles = pad(weight, (0, columns, 0, rows)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)) / 448
    stretched = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:num_outputs, :num_inputs]
    data = (weight / stretched).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale_inv": scale}, data.float() * stretched


def pack_fp8_scalar(weight: torch.Tensor, name: str, *, scale_name: str, input_name: str) -> Packed:
    scale = weight.abs().max() / 448
    data = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": data, scale_name: scale, input_name: torch.tensor(0.02)}, data.float() * scale


def pack_modelopt_nvfp4(weight: torch.Tensor, name: str) -> Packed:
    """compressed-tensors' packing with the scale of the matrix as a multiplier."""
    tensors, dequantised = pack_compressed(weight, name, config=NVFP4)
    factor = (1 / tensors["weight_global_scale"]).reshape(())
    renamed = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"], "weight_scale_2": factor}
    values = dequantised * tensors["weight_global_scale"] * factor
    return renamed | {"input_scale": torch.tensor(0.01)}, values


# GPTQ, by GPTQModel


def gptq_config(**changes: Any) -> dict[str, Any]:
    base = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq", "lm_head": False}
    return {"quant_method": "gptq", **base, "dynamic": {}, **changes}


def pack_gptq(weight: torch.Tensor, name: str, *, config: dict[str, Any]) -> Packed:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    bits, size = config["bits"], config["group_size"]
    num_outputs, num_inputs = weight.shape
    size = num_inputs if size == -1 else size
    group_of = torch.arange(num_inputs, dtype=torch.int32) // size
    if config["desc_act"]:  # one order for all matrices with the same input, as from one Hessian
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
        group_of = torch.empty_like(group_of).scatter_(0, order, group_of)
    by_group = torch.stack([weight[:, group_of == group] for group in range(num_inputs // size)], dim=1)
    largest = 2**bits - 1
    if config["sym"]:
        scales = (by_group.abs().amax(2) * 2 / largest).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = by_group.amin(2).clamp(max=0), by_group.amax(2).clamp(min=0)
        scales = ((high - low) / largest).half().float()
        zeros = (-low / scales).round().clamp(1, largest)
    linear = torch.nn.Linear(num_inputs, num_outputs, bias=False)
    linear.weight.data = weight.clone()
    packed = TorchLinear(
        bits=bits,
        group_size=size,
        sym=config["sym"],
        desc_act=config["desc_act"],
        in_features=num_inputs,
        out_features=num_outputs,
        bias=False,
        pack_dtype=torch.int32,
    )
    packed.pack_original(linear, scales, zeros, group_of)
    stored = {suffix: getattr(packed, suffix).clone() for suffix in ("qweight", "qzeros", "scales", "g_idx")}
    scale, zero = scales[:, group_of.long()], zeros[:, group_of.long()]
    dequantised = (((weight + zero * scale) / scale).round().clamp(0, largest) - zero) * scale
    if config["checkpoint_format"] == "gptq":  # what GPTQModel's saving does to v1 files
        one_less = (zeros - 1).to(torch.int64)
        shifts = torch.arange(0, 32, bits)
        words = (one_less.T.unflatten(1, (-1, 32 // bits)) << shifts).sum(2)
        stored["qzeros"] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return stored, dequantised


# AWQ, by AutoAWQ


def pack_awq(weight: torch.Tensor, name: str, *, size: int) -> Packed:
    from awq.modules.linear.gemm import WQLinear_GEMM

    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    stretched, shifts = scales.repeat_interleave(size, 1), zeros.repeat_interleave(size, 1)
    codes = (weight / stretched + shifts).round().clamp(0, 15)
    dequantised = (codes - shifts) * stretched
    linear.weight.data = dequantised.clone()
    packed = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    return {suffix: getattr(packed, suffix).clone() for suffix in ("qweight", "qzeros", "scales")}, dequantised


# bitsandbytes


def pack_nf4(weight: torch.Tensor, name: str, *, nested: bool) -> Packed:
    """The library packs; its dequantising on a CPU (0.50) errs where blocks cross rows, so its formula is used."""
    from bitsandbytes.functional import quantize_4bit

    data, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    tensors = {"weight": data}
    for suffix, value in state.as_dict(packed=True).items():
        tensors[f"weight.{suffix}"] = value.clone()
    scales = state.absmax
    if nested:
        outer = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: scales.numel()]
        scales = state.state2.code[scales.long()] * outer + state.offset
    codes = torch.stack([data.flatten() >> 4, data.flatten() & 15], dim=1).flatten().long()
    dequantised = (state.code[codes].unflatten(0, (-1, 64)) * scales[:, None]).flatten().view(weight.shape)
    assert (dequantised - weight).abs().max() < 0.2 * weight.abs().max()
    return tensors, dequantised


FP8_DYNAMIC = compressed(
    "float-quantized", arguments(8, "float", "channel"), arguments(8, "float", "token", dynamic=True)
)
FP8_STATIC = compressed("float-quantized", arguments(8, "float", "tensor"), arguments(8, "float", "tensor"))
FP8_BLOCK = compressed(
    "float-quantized",
    arguments(8, "float", "block", block_structure=[128, 128]),
    arguments(8, "float", "group", group_size=128, dynamic=True),
)
INT8_W8A8 = compressed("int-quantized", arguments(8, "int", "channel"), arguments(8, "int", "token", dynamic=True))
W8A16 = compressed("pack-quantized", arguments(8, "int", "channel"))
W8A16_GROUPS = compressed("pack-quantized", arguments(8, "int", "group", group_size=32))
W4A16 = compressed("pack-quantized", arguments(4, "int", "group", group_size=32))
W4A16_ASYM = compressed("pack-quantized", arguments(4, "int", "group", group_size=32, symmetric=False))
W4A16_CHANNEL = compressed("pack-quantized", arguments(4, "int", "channel"))
NVFP4 = compressed(
    "nvfp4-pack-quantized",
    arguments(
        4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn"
    ),
)
MXFP4 = compressed(
    "mxfp4-pack-quantized",
    arguments(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
)
EXPERTS_OF_BLOCKS = {"hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": None}


def compressed_case(config: dict[str, Any], raw: dict[str, Any] | None = None, **more: Any) -> Case:
    pack = partial(pack_compressed, config=config, extra=more.pop("module_extra", None))
    return Case(raw or SMALL, config, pack, **more)


def gptq_case(**changes: Any) -> Case:
    config = gptq_config(**changes)
    return Case(HALF, config, partial(pack_gptq, config=config))


CASES: dict[str, Case] = {
    "fp8_dynamic": compressed_case(FP8_DYNAMIC, rounds="fp8"),
    "fp8_static": compressed_case(FP8_STATIC, rounds="fp8", module_extra={"input_scale": torch.tensor([0.02])}),
    "fp8_block": compressed_case(FP8_BLOCK, BLOCKS),
    "fp8_mixed": compressed_case(
        {**FP8_DYNAMIC, "ignore": ["lm_head", r"re:.*layers\.1\.self_attn\..*", "model.layers.0.mlp.down_proj"]},
        dense=("layers.1.self_attn", "layers.0.mlp.down_proj"),
        rounds="fp8",
    ),
    "deepseek_block": Case(BLOCKS, {**FP8_CONFIG, "weight_block_size": [128, 128]}, pack_fp8_blocks),
    # Qwen3-30B-A3B-FP8: routers are named among the modules left out
    "qwen3_moe_fp8_block": Case(
        {**PLAIN_CASES["qwen3_moe_bf16"], **ONE_LAYER, **heads(4, 4, 32), **EXPERTS_OF_BLOCKS},
        {
            **FP8_CONFIG,
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
        },
        pack_fp8_blocks,
    ),
    "mixtral_fp8_dynamic": Case(
        PLAIN_CASES["mixtral_bf16"],
        {**FP8_DYNAMIC, "ignore": ["lm_head", r"re:.*block_sparse_moe\.gate$"]},
        pack_fp8_rows,
    ),
    "fp8_tensor": Case(
        SMALL,
        {**FP8_CONFIG, "activation_scheme": "static"},
        partial(pack_fp8_scalar, scale_name="weight_scale_inv", input_name="activation_scale"),
        rounds="fp8",
    ),
    "modelopt_fp8": Case(
        SMALL,
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        partial(pack_fp8_scalar, scale_name="weight_scale", input_name="input_scale"),
        rounds="fp8",
        config_file="hf_quant_config.json",
        extra={
            f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale": torch.tensor(0.5)
            for layer in range(2)
            for side in "kv"
        },
    ),
    "modelopt_nvfp4": Case(
        SMALL,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        pack_modelopt_nvfp4,
    ),
    "int8_w8a8": compressed_case(INT8_W8A8, rounds="int8"),
    "int8_w8a16": compressed_case(W8A16),
    "int8_w8a16_groups": compressed_case(W8A16_GROUPS),
    "int4_packed": compressed_case(W4A16),
    "int4_packed_asym": compressed_case(W4A16_ASYM),
    "int4_packed_channel": compressed_case(W4A16_CHANNEL),
    "nvfp4": compressed_case(NVFP4),
    "mxfp4": compressed_case(MXFP4),
    "gptq": gptq_case(),
    "gptq_v2_asym": gptq_case(checkpoint_format="gptq_v2", sym=False),
    "gptq_asym": gptq_case(sym=False),
    "gptq_desc_act": gptq_case(desc_act=True, sym=False),
    "gptq_8bit_channel": gptq_case(bits=8, group_size=-1),
    "gptq_8bit_groups": gptq_case(bits=8, group_size=32, sym=False),
    "awq": Case(
        HALF,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        partial(pack_awq, size=32),
    ),
    "nf4": Case(
        SMALL,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        partial(pack_nf4, nested=False),
    ),
    "nf4_nested": Case(
        SMALL,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        partial(pack_nf4, nested=True),
    ),
}


PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def make_case(name: str, case: Case) -> None:
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.raw, indent=2) + "\n")
    for seed in range(300):
        tensors, dequantised = quantised_weights(folder, case, seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        model.load_state_dict(stacked_experts(dequantised, case.raw["model_type"]))
        if write_golden(folder, model, case, seed):
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy continuation")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if case.config_file == "config.json":
        config = {**case.raw, "quantization_config": case.config}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        (folder / case.config_file).write_text(json.dumps(case.config, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, {size} bytes")


def quantised_weights(folder: Path, case: Case, seed: int) -> tuple[Tensors, Tensors]:
    """(the checkpoint's tensors, the dequantised weights in float32)."""
    plain = random_weights(AutoModelForCausalLM, folder, torch.float32, seed)
    plain = split_experts(plain, case.raw["model_type"])
    dtype = getattr(torch, case.raw["torch_dtype"])
    tensors: Tensors = {name: value.clone() for name, value in case.extra.items()}
    dequantised: Tensors = {}
    for name, value in plain.items():
        module = name.removesuffix(".weight")
        if not name.endswith(PROJECTIONS) or any(part in name for part in case.dense):
            tensors[name] = value.to(dtype).contiguous()
            dequantised[name] = tensors[name].float()
            continue
        packed, dequantised[name] = case.pack(value, module)
        tensors |= {f"{module}.{suffix}": tensor.contiguous().clone() for suffix, tensor in packed.items()}
    return tensors, dequantised


def write_golden(folder: Path, model: torch.nn.Module, case: Case, seed: int) -> bool:
    """Write golden.npz if the greedy continuations are clear, without and with rounded inputs."""
    model = model.eval()
    prompt = torch.randint(4, case.raw["vocab_size"], (NUM_PROMPT,), generator=torch.Generator().manual_seed(seed))
    exact = clear_greedy(model, prompt.tolist())
    if exact is None:
        return False
    arrays = {"token_ids": np.array(exact[0], np.int32), "logits": exact[1], "num_prompt": np.array(NUM_PROMPT)}
    if case.rounds:
        for module_name, module in model.named_modules():
            if module_name.endswith("_proj") and not any(part in module_name for part in case.dense):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], case.rounds),))
        with_rounding = clear_greedy(model, prompt.tolist(), MIN_ROUNDED_GAP)
        if with_rounding is None:
            return False
        arrays |= {"rounded_token_ids": np.array(with_rounding[0], np.int32), "rounded_logits": with_rounding[1]}
    np.savez_compressed(folder / "golden.npz", **arrays)
    return True


@torch.inference_mode()
def clear_greedy(
    model: torch.nn.Module, prompt: list[int], min_gap: float = MIN_GAP
) -> tuple[list[int], np.ndarray] | None:
    """(prompt and continuation, their logits [T, V]); None if a step's best two logits are close, or tokens repeat."""
    token_ids = list(prompt)
    for _ in range(NUM_GREEDY):
        best = model(torch.tensor([token_ids])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < min_gap:
            return None
        token_ids.append(int(best.indices[0]))
    if len(set(token_ids[NUM_PROMPT:])) <= 15:
        return None
    return token_ids, model(torch.tensor([token_ids])).logits[0].numpy()


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Each row in e4m3 or int8 with its own scale, as serving engines quantise inputs dynamically."""
    largest = x.abs().amax(-1, keepdim=True)
    if kind == "fp8":
        scale = (largest / 448).clamp(min=1e-12)
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    scale = (largest / 127).clamp(min=1e-12)
    return (x / scale).round().clamp(-128, 127) * scale


# GGUF


GGUF_SHAPE = {**SMALL, **ONE_LAYER, **heads(4, 1, 64), "hidden_size": 256, "intermediate_size": 256}
GGUF_CASES = {
    "gguf_q8_0": {**SMALL},
    "gguf_k_quants": GGUF_SHAPE,
}
K_QUANTS = {"q_proj": "Q4_K", "k_proj": "Q5_K", "v_proj": "Q6_K"}
"""Types by module; others are Q4_K."""


def random_k_blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Rows of blocks of random bytes, with scales that make weights of the usual size and a mean near 0."""
    num_outputs, num_inputs = shape
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    blocks = rng.integers(0, 256, (num_outputs * num_inputs // 256, size), np.uint8)
    scale = num_inputs**-0.5 / {"Q4_K": 170, "Q5_K": 340, "Q6_K": 740}[kind]
    if kind == "Q6_K":
        blocks[:, 192:208] = rng.integers(20, 60, (len(blocks), 16))
        blocks[:, 208:] = np.full((len(blocks), 1), scale, np.float16).view(np.uint8)
    else:
        blocks[:, :2] = np.full((len(blocks), 1), scale, np.float16).view(np.uint8)
        blocks[:, 2:4] = np.full((len(blocks), 1), scale * {"Q4_K": 7.5, "Q5_K": 15.5}[kind], np.float16).view(np.uint8)
        fields = rng.integers(0, 64, (len(blocks), 8), np.uint8)  # the minima are the scales, so that codes centre
        low, high = fields[:, :4], fields[:, 4:]
        blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
        blocks[:, 12:16] = (high & 15) | (high & 15) << 4
    return blocks.reshape(num_outputs, -1)


def make_gguf(name: str, raw: dict[str, Any]) -> None:
    """Write one .gguf without a config.json, by the gguf package; it quantises Q8_0 and only reads K-quants."""
    import gguf

    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    case = Case(raw, {}, lambda weight, module: ({}, weight))
    for seed in range(300):
        (folder / "config.json").write_text(json.dumps(raw))
        weights = {
            key: value.numpy()
            for key, value in random_weights(AutoModelForCausalLM, folder, torch.float32, seed).items()
        }
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        (folder / "config.json").unlink()
        rng = np.random.default_rng(seed)
        stored, dequantised = {}, {}
        for key, value in weights.items():
            module = key.split(".")[-2]
            kind = gguf.GGMLQuantizationType.F32
            if module.endswith("_proj") and name == "gguf_k_quants":
                kind = gguf.GGMLQuantizationType[K_QUANTS.get(module, "Q4_K")]
                data = random_k_blocks(kind.name, value.shape, rng)
            elif value.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                data = gguf.quants.quantize(interleaved(value, module, raw), kind)
            else:
                data = value
            stored[key] = (data, kind)
            widened = data if value.ndim == 1 else gguf.quants.dequantize(data, kind)
            dequantised[key] = torch.from_numpy(np.ascontiguousarray(in_halves(widened, module, raw)))
        model.load_state_dict(dequantised)
        if write_golden(folder, model, case, seed):
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear greedy continuation")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, raw["num_hidden_layers"])
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_token_list([f"token {index}" for index in range(1100)])  # longer than a reader keeps
    writer.add_eos_token_id(raw["eos_token_id"])
    writer.add_bos_token_id(raw["bos_token_id"])
    for key, (data, kind) in stored.items():
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{name}: seed {seed}, {sum(path.stat().st_size for path in folder.iterdir())} bytes")


def interleaved(value: np.ndarray, module: str, raw: dict[str, Any]) -> np.ndarray:
    """The order of rows that llama.cpp's converter makes."""
    if module not in ("q_proj", "k_proj"):
        return value
    halves = value.reshape(-1, 2, raw["head_dim"] // 2, value.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def in_halves(value: np.ndarray, module: str, raw: dict[str, Any]) -> np.ndarray:
    if module not in ("q_proj", "k_proj"):
        return value
    return value.reshape(-1, raw["head_dim"] // 2, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case_name in sys.argv[1:] or [*CASES, *GGUF_CASES]:
        if case_name in GGUF_CASES:
            make_gguf(case_name, GGUF_CASES[case_name])
        else:
            make_case(case_name, CASES[case_name])
