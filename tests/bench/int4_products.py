"""Time the four products of a Llama-3.1-8B layer with 4-bit weights in groups of 128, by rows.

`python -m tests.bench.int4_products --out FILE` on a GPU. A graph goes through the weights of many layers in turn, so
that they come from memory. Columns, in us: each product alone, a layer, and the layer in bf16. `unpacked` is a layer
whose weights are unpacked to bf16 first, as for many rows. Shares are of the ceiling: the larger of the time to copy
the bytes of weights and scales, and that of the products at the rate of a large bf16 product.
"""

from __future__ import annotations

import argparse
import json
import math
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from model.ops.backend import open_ops
from model.ops.gpu.int4.linear import Int4Linear
from model.ops.interface import Ops
from model.ops.weight import Weight, WeightFormat
from tests.bench.fp8_products import BFLOAT16, NUM_LAYERS, SHAPES, TILE, Bench

GROUP_SIZE = 128
ROWS = (1, 2, 3, 4, 8, 16, 17, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
MIN_UNPACKED_ROWS = 384  # the least rows for which the unpacked way is timed
COLD_BYTES = 400 << 20  # weights that one product goes through before it comes to the first again
LARGE = 8192


class Int4Bench(Bench):
    """Matrices of 4-bit weights on a GPU, and the times of products with them."""

    def __init__(self, ops: Ops):
        super().__init__(ops)
        self._ops = ops
        rng = np.random.default_rng()
        self._bytes = ops.upload(rng.integers(0, 256, TILE, np.uint8))
        self._scales = ops.upload(rng.uniform(1e-3, 4e-3, TILE).astype(BFLOAT16))
        self._int4_layers = [{name: self.int4(*shape) for name, shape in SHAPES.items()} for _ in range(NUM_LAYERS)]

    def int4(self, n: int, k: int) -> Weight:
        data = self._filled((k // 128, n // 16, 1024), self._bytes)
        scale = self._filled((k // GROUP_SIZE, n // 16, 16), self._scales)
        return Weight(data, WeightFormat.INT4_TILED, scale=scale, group_size=GROUP_SIZE)

    def product_us(self, name: str, m: int) -> float:
        """Return the time of one product, through cold weights."""
        ops, (n, k) = self._ops, SHAPES[name]
        x, out = self.matrix(m, k), ops.empty((m, n), BFLOAT16)
        weights = [layer[name] for layer in self._int4_layers]
        weights += [self.int4(n, k) for _ in range(math.ceil(COLD_BYTES / weights[0].nbytes) - len(weights))]
        return (
            1e6
            / len(weights)
            * self.seconds([lambda weight=weight: ops.linear(x, weight, out=out) for weight in weights])
        )

    def layers(self, m: int) -> dict[str, float]:
        """Return us a layer: in 4 bits, unpacked to bf16 if there are enough rows, in bf16."""
        ops = self._ops
        unpacker = Int4Linear(ops, None)
        outs = {name: ops.empty((m, n), BFLOAT16) for name, (n, _) in SHAPES.items()}
        xs = {name: self.matrix(m, k) for name, (_, k) in SHAPES.items()}

        def in_int4(name: str, layer: int) -> None:
            ops.linear(xs[name], self._int4_layers[layer][name], out=outs[name])

        def unpacked(name: str, layer: int) -> None:
            ops.linear(xs[name], Weight(unpacker.unpack(self._int4_layers[layer][name])), out=outs[name])

        def in_bf16(name: str, layer: int) -> None:
            ops.linear(xs[name], self._layers[layer][name], out=outs[name])

        found = {"layer": self.layer_us(in_int4)}
        if m >= MIN_UNPACKED_ROWS:
            found["unpacked"] = self.layer_us(unpacked)
        return found | {"bf16": self.layer_us(in_bf16)}

    def flops_per_s(self) -> float:
        """Return the rate of a large product in bf16."""
        ops = self._ops
        x, weight, out = (self.matrix(LARGE, LARGE) for _ in range(3))
        return 2 * LARGE**3 / self.seconds([lambda: ops.linear(x, Weight(weight), out=out)])


def main() -> None:
    """Prints a table; needs a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    flags = parser.parse_args()
    ops = open_ops("cuda", "bfloat16", "bfloat16")
    bench = Int4Bench(ops)
    copied, flops = bench.copy_bytes_per_s(), bench.flops_per_s()
    sizes = {name: n * k / 2 + n * k / GROUP_SIZE * 2 for name, (n, k) in SHAPES.items()}
    read_us = {name: 1e6 * num_bytes / copied for name, num_bytes in sizes.items()}
    print(f"{ops.device_name}: copies {copied / 1e9:.0f} GB/s, products {flops / 1e12:.0f} TFLOP/s; "
          f"weights of a layer at that rate {sum(read_us.values()):.1f} us")  # fmt: skip
    record = {"bench": "int4_products", "device": ops.device_name, "date": datetime.now(UTC).isoformat(" ", "seconds")}
    record |= {"copy_bytes_per_s": copied, "flops_per_s": flops, "weights_us": read_us, "rows": {}}
    for m in flags.rows:
        compute_us = {name: 1e6 * 2 * m * n * k / flops for name, (n, k) in SHAPES.items()}
        ceiling = {name: max(read_us[name], compute_us[name]) for name in SHAPES}
        found = {name: bench.product_us(name, m) for name in SHAPES} | bench.layers(m)
        shares = {name: ceiling[name] / found[name] for name in SHAPES} | {
            "layer": sum(ceiling.values()) / found["layer"]
        }
        record["rows"][m] = {"us": {name: round(us, 1) for name, us in found.items()}}
        record["rows"][m]["share_of_ceiling"] = {name: round(share, 2) for name, share in shares.items()}
        print(f"{m:5} rows: " + "  ".join(f"{name} {us:.1f}" + (f" ({shares[name]:.2f})" if name in shares else "")
                                         for name, us in found.items()), flush=True)  # fmt: skip
    if flags.out is not None:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
