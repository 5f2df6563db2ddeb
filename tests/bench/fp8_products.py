"""Time of the four products of a Llama-3.1-8B layer with e4m3 weights, by rows, and of quantising their inputs.

`python -m tests.bench.fp8_products --out FILE` on a GPU. A graph alternates the weights of eight layers, so that they
come from memory. Columns, in us a layer: products in e4m3; with the kernels that quantise; up to 16 rows with x in
bf16; products in bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np

from model.ops.backend import open_ops
from model.ops.fp8 import E4M3
from model.ops.interface import Array, Fp8Rows, Ops
from model.ops.weight import Weight

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, INNER = 4096, 14336
SHAPES = {"qkv": (6144, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
WEIGHT_BYTES = sum(n * k for n, k in SHAPES.values())
NUM_LAYERS = 8
ROWS = (1, 4, 8, 16, 17, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
ROUNDS = 9
TILE = 8_388_593  # period of random numbers: a prime, so that no two rows are equal

Launch = Callable[[], object]


class Bench:
    """Matrices of eight layers on a GPU, and timings."""

    def __init__(self, ops: Ops):
        self._ops = ops
        tile = np.random.default_rng().standard_normal(TILE, np.float32)
        self._e4m3 = ops.upload((tile * 100).clip(-448, 448).astype(E4M3).view(np.uint8))
        self._bf16 = ops.upload((tile / 64).astype(BFLOAT16))
        self._fp8_layers = [{name: self._weight(*shape) for name, shape in SHAPES.items()} for _ in range(NUM_LAYERS)]
        self._layers = [
            {name: Weight(self.matrix(*shape)) for name, shape in SHAPES.items()} for _ in range(NUM_LAYERS)
        ]

    def rows(self, num_rows: int, width: int) -> Fp8Rows:
        scale = self._ops.upload(np.full(num_rows, 2e-4, np.float32))
        return Fp8Rows(self._filled((num_rows, width), self._e4m3), scale)

    def _weight(self, num_rows: int, width: int) -> Weight:
        rows = self.rows(num_rows, width)
        return Weight.fp8(rows.data, rows.scale)

    def matrix(self, num_rows: int, width: int) -> Array:
        return self._filled((num_rows, width), self._bf16)

    def _filled(self, shape: tuple[int, int], tile: Array) -> Array:
        array = self._ops.empty(shape, tile.dtype)
        for start in range(0, array.nbytes, tile.nbytes):
            num_bytes = min(tile.nbytes, array.nbytes - start)
            (array.data + start).copy_from_device_async(tile.data, num_bytes, self._ops.stream)
        return array

    def seconds(self, launches: Sequence[Launch]) -> float:
        """Return the median seconds of all launches, captured as one graph."""
        ops = self._ops

        def work() -> None:
            for launch in launches:
                with ops.scratch():
                    launch()

        replay, times = ops.capture(work), []
        for _ in range(ROUNDS + 2):
            begin = ops.record_event()
            replay()
            times.append(ops.elapsed_s(begin, ops.record_event()))
        return statistics.median(times[2:])

    def layer_us(self, product: Callable[[str, int], object]) -> float:
        """Time `product(name, layer)` for the four products of a layer."""
        calls = [(name, layer) for layer in range(NUM_LAYERS) for name in SHAPES]
        return 1e6 / NUM_LAYERS * self.seconds([lambda call=call: product(*call) for call in calls])

    def of_rows(self, m: int) -> dict[str, float]:
        """Times by rows of x, us a layer."""
        ops = self._ops
        outs = {name: ops.empty((m, n), BFLOAT16) for name, (n, _) in SHAPES.items()}
        quantised = {name: self.rows(m, k) for name, (_, k) in SHAPES.items()}
        plain = {name: self.matrix(m, k) for name, (_, k) in SHAPES.items()}
        weight, residual, gate_up = self.matrix(1, HIDDEN)[0], self.matrix(m, HIDDEN), self.matrix(m, 2 * INNER)

        def in_e4m3(name: str, layer: int) -> None:
            ops.linear(quantised[name], self._fp8_layers[layer][name], out=outs[name])

        def with_quantising(name: str, layer: int) -> None:
            if name == "output":
                x = ops.quantise_rows(plain[name])
            elif name == "down":
                x = ops.silu_mul_quantised(gate_up)
            else:
                x = ops.add_rms_norm_quantised(plain[name], residual, weight, 1e-5)
            ops.linear(x, self._fp8_layers[layer][name], out=outs[name])

        def by_bf16(name: str, layer: int) -> None:
            ops.linear(plain[name], self._fp8_layers[layer][name], out=outs[name])

        def in_bf16(name: str, layer: int) -> None:
            ops.linear(plain[name], self._layers[layer][name], out=outs[name])

        found = {"e4m3": self.layer_us(in_e4m3), "with_quantising": self.layer_us(with_quantising)}
        if m <= 16:
            found["x_bf16"] = self.layer_us(by_bf16)
        return found | {"bf16": self.layer_us(in_bf16)}

    def copy_bytes_per_s(self) -> float:
        """Return the copy rate, read and written."""
        source, target = (self._ops.empty((1 << 30,), np.uint8) for _ in range(2))
        source.data.memset_async(1, source.nbytes, self._ops.stream)
        times = []
        for _ in range(ROUNDS):
            begin = self._ops.record_event()
            target.data.copy_from_device_async(source.data, source.nbytes, self._ops.stream)
            times.append(self._ops.elapsed_s(begin, self._ops.record_event()))
        return 2 * source.nbytes / statistics.median(times[2:])

    def row_kernels(self, num_rows: int = 8192) -> dict[str, float]:
        """Return GB/s of the kernels that quantise."""
        ops, sets = self._ops, range(3)
        weight = self.matrix(1, HIDDEN)[0]
        x, residual = ([self.matrix(num_rows, HIDDEN) for _ in sets] for _ in range(2))
        gate_up = [self.matrix(num_rows // 2, 2 * INNER) for _ in sets]
        of_row, of_gate_up = num_rows * HIDDEN, num_rows // 2 * INNER
        cases = {
            "quantise_rows": (3 * of_row, lambda i: ops.quantise_rows(x[i])),
            "rms_norm_quantised": (3 * of_row, lambda i: ops.rms_norm_quantised(x[i], weight, 1e-5)),
            "add_rms_norm_quantised": (
                7 * of_row,
                lambda i: ops.add_rms_norm_quantised(x[i], residual[i], weight, 1e-5),
            ),
            "silu_mul_quantised": (5 * of_gate_up, lambda i: ops.silu_mul_quantised(gate_up[i])),
        }
        return {
            name: num_bytes * len(sets) / self.seconds([lambda i=i, run=run: run(i) for i in sets]) / 1e9
            for name, (num_bytes, run) in cases.items()
        }


def main() -> None:
    """Print a table; needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    flags = parser.parse_args()
    ops = open_ops("cuda", "bfloat16", "bfloat16")
    bench = Bench(ops)
    copied = bench.copy_bytes_per_s()
    limit_us = 1e6 * WEIGHT_BYTES / copied
    print(
        f"{ops.device_name}: copies {copied / 1e9:.0f} GB/s; weights of a layer in e4m3 at that rate {limit_us:.1f} us"
    )
    record = {"bench": "fp8_products", "device": ops.device_name, "date": datetime.now(UTC).isoformat(" ", "seconds")}
    record |= {"copy_bytes_per_s": copied, "weights_us": limit_us, "layer_us": {}}
    for m in flags.rows:
        found = record["layer_us"][m] = {name: round(us, 1) for name, us in bench.of_rows(m).items()}
        print(f"{m:5} rows: " + "  ".join(f"{name} {us}" for name, us in found.items()), flush=True)
    record["gb_per_s"] = {name: round(rate) for name, rate in bench.row_kernels().items()}
    print(record["gb_per_s"])
    if flags.out is not None:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
