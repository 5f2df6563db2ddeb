"""Rows of `quire check` for a model with experts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from service.cli.check import run_check
from service.config.settings import Settings
from tests.support.expert_models import write_config


def test_experts_and_those_of_a_token_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """2 layers of 16 experts of 3 matrices [128, 256] in 4 bytes."""
    settings = replace(Settings(), model=write_config(tmp_path), device="cpu", load_format="dummy", dtype="float32")
    assert run_check(settings, argparse.Namespace(length=None)) == 0
    table = capsys.readouterr().out
    assert "16 in 2 layers, 12.0 MiB of the weights; 4 for a token, 3.0 MiB" in table
    assert "KV cache" in table
