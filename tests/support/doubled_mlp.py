"""Goldens of 4-bit formats whose MLP is twice as wide, so that its groups divide between two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from model.weights.safetensors_file import read_safetensors
from tests.support.safetensors_bytes import save


def double_mlp(golden: Path, folder: Path, *, mixes_groups: bool) -> Path:
    """Write `golden` with every row of gate and up and column of down twice, the second at half the scale.

    With `mixes_groups`, which needs desc_act, groups of both halves take turns.
    """
    raw = json.loads((golden / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | {"intermediate_size": 2 * raw["intermediate_size"]}))
    stored = {name: tensor.values() for name, tensor in read_safetensors(golden / "model.safetensors").items()}
    save(
        folder / "model.safetensors",
        {name: _doubled(name, values, mixes_groups) if ".mlp." in name else values for name, values in stored.items()},
    )
    return folder


def _doubled(name: str, values: np.ndarray, mixes_groups: bool) -> np.ndarray:
    module, _, kind = name.rpartition(".")
    is_down = module.endswith("down_proj")
    if kind == "g_idx" and is_down:
        halves = [2 * values, 2 * values + 1] if mixes_groups else [values, values + values.max() + 1]
        return np.concatenate(halves).astype(values.dtype)
    if kind == "g_idx":
        return values
    if kind == "weight_shape":
        return values * ([1, 2] if is_down else [2, 1])
    other = (values.astype(np.float32) / 2).astype(values.dtype) if "scale" in kind else values
    inputs = 1 if kind.startswith("weight_") else 0
    if mixes_groups and is_down and kind != "qweight":
        return np.stack([values, other], axis=1).reshape(-1, values.shape[1])
    return np.concatenate([values, other], axis=inputs if is_down else 1 - inputs)
