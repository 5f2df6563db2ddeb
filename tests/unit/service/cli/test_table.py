"""Tables on the terminal."""

from __future__ import annotations

import pytest

from service.cli.table import print_grid, print_table, shown


def test_names_and_values(capsys):
    print_table([("a", "1"), ("longer", "2")])
    assert capsys.readouterr().out == "a       1\nlonger  2\n"


def test_numbers_are_right_aligned(capsys):
    print_grid(("what", "us"), [("copy", "9"), ("norm", "1,234"), ("none", "-")])
    assert capsys.readouterr().out == "what     us\ncopy      9\nnorm  1,234\nnone      -\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1234567, "1,234,567"), (12345.678, "12,346"), (0.123456, "0.1235"), (0.0, "0"), ("x", "x")],
)
def test_figures_as_people_read_them(value, text):
    assert shown(value) == text
