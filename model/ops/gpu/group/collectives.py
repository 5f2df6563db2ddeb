"""Sums and exchanges between GPUs, each by one kernel per rank.

A kernel waits for those of its peers. Loading kernels and allocating results may wait for the device, so both are done
for all ranks before the first launch. Waits end after 4 s; the error words name the late rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from model.ops.gpu.group.interface import GroupLauncher, ShareMover
from model.ops.gpu.group.paths import SumPath, path_of
from model.ops.gpu.group.shared import MAX_BLOCKS, error_of, groups, per_rank, shared_bytes
from model.ops.gpu.norm import norm_threads
from model.ops.group.turns import in_turn
from model.ops.interface import Array, Fp8Rows, Sampled, TokenCandidates

WAIT_S = 4
"""LIMIT_NS of cuda/group/signals.cuh."""

SUM_BLOCKS = 64
"""Most blocks of a sum or gather; more only compete for the links."""

_THREADS = 512
_THREADS_PER_SM = 1024
"""Kernels bounded to 1,024 threads have at most 64 registers per thread."""

_BEST_THREADS = 256
_WIDTHS = {2: 2, 4: 0}
"""QUIRE_DTYPE by item bytes, for kernels that only copy."""
_VEC_BYTES = 16
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


class LateRankError(RuntimeError):
    """A rank was late for a sum; the group's results are undefined from then on."""


