"""The picture that `quire top` draws, from two looks at the metrics."""

from __future__ import annotations

from service.cli.client.top import Scrape, render
from service.errors import EndReason
from service.observability.metrics import GatewayMetrics, LaneStats


def look(metrics: GatewayMetrics, at_s: float, **stats: float) -> Scrape:
    metrics.set_fleet({"w1": stats}, {"normal": LaneStats(2, 0.5), "batch": LaneStats(1, 9.0)}, 1)
    return Scrape(at_s, Scrape.read(metrics.exposition().decode()).samples)


def test_a_picture_shows_rates_percentiles_and_blocks():
    metrics = GatewayMetrics("m")
    counts = {"num_running": 2, "num_waiting": 1, "num_blocks_free": 30, "num_blocks_used": 10, "kv_waste_ratio": 0.02}
    before = look(metrics, 10.0, steps_total=100, generation_tokens_total=50, step_time_ms=5.0, **counts)
    timer = metrics.track_request(7, 16)
    for elapsed_s in (0.004, *[0.012] * 9):
        metrics.observe_tokens(elapsed_s == 0.004, elapsed_s)
    timer.observe_end(EndReason.STOP)
    now = look(metrics, 12.0, steps_total=300, generation_tokens_total=2050, step_time_ms=6.5, **counts)
    text = "\n".join(render(before, now, 50))
    assert "0 open   3 queued, for 9.0 s at most   0.5 ended/s" in text
    assert "TTFT      p50 <= 5 ms   p90 <= 5 ms   p99 <= 5 ms" in text
    assert "gap       p50 <= 25 ms" in text
    assert "2 running   1 waiting   100 steps/s   6.5 ms a step" in text
    assert "1,000 generated" in text
    assert "█" * 10 + "░" * 30 in text
    assert "█ 10 used   ░ 30 free   waste 2.0 %" in text


def test_a_service_without_workers_has_a_picture_too():
    metrics = GatewayMetrics("m")
    sight = Scrape.read(metrics.exposition().decode())
    assert list(render(sight, sight, 80)) == [
        "requests  0 open   0 queued, for 0.0 s at most   0.0 ended/s",
        "TTFT      -",
        "gap       -",
    ]
