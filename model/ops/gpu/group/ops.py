"""`Ops` on several GPUs of one host, run in lockstep by one thread: see `model.ops.group.ops`.

Sums are fused with the norms after them. A step's graphs, one per GPU, are replayed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from model.ops.gpu.group.collectives import CudaCollectives
from model.ops.gpu.group.interface import GroupRank
from model.ops.gpu.group.paths import SumPath
from model.ops.group.arrays import GroupArray, PartialSums, SplitArray, on_rank
from model.ops.group.device import whole_of
from model.ops.group.loading import HostWriter, PieceWriter, load_group
from model.ops.group.ops import GroupOps
from model.ops.group.turns import in_turn
from model.ops.interface import Array, Fp8Rows, Sampled, SamplingArrays
from model.ops.weight import Weight

_FUSED = (SumPath.PUSH, SumPath.PULL)
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


class CudaGroupOps(GroupOps):
    """`Ops` on a group of GPUs. Downloads and `synchronize` raise LateRankError if a rank was late; results are
    undefined from then on."""

    def __init__(
        self,
        ranks: Sequence[GroupRank],
        collectives: CudaCollectives,
        open_writer: Callable[[], PieceWriter] = HostWriter,
    ):
        """`open_writer` opens a thread's writer of weights."""
        super().__init__(ranks, collectives)
        self._open_writer = open_writer
        self._cuda_ranks = tuple(ranks)
        self.sums = collectives
        self._errors = GroupArray(tuple(collectives.errors))

    def load_parallel(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        super().synchronize()  # the targets' memory may be in use
        load_group(self.ranks, targets, read, self._open_writer)

    def compile_ahead(self, work: Callable[[], None]) -> None:
        """Compile each kernel once for all ranks."""
        first, *others = self._cuda_ranks
        first.compile_ahead(work, others)

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        (warm_up_run or work)()
        self.synchronize()
        capturing: list[GroupRank] = []
        try:
            for _, rank in in_turn(self._cuda_ranks):
                rank.begin_capture()
                capturing.append(rank)
            work()
        finally:
            replays = [rank.end_capture() for _, rank in in_turn(self._cuda_ranks) if rank in capturing]
        return partial(self._replay, replays)

    def _replay(self, replays: Sequence[Callable[[], None]]) -> None:
        for rank, _ in self._turns():
            replays[rank]()

    def synchronize(self) -> None:
        super().synchronize()
        self._check()

    def download(self, array: Array) -> np.ndarray:
        parts = [ops.download(part) for ops, part in self._parts(array)]
        self._check()
        return whole_of(array, parts)

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        own = [[*on_rank(list(arrays), rank), error] for rank, error in enumerate(self._errors.parts)]
        fetches = [ops.download_async(own[rank]) for rank, ops in self._turns()]

        def fetch() -> list[np.ndarray]:
            hosts = [self._fetched(rank, each) for rank, each in enumerate(fetches)]
            self.sums.check([host.pop() for host in hosts])
            return [whole_of(array, parts) for array, *parts in zip(arrays, *hosts, strict=True)]

        return fetch

    def _fetched(self, rank: int, fetch: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        try:
            return fetch()
        except RuntimeError as error:  # CuPy's errors do not name the device
            raise RuntimeError(f"rank {rank} ({self._cuda_ranks[rank].label}) failed: {error}") from error

    def _check(self) -> None:
        self.sums.check([ops.download(error) for ops, error in self._parts(self._errors)])

    def tune_linear(
        self, weights: Sequence[Weight], bias: Array | None, num_rows: Sequence[int], *, dtype: np.dtype | None = None
    ) -> None:
        """Measure on the first rank only: with one algorithm, equal products have the same bits on every rank."""
        first, *others = self._cuda_ranks
        first.use()
        first.tune_linear(on_rank(list(weights), 0), on_rank(bias, 0), num_rows, dtype=dtype)
        for rank in others:
            rank.share_tuning(first)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        path = self._fused_path(x)
        if path is None:
            return super().add_rms_norm(x, residual, weight, eps, out)
        outs = out if out is not None else self.temporary(residual.shape, self.dtype)
        self.sums.sum_add_rms_norm(path, x.parts, residual.parts, weight.parts, eps, outs.parts)
        return outs

    def add_rms_norm_quantised(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Fp8Rows | None = None
    ) -> Fp8Rows:
        path = self._fused_path(x)
        if path is None:
            return super().add_rms_norm_quantised(x, residual, weight, eps, out)
        if out is None:
            rows = len(residual)
            out = Fp8Rows(self.temporary(residual.shape, _UINT8), self.temporary((rows,), _FLOAT32))
        outs = [on_rank(out, rank) for rank in range(self.num_ranks)]
        self.sums.sum_add_rms_norm(path, x.parts, residual.parts, weight.parts, eps, outs)
        return out

    def _fused_path(self, x: Array) -> SumPath | None:
        """Return the path that fuses x's sum with the norm; None: a separate sum or none."""
        if not isinstance(x, PartialSums) or not len(x):
            return None
        path = self.sums.path(x.parts)
        return path if path in _FUSED else None

    def normalise_qk(self, qkv: Array, q_norm: Array, k_norm: Array, eps: float) -> None:
        q_size = len(q_norm) // self.num_ranks
        sizes = q_size, (qkv.shape[1] - q_size) // 2
        self.sums.normalise_qk(qkv.parts, q_norm.parts, k_norm.parts, sizes, eps)

    def sample(self, logits: Array, params: SamplingArrays, out: Array | None = None) -> Sampled:
        """Sample; gather logits of a padded vocabulary first, because the kernels read whole parts."""
        if isinstance(logits, SplitArray) and logits.split.size != logits.shape[1] * self.num_ranks:
            logits = self._gathered(logits)
        return super().sample(logits, params, out)
