"""Cases of `quire bench kernels` for expert layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from model.families.configs.family import ExpertsConfig
from model.ops.interface import Array, ExpertGroups, Fp8Rows, Ops
from model.ops.weight import Weight, WeightFormat
from service.bench.cases.kernel_cases import FP8_SIZE, Case, Launch

SEED = 0
INT4_GROUP = 128
INT4_SIZE = 4.6  # standard deviation of random 4-bit weights


class ExpertCases:
    """Routing, grouped products and their sum, for several row counts. Each weight stack is created once."""

    def __init__(self, ops: Ops, experts: ExpertsConfig, hidden_size: int, rows: tuple[int, ...]):
        self._ops = ops
        self._experts = experts
        self._hidden = hidden_size
        self._rows = rows
        self._rng = np.random.default_rng(SEED)
        self._stacks: dict[tuple[WeightFormat, int, int], Weight] = {}

    def all(self) -> Iterator[Case]:
        """Yield every case, in layer order."""
        size = self._experts.intermediate_size
        for rows in self._rows:
            yield from self._routing(rows)
            for kind in (WeightFormat.DENSE, WeightFormat.FP8, WeightFormat.INT4):
                for name, width, inner in (("gate_up", 2 * size, self._hidden), ("down", self._hidden, size)):
                    if kind is not WeightFormat.INT4 or inner % INT4_GROUP == 0:
                        yield self._product(name, kind, rows, width, inner)
            yield self._sum(rows)

    def _routing(self, rows: int) -> Iterator[Case]:
        ops, experts = self._ops, self._experts
        num_experts, used = experts.num_experts, experts.num_used

        def route(_: int) -> Launch:
            logits = ops.upload(self._rng.standard_normal((rows, num_experts), np.float32))
            return lambda: ops.route_experts(logits, used, experts.renormalises)

        def group(turn: int) -> Launch:
            ids = ops.upload(self._ids(rows, turn))
            return lambda: ops.group_by_expert(ids, num_experts)

        def route_to_groups(_: int) -> Launch:
            logits = ops.upload(self._rng.standard_normal((rows, num_experts), np.float32))
            return lambda: ops.route_to_groups(logits, used, experts.renormalises)

        num_bytes = rows * (4 * num_experts + 8 * used)
        yield Case("route_to_groups", f"{rows} x {num_experts}", num_bytes + 16 * rows * used, 0, route_to_groups)
        yield Case("route_experts", f"{rows} x {num_experts}", num_bytes, 0, route)
        yield Case("group_by_expert", f"{rows} x {used}", 16 * rows * used, 0, group)

    def _product(self, name: str, kind: WeightFormat, rows: int, width: int, inner: int) -> Case:
        """Return a case that reads each used expert once; rows of `down` are sorted."""
        ops, num_pairs, is_sorted = self._ops, rows * self._experts.num_used, name == "down"
        num_in_use = len(np.unique(self._ids(rows)))

        def make(turn: int) -> Launch:
            groups, stack = self._groups(rows, turn), self._stack(kind, width, inner)
            x: Array | Fp8Rows = self._random((num_pairs if is_sorted else rows, inner))
            if kind is WeightFormat.FP8 and ops.has_fp8:
                x = Fp8Rows(*map(ops.upload, map(ops.download, _parts(ops, x))))
            return lambda: ops.experts_linear(x, stack, groups, is_sorted=is_sorted)

        item = {WeightFormat.FP8: 1, WeightFormat.INT4: 0.5 + 2 / INT4_GROUP}.get(kind, ops.dtype.itemsize)
        num_bytes = round(num_in_use * width * inner * item) + num_pairs * (inner + width) * ops.dtype.itemsize
        size = f"{name} {kind} {rows} x {self._experts.num_used} of {num_in_use} x {width} x {inner}"
        return Case("experts_linear", size, num_bytes, 2 * num_pairs * width * inner, make)

    def _sum(self, rows: int) -> Case:
        ops, used, hidden = self._ops, self._experts.num_used, self._hidden

        def make(turn: int) -> Launch:
            groups, x = self._groups(rows, turn), self._random((rows * used, hidden))
            weights = ops.upload(self._rng.random((rows, used), np.float32))
            return lambda: ops.combine_experts(x, groups, weights)

        return Case("combine_experts", f"{rows} x {used}", rows * (used + 1) * hidden * ops.dtype.itemsize, 0, make)

    def _ids(self, rows: int, turn: int = 0) -> np.ndarray:
        """Return int32[rows, k], distinct experts per row. Each turn uses other experts, to read them from memory."""
        scores = np.random.default_rng((rows, turn)).random((rows, self._experts.num_experts))
        return np.argsort(scores, axis=1)[:, : self._experts.num_used].astype(np.int32)

    def _groups(self, rows: int, turn: int) -> ExpertGroups:
        """Return groups that outlive the scratch."""
        ops = self._ops
        with ops.scratch():
            found = ops.group_by_expert(ops.upload(self._ids(rows, turn)), self._experts.num_experts)
            arrays = [ops.download(array) for array in (found.rows, found.places, found.offsets)]
        return ExpertGroups(*map(ops.upload, arrays))

    def _stack(self, kind: WeightFormat, width: int, inner: int) -> Weight:
        key = (kind, width, inner)
        if key not in self._stacks:
            self._stacks[key] = self._ops.prepare_weight(self._random_stack(kind, width, inner))
        return self._stacks[key]

    def _random_stack(self, kind: WeightFormat, width: int, inner: int) -> Weight:
        """Return identical experts, each in its own memory."""
        ops, num_experts, rng = self._ops, self._experts.num_experts, self._rng

        def stacked(matrix: np.ndarray) -> Array:
            return ops.upload(np.ascontiguousarray(np.broadcast_to(matrix, (num_experts, *matrix.shape))))

        if kind is WeightFormat.INT4:
            scale = np.full((width, inner // INT4_GROUP), inner**-0.5 / INT4_SIZE, np.float16)
            data = stacked(rng.integers(0, 256, (width, inner // 2), np.uint8))
            return Weight(data, kind, stacked(scale), group_size=INT4_GROUP)
        if kind is WeightFormat.FP8:
            data = stacked(rng.integers(0, 256, (width, inner), np.uint8) & np.uint8(0xF7))  # no NaN in e4m3
            return Weight.fp8(data, stacked(np.full(width, inner**-0.5 / FP8_SIZE, np.float32)))
        return Weight(stacked((rng.standard_normal((width, inner), np.float32) * inner**-0.5).astype(ops.dtype)))

    def _random(self, shape: tuple[int, int]) -> Array:
        return self._ops.upload(self._rng.standard_normal(shape, np.float32).astype(self._ops.dtype))


def _parts(ops: Ops, x: Array) -> tuple[Array, Array]:
    rows = ops.quantise_rows(x)
    return rows.data, rows.scale
