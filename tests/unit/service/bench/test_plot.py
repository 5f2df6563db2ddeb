"""Drawings: made of figures as JSON, in a process of their own."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from service.bench.report import check_report_flags, write_report
from service.cli.main import main
from service.errors import StartupError

SERIES = [{"label": "a", "x": [1, 2, 4], "y": [3.0, 4.0, 9.0]}, {"label": "b", "x": [1, 2, 4], "y": [3.5, 5.0, 9.5]}]
BARS = [{"label": "share", "x": [f"operation {i}" for i in range(30)], "y": [0.1 * i for i in range(30)]}]
FIGURE = {
    "title": "a figure",
    "panels": [
        {"kind": "line", "title": "lines", "x": "sequences", "y": "ms", "series": SERIES},
        {"kind": "steps", "title": "steps", "x": "s", "y": "ms", "series": SERIES[:1]},
        {"kind": "bars", "title": "bars", "x": "share", "y": "", "series": BARS},
    ],
}


def flags(plot):
    return argparse.Namespace(plot=plot, out=None)


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_every_kind_of_panel_is_drawn(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"figure{suffix}"
    check_report_flags(flags(path))
    write_report(flags(path), {}, FIGURE)
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 5000


def test_a_bench_draws(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "copies.png"
    assert main(["bench", "kernels", "--device", "cpu", "--only", "copy", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    out = argparse.Namespace(plot=None, out=tmp_path / "figures.json")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(StartupError, match=r"--out: .*figures\.json cannot be written"):
        check_report_flags(out)


def test_a_disk_that_is_full_is_one_line():
    out = argparse.Namespace(plot=None, out=Path("/dev/full"))
    check_report_flags(out)
    with pytest.raises(StartupError, match="--out: /dev/full cannot be written: No space left on device"):
        write_report(out, {}, {})


def test_a_figure_that_cannot_be_drawn_is_an_error(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    with pytest.raises(StartupError, match="could not be drawn"):
        write_report(flags(tmp_path / "figure.png"), {}, {"panels": []})
    assert "Error" in capfd.readouterr().err


def test_without_matplotlib_it_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'quire\[plot\]'"):
        check_report_flags(flags(tmp_path / "figure.png"))
