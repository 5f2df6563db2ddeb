"""`quire bench queue`, small: real processes, a real Redis."""

from __future__ import annotations

import json

import pytest

from service.cli.main import main


def test_every_event_is_carried_and_its_cost_reported(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "queue.json", tmp_path / "queue.png"
    flags = ("--jobs=9", "--tokens=5", "--workers=2", "--doors=2", "--batch=4", f"--out={out}", f"--plot={plot}")
    assert main(["bench", "queue", *flags]) == 0
    page = capsys.readouterr().out
    assert page.startswith("45 token events in ")
    assert [line.split()[0] for line in page.splitlines()[1:]] == ["part", "redis", "workers", "doors"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(out.read_text())
    assert record["work"] == {"num_jobs": 9, "num_tokens": 5, "num_workers": 2, "num_doors": 2, "num_in_step": 4}
    assert record["figures"]["num_events"] == 45
    assert record["figures"]["doors_cpu_s"] > 0.0


def test_a_number_that_is_none_is_refused(capsys):
    assert main(["bench", "queue", "--jobs=none"]) == 2
    assert "--jobs" in capsys.readouterr().err
