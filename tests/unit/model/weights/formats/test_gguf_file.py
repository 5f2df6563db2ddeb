"""GGUF headers: what is read, and that no damage to one does more than refuse it."""

from __future__ import annotations

import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.gguf_file import read_gguf
from model.ops.cpu.ops import NumpyOps
from model.weights.loader import load_model

FOLDER = Path(__file__).parent / "goldens" / "gguf_q8_0"
DATA = (FOLDER / "model.gguf").read_bytes()
HEADER_BYTES = min(tensor.offset for tensor in read_gguf(FOLDER / "model.gguf").tensors.values())


def load(folder: Path, data: bytes) -> None:
    (folder / "model.gguf").write_bytes(data)
    load_model(folder, ModelConfig.read(folder), NumpyOps(), 16)


def test_a_long_array_is_kept_as_its_length():
    header = read_gguf(FOLDER / "model.gguf")
    assert header.metadata["tokenizer.ggml.tokens"] == 1100
    assert header.metadata["general.architecture"] == "llama"


def test_the_config_of_the_metadata():
    config = ModelConfig.read(FOLDER)
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        "llama", 2, 4, 2, 32
    )  # fmt: skip
    assert (config.vocab_size, config.tied_embeddings, config.max_position) == (128, False, 256)


@pytest.mark.parametrize(
    ("problem", "data"),
    [
        ("is not a GGUF file", b"GGML" + DATA[4:]),
        ("is not a GGUF file", DATA[:4] + struct.pack("<I", 1) + DATA[8:]),
        ("tensors or entries", DATA[:8] + b"\xff" * 8 + DATA[16:]),
        ("ends within its header", DATA[:100]),
        ("ends beyond the file", DATA[:-1]),
        (r"general\.architecture: 'llamb'", DATA.replace(b"llama", b"llamb", 2)),
        ("no part of this model", DATA.replace(b"blk.1.ffn_up", b"blk.1.ffn_pu")),
        ("no part of this model", DATA.replace(b"blk.1.ffn_down", b"blk.1.ffn_exps")),
        ("attn_k.weight|k_proj.weight", DATA.replace(b"blk.1.attn_k", b"blk.0.attn_k")),
        ("is not UTF-8", DATA.replace(b"blk.1.attn_k", b"blk.\xff.attn_k")),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, problem: str, data: bytes):
    with pytest.raises(ModelError, match=f"{tmp_path}.*{problem}|twice"):
        load(tmp_path, data)


def test_two_files_are_refused(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(FOLDER / "model.gguf", tmp_path / name)
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        ModelConfig.read(tmp_path)


def test_random_damage_is_refused_or_harmless(tmp_path: Path):
    rng = random.Random(0)
    for _ in range(300):
        data = bytearray(DATA)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(HEADER_BYTES)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        with suppress(ModelError):
            load(tmp_path, bytes(data))
