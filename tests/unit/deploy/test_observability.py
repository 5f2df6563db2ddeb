"""Dashboards and alerts use only metrics that a gateway exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from service.observability.metrics import GatewayMetrics, LaneStats
from service.observability.worker_metrics import WORKER_METRICS

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
METRIC = re.compile(r"\b(?:vllm|quire):[a-z0-9_]+")
WORKERS = re.compile(r"\b(?:sum|avg|count)(?: by \([a-z, ]+\))? ?\((?:rate\(|increase\()?((?:vllm|quire):[a-z0-9_]+)")
"""A metric whose samples are added as they are."""


@pytest.fixture(scope="module")
def samples() -> list[str]:
    """Every sample, with a worker whose card has all stats."""
    gateway = GatewayMetrics("m")
    stats = {metric.stat: 1.0 for metric in WORKER_METRICS}
    gateway.count_response("/metrics", 200)
    gateway.set_fleet({"w": stats}, {"normal": LaneStats(0, 0.0)}, 1)
    return gateway.exposition().decode().splitlines()


@pytest.fixture(scope="module")
def exported(samples) -> set[str]:
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in samples if line and line[0] != "#"} | {
        line.split()[2] for line in samples if line.startswith("# TYPE")
    }


def panels() -> list[dict]:
    return json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    scaled = yaml.safe_load((DEPLOY / "kubernetes" / "keda.yaml").read_text())
    yield from (trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])


def test_every_queried_metric_is_exported(exported):
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 15
    assert asked - exported == set()


def test_every_queried_label_is_exported(samples):
    """The expression's metrics have it: in `by (...)` or as `label="..."`."""
    for expression in expressions():
        names = tuple(METRIC.findall(expression))
        of_metrics = {label for line in samples if line.startswith(names) for label in re.findall(r'(\w+)="', line)}
        by = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
        asked = by | set(re.findall(r'(\w+)(?:=~|!=|!~|=)"', expression))
        assert not names or asked <= of_metrics, expression


def test_a_workers_metric_is_not_added_up_over_gateways(samples):
    """Each gateway exports every worker."""
    of_workers = {re.split(r"[{ ]", line, maxsplit=1)[0] for line in samples if 'engine="w"' in line}
    assert [name for each in expressions() for name in WORKERS.findall(each) if name in of_workers] == []


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
