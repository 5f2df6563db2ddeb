"""vLLM's table: its layout, and what its figures count."""

from datetime import datetime

import pytest

from service.bench.load_client import Answer
from service.bench.trace import TracedRequest
from service.bench.vllm_table import Load, read_objectives, result_path, vllm_record, vllm_table
from service.errors import StartupError

REQUESTS = [TracedRequest(100, 3, 0.0), TracedRequest(50, 2, 0.0), TracedRequest(70, 9, 0.0)]
ANSWERS = [
    Answer(sent_s=1.0, chunks_s=[1.1, 1.2, 1.4], end_s=1.5, num_tokens=3),
    Answer(sent_s=0.0, chunks_s=[0.3, 0.4], end_s=0.5, num_tokens=2),
    Answer(error="HTTP 503"),
]
TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             8
Request rate configured (RPS):           2.50
Benchmark duration (s):                  2.00
Total input tokens:                      150
Total generated tokens:                  5
Request throughput (req/s):              1.00
Output token throughput (tok/s):         2.50
Total token throughput (tok/s):          77.50
---------------Time to First Token----------------
Mean TTFT (ms):                          200.00
Median TTFT (ms):                        200.00
P50 TTFT (ms):                           200.00
P100 TTFT (ms):                          300.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          125.00
Median TPOT (ms):                        125.00
P50 TPOT (ms):                           125.00
P100 TPOT (ms):                          150.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           133.33
Median ITL (ms):                         100.00
P50 ITL (ms):                            100.00
P100 ITL (ms):                           200.00
=================================================="""


def test_the_table():
    load = Load(rate=2.5, max_concurrency=8, duration_s=2.0)
    assert vllm_table(load, REQUESTS, ANSWERS, percentiles=(50, 100)) == TABLE


def test_the_saved_result_and_the_goodput():
    load = Load(rate=float("inf"), max_concurrency=8, duration_s=2.0, objectives_ms={"ttft": 200, "e2el": 900})
    record = vllm_record(load, REQUESTS, ANSWERS, ["ttft"], [99.5])
    assert record.pop("p99.5_ttft_ms") == pytest.approx(299, abs=1)
    assert {key: record[key] for key in ("completed", "failed", "request_rate", "request_goodput")} == {
        "completed": 2, "failed": 1, "request_rate": "inf", "request_goodput": 0.5
    }  # fmt: skip
    assert (record["mean_ttft_ms"], record["std_ttft_ms"]) == pytest.approx((200, 100))
    assert "Request goodput (req/s):                 0.50" in vllm_table(load, REQUESTS, ANSWERS)


def test_names_of_saved_results(tmp_path):
    load, now = Load(rate=2.0, max_concurrency=8, duration_s=0.0), datetime(2026, 1, 2, 3, 4, 5)
    path = result_path(tmp_path / "new", None, load, "org/tiny", now)
    assert path == tmp_path / "new" / "vllm-2.0qps-concurrency8-tiny-20260102-030405.json"
    with pytest.raises(StartupError, match=r"^--result-filename: .* cannot be written"):
        result_path(tmp_path, "new", load, "m", now)


@pytest.mark.parametrize("word", ["itl:3", "ttft", "tpot:x"])
def test_objectives_that_are_none(word):
    with pytest.raises(StartupError, match=r"^--goodput: "):
        read_objectives([word])


def test_without_limits_and_answers():
    load = Load(rate=float("inf"), max_concurrency=None, duration_s=2.0)
    table = vllm_table(load, REQUESTS[2:], ANSWERS[2:], ["e2el"])
    assert "configured" not in table
    assert "concurrency" not in table
    assert "Mean E2EL (ms):                          0.00" in table
