"""What dashboards and alerts ask for is what a gateway exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.observability.metrics import GatewayMetrics, LaneStats
from service.observability.worker_metrics import WORKER_METRICS

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
METRIC = re.compile(r"\b(?:vllm|quire):[a-z0-9_]+")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Every sample name, with a worker whose card has all stats."""
    gateway = GatewayMetrics("m")
    stats = {metric.stat: 1.0 for metric in WORKER_METRICS}
    gateway.set_fleet({"w": stats}, {"normal": LaneStats(0, 0.0)}, 1)
    lines = gateway.exposition().decode().splitlines()
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in lines if line and line[0] != "#"} | {
        line.split()[2] for line in lines if line.startswith("# TYPE")
    }


def panels() -> list[dict]:
    return json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]
    for path in ("prometheus/alerts.yml", "kubernetes/keda.yaml"):
        yield (DEPLOY / path).read_text()


def test_every_metric_asked_for_is_exported(exported):
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 15
    assert asked - exported == set()


def test_panels_do_not_overlap_and_each_has_its_own_id():
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_dashboard_names_no_server_of_ours():
    """It loads without edits: the data source is a variable that Grafana fills."""
    for panel in panels():
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
