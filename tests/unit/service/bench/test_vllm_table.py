"""vLLM's table: its layout, and what its figures count."""

from service.bench.load_client import Answer
from service.bench.trace import TracedRequest
from service.bench.vllm_table import Load, vllm_table

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


def test_without_limits_and_answers():
    load = Load(rate=float("inf"), max_concurrency=None, duration_s=2.0)
    table = vllm_table(load, REQUESTS[2:], ANSWERS[2:], ["e2el"])
    assert "configured" not in table
    assert "concurrency" not in table
    assert "Mean E2EL (ms):                          0.00" in table
