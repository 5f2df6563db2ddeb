"""Times the same work in PyTorch: JSON cases on stdin, JSON seconds (null: not possible) on stdout.

Runs as a process, so that Quire never imports torch.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

ROTATED_BYTES = 256 << 20
ROUNDS = 7


def main() -> None:
    request = json.load(sys.stdin)
    dtype = getattr(torch, request["dtype"])
    seconds: list[float | None] = []
    for case in request["cases"]:
        try:
            seconds.append(_seconds_of(_launches(case, dtype)))
        except RuntimeError as error:  # no cuDNN kernel for the shape, or out of memory
            print(f"torch: {case}: {error}", file=sys.stderr)
            seconds.append(None)
        torch.cuda.empty_cache()
    json.dump(seconds, sys.stdout)


def _launches(case: dict[str, Any], dtype: torch.dtype) -> list[Callable[[], object]]:
    """Return a launch per input set; together the sets exceed any cache."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    if case["what"] == "linear":
        shapes = (case["rows"], case["inner"]), (case["width"], case["inner"])
        return [_linear(*(random(*shape) for shape in shapes)) for _ in range(_num_sets(shapes, dtype))]
    sequences, length = case["sequences"], case["length"]
    queries = 1 if case["what"] == "decode" else length
    kv_shape = (sequences, case["num_kv_heads"], length, case["head_dim"])
    q_shape = (sequences, case["num_heads"], queries, case["head_dim"])
    is_causal = case["what"] == "prefill"
    num_sets = _num_sets((q_shape, kv_shape, kv_shape), dtype)
    return [_attention(random(*q_shape), random(*kv_shape), random(*kv_shape), is_causal) for _ in range(num_sets)]


def _num_sets(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    num_bytes: int = sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    return min(64, -(-ROTATED_BYTES // num_bytes))


def _linear(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: linear(x, weight)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Callable[[], object]:
    def launch() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    return launch


def _seconds_of(launches: list[Callable[[], object]]) -> float:
    """Return the median seconds per launch, replayed from a graph."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times: list[float] = []
    for _ in range(ROUNDS):
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(times)


if __name__ == "__main__":
    main()