class CudaCollectives:
    """`Collectives`, and sums fused with the next operation. Every rank's streams run them in the same order."""

    def __init__(self, ranks: Sequence[GroupLauncher], mover: ShareMover | None = None, max_blocks: int = MAX_BLOCKS):
        """`max_blocks` blocks of all ranks' kernels must be resident at once on each device."""
        self._ranks = tuple(ranks)
        self.mover = mover
        self._max_blocks = min(MAX_BLOCKS, max_blocks)
        self._num_sms = min(rank.num_sms for rank in ranks)
        memories = [rank.shared(shared_bytes(len(ranks))) for rank in self._turns()]
        for rank in self._ranks:
            rank.synchronize()  # peers write it
        self._groups = groups(memories)
        self.errors = [error_of(memory) for memory in memories]

    @property
    def has_nccl(self) -> bool:
        return self.mover is not None

    def path(self, parts: Sequence[Array]) -> SumPath:
        """Return the path of the sum of parts [T, H]; graphs contain no NCCL launch."""
        rows, width = parts[0].shape
        has_nccl = self.has_nccl and not self._ranks[0].is_capturing
        return path_of(len(parts), rows, width * parts[0].dtype.itemsize, has_nccl=has_nccl)

    def sum(self, parts: Sequence[Array]) -> list[Array]:
        return self.sum_by(self.path(parts), parts)

    def sum_by(self, path: SumPath, parts: Sequence[Array]) -> list[Array]:
        """Return the sum on each rank; only `sum_add_rms_norm` uses PUSH."""
        if path is SumPath.NCCL and self.mover is not None:
            return self._sum_by_nccl(self.mover, parts)
        outs = [rank.temporary(part.shape, part.dtype) for rank, part in zip(self._turns(), parts, strict=True)]
        steps, size = (2 if path is SumPath.TWO_SHOT else 1), parts[0].size
        vecs = math.ceil(size * parts[0].dtype.itemsize / (_VEC_BYTES * (len(parts) if steps == 2 else 1)))
        args = per_rank(parts), per_rank(outs), np.int64(size)
        self._launch("sum_ranks", self._grid(vecs), [args] * len(parts), _THREADS, STEPS=steps)
        return outs

    def _sum_by_nccl(self, mover: ShareMover, parts: Sequence[Array]) -> list[Array]:
        """Sum a share of the elements on each rank, between two moves."""
        shape, dtype, num_ranks = parts[0].shape, parts[0].dtype, len(parts)
        share = -(-parts[0].nbytes // (num_ranks * _VEC_BYTES)) * _VEC_BYTES
        whole = (num_ranks * share,)
        outs = [rank.temporary(whole, _UINT8) for rank in self._turns()]
        received = [rank.temporary(whole, _UINT8) for rank in self._turns()]
        mover.exchange(parts, received, share)
        args = []
        for rank in range(num_ranks):
            size = max(0, min(share, parts[0].nbytes - rank * share)) // dtype.itemsize
            mine = slice(rank * share, rank * share + size * dtype.itemsize)
            sources = [
                parts[rank].reshape(-1).view(_UINT8)[mine] if peer == rank else received[rank][peer * share :]
                for peer in range(num_ranks)
            ]
            args.append((per_rank(sources), per_rank([outs[rank][mine]] * num_ranks), np.int64(size)))
        self._launch("sum_ranks", (self._blocks(),), args, _THREADS, STEPS=0)
        mover.gather(outs, share)
        return [out[: parts[0].nbytes].view(dtype).reshape(shape) for out in outs]

    def sum_add_rms_norm(
        self,
        path: SumPath,
        parts: Sequence[Array],
        residuals: Sequence[Array],
        weights: Sequence[Array],
        eps: float,
        outs: Sequence[Array] | Sequence[Fp8Rows],
    ) -> None:
        """Add the sum of parts [T, H] to each rank's residual and write its norm to `outs`, by PUSH or PULL."""
        rows, width = parts[0].shape
        pointers, sizes = per_rank(parts), (np.int32(rows), np.int32(width), np.float32(eps))
        args: list[tuple[object, ...]] = []
        name = "sum_add_rms_norm"
        for residual, weight, out in zip(residuals, weights, outs, strict=True):
            if isinstance(out, Fp8Rows):
                name = "sum_add_rms_norm_quantised"
                args.append((pointers, residual, weight, out.data, out.scale, *sizes))
            else:
                args.append((pointers, residual, weight, out, *sizes))
        threads = norm_threads(self._ranks[0], rows, width)
        shares_sms = rows > 2 * self._num_sms and 2 * threads <= _THREADS_PER_SM
        grid = (rows,) if path is SumPath.PUSH else (min(rows, self._blocks(1 + shares_sms)),)
        self._launch(name, grid, args, threads, PUSH=int(path is SumPath.PUSH))

    def gather(self, parts: Sequence[Array], *, copies: int = 1, width: int | None = None) -> list[Array]:
        rows, own_width = parts[0].shape
        width = own_width * (len(parts) // copies) if width is None else width
        dtype = parts[0].dtype
        outs = [rank.temporary((rows, width), dtype) for rank in self._turns()]
        sizes = np.int32(rows), np.int32(own_width), np.int32(copies), np.int32(width)
        args = [(per_rank(parts), out, *sizes) for out in outs]
        vecs = math.ceil(rows * width * dtype.itemsize / _VEC_BYTES)
        self._launch("gather_ranks", self._grid(vecs), args, _THREADS, QUIRE_DTYPE=_WIDTHS[dtype.itemsize])
        return outs

    def normalise_qk(
        self, qkv: Sequence[Array], q_norm: Sequence[Array], k_norm: Sequence[Array], sizes: tuple[int, int], eps: float
    ) -> None:
        """Normalise q and k, the first `sizes` columns of each rank's qkv, over the heads of all ranks."""
        rows, columns = qkv[0].shape
        q_size, k_size = sizes
        copies = len(qkv) * k_size // len(k_norm[0])
        squares = per_rank([rank.temporary((rows, 2), _FLOAT32) for rank in self._turns()])
        numbers = tuple(map(np.int32, (rows, columns, q_size, k_size, copies)))
        args = [(squares, *own, *numbers, np.float32(eps)) for own in zip(qkv, q_norm, k_norm, strict=True)]
        threads = norm_threads(self._ranks[0], rows, q_size)
        self._launch("normalise_qk_ranks", (min(rows, self._blocks()),), args, threads)

    def best(self, parts: Sequence[TokenCandidates], outs: Sequence[Array | None]) -> list[Sampled]:
        rows = len(parts[0].token_ids)
        columns = [per_rank([getattr(part, name) for part in parts]) for name in ("token_ids", "score", "tie")]
        sampled = []
        for rank, out in zip(self._turns(), outs, strict=True):
            token_ids = rank.temporary((rows,), np.int32) if out is None else out
            sampled.append(Sampled(token_ids, rank.temporary((rows,), np.bool_), None, None, None))
        args = [(*columns, each.token_ids, each.is_nan, np.int32(rows)) for each in sampled]
        self._launch("best_of_ranks", (1,), args, _BEST_THREADS, QUIRE_DTYPE=0)
        return sampled

    def check(self, errors: Sequence[np.ndarray]) -> None:
        """Raise LateRankError if one of the downloaded `self.errors` is set."""
        late = next((int(error[0]) for error in errors if error[0]), 0)
        if late:
            label = self._ranks[late - 1].label
            raise LateRankError(f"rank {late - 1} ({label}) did not come to a sum within {WAIT_S} s")

    def _grid(self, vecs: int) -> tuple[int]:
        return (max(1, min(SUM_BLOCKS, self._blocks(), math.ceil(vecs / _THREADS))),)

    def _blocks(self, per_sm: int = 1) -> int:
        """Return the most blocks of a grid. Two per SM hide each other's norms, but cost 2 us."""
        return min(self._max_blocks, per_sm * self._num_sms)

    def _launch(
        self, name: str, grid: tuple[int], args: Sequence[tuple[object, ...]], threads: int, **defines: int
    ) -> None:
        if 0 in grid:
            return
        builds = {"NUM_RANKS": len(self._ranks), **defines}
        are_there = [rank.load_kernel(name, **builds) for rank in self._turns()]
        if not all(are_there):
            return
        for rank, group, own in zip(self._turns(), self._groups, args, strict=True):
            rank.launch(name, grid, (group, *own), threads=threads, overlaps=True, **builds)

    def _turns(self) -> Iterator[GroupLauncher]:
        return (rank for _, rank in in_turn(self._ranks))
