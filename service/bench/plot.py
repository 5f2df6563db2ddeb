"""Draws a `report.Figure`, given as JSON on stdin, to a file. A separate process, so that matplotlib stays optional."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib.figure

PANEL_WIDTH_IN = 6.4
PANEL_HEIGHT_IN = 4.4
BAR_HEIGHT_IN = 0.24

FEW_SERIES = 6
"""Maximum number of series with a legend inside the axes."""


def draw(figure: dict[str, Any], path: str) -> None:
    panels = figure["panels"]
    bars = [len(series["x"]) for panel in panels if panel["kind"] == "bars" for series in panel["series"]]
    size = (PANEL_WIDTH_IN * len(panels), max(PANEL_HEIGHT_IN, 1 + BAR_HEIGHT_IN * max(bars, default=0)))
    canvas = matplotlib.figure.Figure(figsize=size, layout="constrained")
    canvas.suptitle(figure["title"])
    for axes, panel in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"])
        axes.grid(alpha=0.3)
        if panel["kind"] == "stack":
            _stack(axes, panel["series"])
        else:
            for series in panel["series"]:
                _add(axes, panel["kind"], series)
        if "y_max" in panel:
            axes.set_ylim(0, panel["y_max"])
        if panel["kind"] == "stack":  # the bars leave no room inside
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(panel["series"]), frameon=False)
        elif len(panel["series"]) > FEW_SERIES:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        elif len(panel["series"]) > 1:
            axes.legend()
    canvas.savefig(path, dpi=130)


def _stack(axes: Any, layers: list[dict[str, Any]]) -> None:
    ends = [0.0] * len(layers[0]["x"])
    for layer in layers:
        axes.barh(layer["x"], layer["y"], left=ends, label=layer["label"])
        ends = [end + width for end, width in zip(ends, layer["y"], strict=True)]
    axes.invert_yaxis()


def _add(axes: Any, kind: str, series: dict[str, Any]) -> None:
    if kind == "bars":
        axes.barh(series["x"], series["y"])
        axes.margins(y=0.01)
        axes.invert_yaxis()
    elif kind == "steps":
        axes.plot(series["x"], series["y"], label=series["label"], linewidth=0.7)
    else:
        axes.plot(series["x"], series["y"], label=series["label"], marker="o", markersize=3)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
