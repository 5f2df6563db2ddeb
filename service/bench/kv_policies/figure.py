"""The two drawings that the PagedAttention paper is known for: where the cache goes, and latency against rate."""

from __future__ import annotations

from collections.abc import Sequence

from service.bench.kv_policies.sharing import SharingFigures
from service.bench.kv_policies.sweep import Comparison
from service.bench.report import Figure

SHARES = {
    "tokens": "tokens",
    "reserved": "reserved",
    "internal": "internal",
    "external": "external",
    "free": "free",
}

HEADROOM = 3.0
"""How many latency limits the drawing shows: what lies higher is out of bounds anyway."""


def comparison_figure(comparison: Comparison, title: str) -> Figure:
    """For `report.write_report`."""
    loaded = {row.policy: row.loaded.use for row in comparison.policies if row.loaded is not None}
    bars = [
        {"label": label, "x": list(loaded), "y": [100 * getattr(use, share) for use in loaded.values()]}
        for share, label in SHARES.items()
        if any(getattr(use, share) for use in loaded.values())
    ]
    panels = []
    if bars:
        panels.append({"kind": "stack", "title": "KV cache, loaded", "x": "% of the pool", "y": "", "series": bars})
    curves = [
        {
            "label": row.policy,
            "x": [run.rate for run in row.curve],
            "y": [run.normalized_latency_s for run in row.curve],
        }
        for row in comparison.policies
        if row.curve
    ]
    if curves:
        axes = {"x": "requests/s", "y": "s/token", "y_max": HEADROOM * comparison.latency_limit_s}
        panels.append({"kind": "line", "title": "normalised latency", **axes, "series": curves})
    return {"title": title, "panels": panels}


def sharing_figure(rows: Sequence[SharingFigures], title: str) -> Figure:
    """For `report.write_report`."""
    bars = {
        "label": "saved",
        "x": [f"{row.method}, {row.width}" for row in rows],
        "y": [100 * row.saved for row in rows],
    }
    panel = {"kind": "bars", "title": "saved by sharing blocks", "x": "% of the blocks", "y": "", "series": [bars]}
    return {"title": title, "panels": [panel]}
