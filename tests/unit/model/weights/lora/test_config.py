import json

import pytest

from model.weights.lora.config import read_adapter_config

MODULES = tuple(f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in ("q_proj", "v_proj"))


def read(folder, **fields):
    given = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return read_adapter_config(folder, MODULES, 3, 64)


def test_scales(tmp_path):
    assert read(tmp_path).rank_and_scale(MODULES[0]) == (8, 2.0)
    assert read(tmp_path, r=16, use_rslora=True).rank_and_scale(MODULES[0]) == (16, 4.0)


def test_patterns_match_a_module_s_name_or_its_end(tmp_path):
    patterns = {"rank_pattern": {"^model.layers.1.self_attn.q_proj": 4, "v_proj": 2}, "alpha_pattern": {"q_proj": 8}}
    read_config = read(tmp_path, **patterns)
    found = [read_config.rank_and_scale(module) for module in MODULES[:4]]
    assert found == [(8, 1.0), (2, 8.0), (4, 2.0), (2, 8.0)]
    assert read(tmp_path, rank_pattern={"proj": 4}).rank_and_scale(MODULES[0])[0] == 8


def test_modules_whose_tensors_must_be_there(tmp_path):
    assert read(tmp_path).expected == MODULES[::2]
    assert read(tmp_path, layers_to_transform=2).expected == (MODULES[4],)
    assert read(tmp_path, exclude_modules=["layers.0.self_attn.q_proj"]).expected == (MODULES[2], MODULES[4])
    assert read(tmp_path, target_modules="all-linear").expected == MODULES
    assert read(tmp_path, target_modules=r".*\.q_proj").expected == ()


@pytest.mark.parametrize("start", [True, False, "gaussian", None])
def test_plain_starts(tmp_path, start):
    assert read(tmp_path, init_lora_weights=start).rank == 8
