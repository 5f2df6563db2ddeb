"""Rows of `quire check`, and files that it refuses."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from service.cli.check import run_check
from service.cli.models import DEMO_MODEL
from service.config.lora import LoraModule, LoraModules
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig, parse_speculative_config
from service.errors import StartupError
from tests.support.expert_models import write_config


def test_experts_and_experts_per_token_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """2 layers of 16 experts of 3 matrices [128, 256] in 4 bytes."""
    settings = replace(Settings(), model=write_config(tmp_path), device="cpu", load_format="dummy", dtype="float32")
    assert run_check(settings, argparse.Namespace(length=None)) == 0
    table = capsys.readouterr().out
    assert "16 in 2 layers, 12.0 MiB of the weights; 4 for a token, 3.0 MiB" in table
    assert "KV cache" in table


def test_ranks_are_reported(capsys: pytest.CaptureFixture[str]):
    """28 heads on 4 KV heads: no 8 ranks. A CPU's ranks share its memory."""
    settings = Settings(model_config="qwen2.5-7b", device="cpu", load_format="dummy", tensor_parallel_size=2)
    run_check(settings, argparse.Namespace(length=None))
    table = capsys.readouterr().out
    assert re.search(r"weights +15\.20 GiB on each rank", table)
    assert re.search(
        r"weights by ranks +1: 28\.37 GiB[^,]*, 2: 15\.20 GiB[^,]*, 4: 8\.62 GiB[^,]*$", table, re.MULTILINE
    )


def test_slots_of_adapters_are_reported(capsys: pytest.CaptureFixture[str]):
    """Adapters of rank 16 on all seven projections of Llama-3.1-8B take 80 MiB."""
    settings = Settings(model_config="llama-3.1-8b", device="cpu", load_format="dummy", dtype="bfloat16")
    settings = replace(settings, enable_lora=True, max_loras=8, max_lora_rank=16)
    run_check(settings, argparse.Namespace(length=None))
    assert re.search(r"adapters +8 slots of rank 16, 640\.0 MiB$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("experts", "reported"),
    [(False, "8 slots of rank 16, 204.0 MiB"), (True, "8 slots of rank 16 for experts too, 12.60 GiB")],
)
def test_slots_of_experts_are_reported(experts: bool, reported: str, capsys: pytest.CaptureFixture[str]):
    """Rank 16 on a layer of Qwen3-30B-A3B: 128 experts of 3 matrices [768, 2048], and a router [128, 2048]."""
    settings = Settings(model_config="qwen3-30b-a3b", device="cpu", load_format="dummy", dtype="bfloat16")
    settings = replace(settings, enable_lora=True, max_loras=8, max_lora_rank=16, lora_experts=experts)
    run_check(settings, argparse.Namespace(length=None))
    assert re.search(f"adapters +{reported}$", capsys.readouterr().out, re.MULTILINE)


def test_drafts_take_memory_from_the_cache(capsys: pytest.CaptureFixture[str]):
    """The demo model's head has one layer of keys and values next to the model's six, and 1 M parameters."""
    settings = Settings(model=DEMO_MODEL, device="cpu", dtype="float32", num_gpu_blocks=64, max_num_seqs=1)
    wanted = parse_speculative_config('{"method": "eagle3"}')
    assert run_check(replace(settings, speculative_config=wanted), argparse.Namespace(length=None)) == 0
    table = capsys.readouterr().out
    assert re.search(r"drafts +3\.8 MiB, eagle3$", table, re.MULTILINE)
    assert "64 of 16 tokens, 114688 bytes each" in table
    run_check(replace(settings, speculative_config=None), argparse.Namespace(length=None))
    assert "64 of 16 tokens, 98304 bytes each" in capsys.readouterr().out


def test_a_head_of_another_model_is_refused():
    wanted = SpeculativeConfig(method="eagle3", model=DEMO_MODEL)
    settings = Settings(model=DEMO_MODEL, device="cpu", speculative_config=wanted)
    with pytest.raises(StartupError, match="--speculative-config"):
        run_check(settings, argparse.Namespace(length=None))


def test_adapters_are_read(tmp_path: Path):
    module = LoraModule("fox", str(tmp_path / "fox"))
    settings = Settings(model=DEMO_MODEL, device="cpu", enable_lora=True, lora_modules=LoraModules((module,)))
    with pytest.raises(StartupError, match="fox: no such folder"):
        run_check(settings, argparse.Namespace(length=None))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("model.safetensors", "ends beyond the file; the file is cut short"),
        ("tokenizer.json", "tokenizer.json: not valid JSON"),
        ("chat_template.jinja", "chat template of .* is malformed"),
    ],
)
def test_files_that_cannot_be_served_are_refused(file: str, reason: str, tmp_path: Path):
    for path in DEMO_MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / file).unlink()
    (tmp_path / file).write_bytes((DEMO_MODEL / file).read_bytes()[:100_000] + b"{%")
    with pytest.raises(StartupError, match=reason):
        run_check(Settings(model=tmp_path, device="cpu"), argparse.Namespace(length=None))
