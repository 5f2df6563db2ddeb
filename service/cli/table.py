"""Terminal tables."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def print_grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under a header; numbers and "-" are right-aligned."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    signs = [">" if all(_is_number(cell) for cell in column[1:]) else "<" for column in columns]
    for row in (header, *rows):
        cells = (f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True))
        print("  ".join(cells).rstrip())


def shown(value: float | int | str | None) -> str:
    """Format a figure: four significant digits, thousands separators, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit()
