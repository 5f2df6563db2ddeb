"""The parts of an engine's start, timed: on the CPU, of the demo model."""

from __future__ import annotations

from dataclasses import replace

from service.config.settings import Settings
from tests.bench.start import PARTS, print_starts, start_here
from tests.support.demo_engine import DEMO


def test_all_parts_of_a_start_are_timed(monkeypatch, capsys):
    for owner, function in PARTS.values():  # which a start wraps for good, in a process of its own
        monkeypatch.setattr(owner, function, getattr(owner, function))
    start = start_here(replace(Settings(), model=DEMO, device="cpu", load_format="dummy", max_num_seqs=2))
    on_a_gpu = {"graphs", "of these timing", "of these finding kernels"}
    assert {name for name, seconds in start.parts_s.items() if seconds > 0} == set(PARTS) - on_a_gpu
    in_turn = [seconds for name, seconds in start.parts_s.items() if not name.startswith("of these")]
    assert start.imports_s + sum(in_turn) <= start.all_s + 0.02  # the clock of ages has hundredths
    print_starts(["here"], [start])
    assert capsys.readouterr().out.splitlines()[1].startswith("here")
