"""A folder of a quantised Llama-3.1-8B whose weights are a hole in a file, for `--load-format dummy`.

`python -m tests.bench.sparse_folder --format int4|int8|fp8|fp8-block --out DIR`: the loader takes formats and shapes
from it, and random weights in place of the file's.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from model.presets import PRESETS
from model.weights.checkpoint import expected_shapes
from model.weights.online_fp8 import is_layer_matrix

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
}
ITEM_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I8": 1, "F8_E4M3": 1}


def compressed_tensors(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": inputs, "output_activations": None}},
        "ignore": ["lm_head"],
    }


FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
QUANTISATIONS = {
    "int4": compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "int8": compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel", group_size=None),
    "fp8": compressed_tensors("float-quantized", FP8_INPUTS, num_bits=8, type="float", strategy="channel"),
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
}


def tensors_of(name: str, shape: tuple[int, ...], quantised: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return stored names, dtypes and shapes of a tensor of the model."""
    if not is_layer_matrix(name, shape):
        return {name: ("BF16", shape)}
    (n, k), module = shape, name.removesuffix(".weight")
    if quantised == "int4":
        return {f"{module}.weight_packed": ("I32", (n, k // 8)), f"{module}.weight_scale": ("BF16", (n, k // 128))}
    if quantised in ("fp8", "int8"):
        return {name: ("I8" if quantised == "int8" else "F8_E4M3", shape), f"{module}.weight_scale": ("BF16", (n, 1))}
    return {name: ("F8_E4M3", shape), f"{module}.weight_scale_inv": ("F32", (math.ceil(n / 128), math.ceil(k / 128)))}


def write_folder(quantised: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in expected_shapes(PRESETS["llama-3.1-8b"]).items():
        for stored, (dtype, stored_shape) in tensors_of(name, shape, quantised).items():
            begin, end = end, end + math.prod(stored_shape) * ITEM_BYTES[dtype]
            header[stored] = {"dtype": dtype, "shape": stored_shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": QUANTISATIONS[quantised]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", required=True, choices=sorted(QUANTISATIONS))
    parser.add_argument("--out", required=True, type=Path)
    flags = parser.parse_args()
    write_folder(flags.format, flags.out)


if __name__ == "__main__":
    main()
