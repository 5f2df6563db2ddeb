from pathlib import Path

import pytest
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from service.errors import EndReason
from service.observability.gateway_group import GatewayGroup, OpenCounts, SharedNumbers, forget_open_requests
from service.observability.metrics import GatewayMetrics, LaneStats


@pytest.fixture
def groups(tmp_path):
    return [GatewayGroup(tmp_path, index, 2) for index in range(2)]


@pytest.fixture
def gateways(groups, monkeypatch):
    """Metrics of two gateways, as if each were a process."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(groups[0].folder))

    def start(group, pid):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: pid))
        return GatewayMetrics("m", group)

    return [start(groups[0], 100), start(groups[1], 101)], start


def samples(gateway):
    families = text_string_to_metric_families(gateway.exposition().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def serve_one(gateway):
    timer = gateway.track_request(30, 16)
    for _ in range(3):
        timer.observe_tokens(1)
    gateway.count_response("/v1/completions", 200)
    timer.observe_end(EndReason.STOP)


def test_a_group_goes_through_a_variable():
    group = GatewayGroup(Path("/tmp/a/b"), 1, 3)
    assert GatewayGroup.find({"QUIRE_GATEWAY_GROUP": group.to_variable()}) == group
    assert GatewayGroup.find({}) is None


def test_every_gateway_exposes_what_all_have_counted(gateways, monkeypatch):
    (one, other), _ = gateways
    with monkeypatch.context() as patch:
        patch.setattr(values, "ValueClass", values.MutexValue)
        alone = GatewayMetrics("m")
        for _ in range(3):
            serve_one(alone)
    for gateway in (one, one, other):
        serve_one(gateway)
    for gateway in (one, other):
        found, expected = samples(gateway), samples(alone)
        of_fleet = ("quire:queue", "quire:leases")
        counts = {
            key
            for key in expected
            if not key[0].endswith(("_seconds_bucket", "_sum", "_created")) and not key[0].startswith(of_fleet)
        }
        assert {key: found[key] for key in counts} == {key: expected[key] for key in counts}
    assert one.latency_buckets() == other.latency_buckets()


def test_gauges_of_the_fleet_are_the_latest_and_open_requests_the_sum(gateways):
    (one, other), _ = gateways
    timers = [one.track_request(1, 1), other.track_request(1, 1), other.track_request(1, 1)]
    one.set_fleet({"w": {"num_running": 2.0}}, {"normal": LaneStats(5, 1.0)}, 2)
    other.set_fleet({"w": {"num_running": 3.0}}, {"normal": LaneStats(4, 0.5)}, 2)
    assert samples(other)[("quire:queue_depth",)] == 4
    assert samples(other)[("vllm:num_requests_running", ("engine", "w"), ("model_name", "m"))] == 3
    assert one.num_open() == other.num_open() == samples(one)[("quire:open_requests",)] == 3
    timers[0].observe_end(EndReason.STOP)
    assert other.num_open() == 2


def test_counters_never_fall_when_a_gateway_is_killed_and_restarted(gateways, groups):
    (one, other), start = gateways
    serve_one(one)
    serve_one(other)
    other.track_request(1, 1)
    for path in groups[0].folder.glob("gauge_live*_101.db"):  # as its parent does
        path.unlink()
    assert one.num_open() == 0
    successor = start(groups[1], 102)
    serve_one(successor)
    key = ("quire:requests_ended_total", ("reason", "stop"))
    assert samples(one)[key] == samples(successor)[key] == 3
    first = ("vllm:time_to_first_token_seconds_count", ("engine", "gateway"), ("model_name", "m"))
    assert samples(one)[first] == samples(successor)[first] == 3


def test_open_requests_of_a_client_count_at_all_gateways(groups):
    one, other = (OpenCounts(group) for group in groups)
    one.add("alice", 1)
    other.add("alice", 2)
    other.add("bob", 1)
    assert [counts.count("alice") for counts in (one, other)] == [3, 3]
    forget_open_requests(groups[1])
    assert [counts.count(name) for counts in (one, other) for name in ("alice", "bob")] == [1, 0, 1, 0]
    one.add("alice", -1)
    assert OpenCounts(groups[1]).count("alice") == 0
    assert OpenCounts(None).count("alice") == 0


def test_numbers_without_a_group_are_private():
    one, other = SharedNumbers("n", 2, None), SharedNumbers("n", 2, None)
    one.own[1] += 2
    assert (one.totals(), other.totals()) == ([0.0, 2.0], [0.0, 0.0])
