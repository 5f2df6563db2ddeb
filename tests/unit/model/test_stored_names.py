"""Folders that hold a model without its head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.ops.cpu.ops import NumpyOps
from model.stored_names import INDEX_FILE, SINGLE_FILE, is_base_model
from model.weights.loader import load_model, plan_weights
from model.weights.writer import write_quantised
from tests.support.goldens import Golden, relative_error
from tests.support.paged import PagedSequences

GOLDEN = Golden.load("qwen3_embedding_base_bf16")


def index(folder: Path, *names: str) -> Path:
    folder.joinpath(INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    return folder


def test_the_names_decide(tmp_path: Path):
    assert is_base_model(GOLDEN.folder)
    assert is_base_model(index(tmp_path, "embed_tokens.weight", "norm.weight"))
    assert not is_base_model(index(tmp_path, "embed_tokens.weight", "lm_head.weight"))
    assert not is_base_model(index(tmp_path, "embed_tokens.weight", "lm_head.qweight"))
    assert not is_base_model(index(tmp_path, "model.embed_tokens.weight")), "a head that is missing is an error"


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"[1, 2, 3]"])
def test_malformed_files_are_left_to_the_loader(tmp_path: Path, data: bytes):
    assert not is_base_model(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(data)
    assert not is_base_model(tmp_path)


def test_a_base_model_gives_hidden_states(tmp_path: Path):
    """Qwen3-Embedding-8B ties no embeddings and stores no head."""
    raw = json.loads((GOLDEN.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    (tmp_path / SINGLE_FILE).symlink_to(GOLDEN.folder / SINGLE_FILE)
    config = ModelConfig.read(tmp_path)
    assert (config.has_head, config.shares_embedding) == (False, True)
    assert config.num_parameters == ModelConfig.read(GOLDEN.folder).num_parameters
    model = load_model(tmp_path, config, NumpyOps(), len(GOLDEN.token_ids))
    planned = plan_weights(tmp_path, config, np.dtype(np.float32))
    assert planned.num_bytes == model.weights.num_bytes - model.weights.table_bytes
    hidden = PagedSequences(model, 1, len(GOLDEN.token_ids), 16).hidden(GOLDEN.token_ids)
    expected = PagedSequences(GOLDEN.model(NumpyOps()), 1, len(GOLDEN.token_ids), 16).hidden(GOLDEN.token_ids)
    assert relative_error(hidden, expected) < 1e-6
    write_quantised(tmp_path, tmp_path / "out", "fp8", lambda written: None)
    assert not ModelConfig.read(tmp_path / "out").has_head
    load_model(tmp_path / "out", ModelConfig.read(tmp_path / "out"), NumpyOps(), 16)
