"""The GPU backend: checks what it is given, chooses grids, launches the kernels of `cuda/` on a stream of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import cupy
import ml_dtypes
import numpy as np

from model.ops.arena import Arena
from model.ops.cuda_attention import decode_attention, plan_decode_attention, prefill_attention
from model.ops.cuda_host_blocks import CudaHostBlocks
from model.ops.cuda_linear import Linear
from model.ops.cuda_sampling import sample, top_logprobs
from model.ops.cuda_transfers import Transfers
from model.ops.interface import Array, Sampled, SamplingArrays
from model.ops.kernels import Kernels, arch_of
from model.ops.overlapped_launch import OverlappedLaunch
from model.ops.tensor_maps import TensorMaps

ARENA_CHUNK_BYTES = 256 << 20
"""One chunk holds the temporaries of a layer at usual sizes; a larger request gets a chunk of its own."""

_DTYPE_CODES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
"""What the kernels know as QUIRE_DTYPE."""

_VEC_BYTES = 16
_THREADS = 256
_FIND_BLOCKS_PER_SM = 8
_COPY_VECS_PER_THREAD = 4  # VECS_PER_THREAD of copy_blocks.cu
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)


class CudaOps:
    """`Ops` on the current CUDA device, for one thread at a time. Arrays are CuPy's, C-contiguous.

    `kernels`, `tensor_maps`, `stream`, `num_sms`, `max_shared_bytes`, `arch` and `dtype_code` serve the modules that
    launch for this one.
    """

    name = "cuda"

    def __init__(self, dtype: np.dtype):
        """Raises ValueError for a dtype other than float32, float16, bfloat16; CuPy's RuntimeErrors without a GPU."""
        self.dtype = np.dtype(dtype)
        if self.dtype not in _DTYPE_CODES:
            raise ValueError(f"no kernels for {self.dtype}")
        device = cupy.cuda.Device()
        self.device_name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        self.dtype_code = _DTYPE_CODES[self.dtype]
        self.num_sms = device.attributes["MultiProcessorCount"]
        self.arch = arch_of(device.compute_capability)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.kernels = Kernels(self.arch)
        self.tensor_maps = TensorMaps()
        self._arena = Arena(self._allocate, ARENA_CHUNK_BYTES)
        self.max_shared_bytes = device.attributes["MaxSharedMemoryPerBlockOptin"]
        self._linear = Linear(self)
        self._launch_overlapped = OverlappedLaunch(self.stream) if int(device.compute_capability) >= 90 else None
        self._is_capturing = False
        self._transfers = Transfers(self.stream, self.launch)

    def upload(self, host: np.ndarray) -> Array:
        host = np.asarray(host, order="C")
        array = self.empty(host.shape, host.dtype)
        self._transfers.upload(host, array)
        return array

    def upload_all(self, hosts: Sequence[np.ndarray], into: Array | None = None) -> list[Array]:
        return self._transfers.upload_all(hosts, into)

    def upload_rows(self, host: np.ndarray, rows: np.ndarray, table: Array) -> None:
        expect("table", table, _INT32, None, None)
        fits = host.shape == (len(rows), host.shape[1]) and host.shape[1] <= table.shape[1]
        if host.dtype != _INT32 or rows.dtype != _INT32 or not fits:
            raise ValueError(f"{host.dtype} {host.shape} at {rows.dtype} {rows.shape} is no part of {table.shape}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
            raise ValueError(f"rows {rows.min()} to {rows.max()} are outside a table of {len(table)}")
        self._transfers.upload_rows(host, rows, table)

    def fill(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        self._transfers.fill(targets, read)

    def find_nonfinite(self, x: Array, found: Array) -> None:
        expect("x", x, self.dtype, *x.shape)
        expect("found", found, _INT32, 1)
        num_blocks = min(_FIND_BLOCKS_PER_SM * self.num_sms, math.ceil(x.nbytes / (_THREADS * _VEC_BYTES)))
        self.launch("find_nonfinite", (num_blocks,), (x, found, np.int64(x.size)))

    def download_later(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        return self._transfers.download_later(arrays)

    def prepare(self, work: Callable[[], None]) -> None:
        self.kernels.compile_together(work)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # for real: kernels are loaded, products planned and the arena grown before anything is recorded
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            self._is_capturing = True
            try:
                work()
            finally:
                self._is_capturing = False
                graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def download(self, array: Array) -> np.ndarray:
        return array.get(stream=self.stream)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        with self.stream:
            return cupy.empty(shape, dtype)

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        dtype = np.dtype(dtype)
        if not self._arena.is_open:
            return self.empty(shape, dtype)
        return cupy.ndarray(shape, dtype, self._arena.take(math.prod(shape) * dtype.itemsize))

    def host_blocks(self, kv: Array, num_blocks: int) -> CudaHostBlocks:
        return CudaHostBlocks(kv, num_blocks, self.stream)

    def memory_bytes(self) -> tuple[int, int]:
        free, total = cupy.cuda.runtime.memGetInfo()
        return free + cupy.get_default_memory_pool().free_bytes(), total

    def scratch(self) -> AbstractContextManager[None]:
        return self._arena.scope()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def mark(self) -> cupy.cuda.Event:
        event = cupy.cuda.Event()
        event.record(self.stream)
        return event

    def elapsed_s(self, begin: cupy.cuda.Event, end: cupy.cuda.Event) -> float:
        end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) / 1e3

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        args: tuple,
        *,
        threads: int = _THREADS,
        shared_bytes: int = 0,
        overlaps: bool = False,
        **defines: int,
    ) -> None:
        """One kernel of `cuda/`, built for `self.dtype` unless the defines say otherwise. An empty grid is no work.

        `overlaps` says that the kernel calls `wait_for_previous_kernel` (cuda/types.cuh): in a captured graph it may
        begin before the kernel ahead of it has ended. Outside of graphs the host is too slow for that to gain.
        """
        if 0 in grid:
            return
        kernel = self.kernels.get(name, shared_bytes=shared_bytes, **{"QUIRE_DTYPE": self.dtype_code, **defines})
        if overlaps and self._is_capturing and self._launch_overlapped is not None:
            self._launch_overlapped(kernel, grid, threads, args, shared_bytes)
        else:
            kernel(grid, (threads,), args, shared_bytes, self.stream)

    def gather_rows(self, table: Array, ids: Array) -> Array:
        dtype = _FLOAT32 if table.dtype == _FLOAT32 else self.dtype
        expect("table", table, dtype, None, None)
        expect("ids", ids, _INT32, None)
        num_rows, width = table.shape
        out = self.temporary((len(ids), width), dtype)
        args = (table, ids, out, np.int32(num_rows), np.int32(width))
        self.launch("gather_rows", (len(ids),), args, overlaps=True, QUIRE_DTYPE=_DTYPE_CODES[dtype])
        return out

    def pick_tokens(self, token_ids: Array, previous: Array, source: Array) -> None:
        expect("token_ids", token_ids, _INT32, None)
        expect("previous", previous, _INT32, None)
        expect("source", source, _INT32, len(token_ids))
        sizes = np.int32(len(token_ids)), np.int32(len(previous))
        self.launch("pick_tokens", (math.ceil(len(token_ids) / _THREADS),), (token_ids, previous, source, *sizes))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("weight", weight, self.dtype, width)
        out = self.temporary(x.shape, self.dtype)
        args = (x, weight, out, np.int32(width), np.float32(eps))
        self.launch("rms_norm", (rows,), args, threads=self._norm_threads(rows, width), overlaps=True)
        return out

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("residual", residual, self.dtype, rows, width)
        expect("weight", weight, self.dtype, width)
        if out is None:
            out = self.temporary(x.shape, self.dtype)
        expect("out", out, self.dtype, rows, width)
        args = (x, residual, weight, out, np.int32(width), np.float32(eps))
        self.launch("add_rms_norm", (rows,), args, threads=self._norm_threads(rows, width), overlaps=True)
        return out

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        dtype: np.dtype | None = None,
        out: Array | None = None,
    ) -> Array:
        rows, width = x.shape
        expect("x", x, self.dtype, rows, width)
        expect("weight", weight, self.dtype, None, width)
        if bias is not None:
            expect("bias", bias, self.dtype, len(weight))
        if out is None:
            out = self.temporary((rows, len(weight)), self.dtype if dtype is None else dtype)
        expect("out", out, out.dtype, rows, len(weight))
        if out.dtype not in (self.dtype, _FLOAT32) or width == 0:
            raise ValueError(f"no product of {x.shape} {self.dtype} and {weight.shape} in {out.dtype}")
        if out.size:
            self._linear(x, weight, bias, out)
        return out

    def tune_linear(
        self,
        weights: Sequence[Array],
        bias: Array | None,
        num_rows: Sequence[int],
        *,
        dtype: np.dtype | None = None,
    ) -> None:
        """Find the quickest way for `linear` of so many rows with these weights, which are of one shape [N, K].

        Costs about 30 ms for each number of rows, once for a device and version of cuBLASLt: the answers are kept on
        disk. `weights` are used in turn; all layers' together, they come from memory as they do in a step. For
        products outside of what was tuned cuBLASLt's first choice is taken. Not within `capture`.
        """
        for weight in weights:
            expect("weight", weight, self.dtype, *weights[0].shape)
        self._linear.tune(weights, bias, num_rows, self.dtype if dtype is None else np.dtype(dtype))

    def rope_kv_write(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        positions: Array,
        slots: Array,
        kv: Array,
        layer: int,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
    ) -> Array:
        num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        rows = len(qkv)
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        expect("kv", kv, self.dtype, num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        expect("qkv", qkv, self.dtype, rows, (num_heads + 2 * num_kv_heads) * head_dim)
        expect("cos", cos, _FLOAT32, len(cos), head_dim // 2)
        expect("sin", sin, _FLOAT32, len(cos), head_dim // 2)
        expect("positions", positions, _INT32, rows)
        expect("slots", slots, _INT64, rows)
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            if weight is not None:
                expect(name, weight, self.dtype, head_dim)
        if head_dim * self.dtype.itemsize % (2 * _VEC_BYTES) or not 0 <= layer < num_layers:
            raise ValueError(f"no rotation of heads of {head_dim} in layer {layer} of {num_layers}")

        lanes = head_dim * self.dtype.itemsize // (2 * _VEC_BYTES)
        heads_per_block = _THREADS >> (lanes - 1).bit_length()
        out = self.temporary((rows, num_heads, head_dim), self.dtype)
        sizes = (rows, num_heads, num_kv_heads, num_blocks, num_layers, layer, len(cos))
        self.launch(
            "rope_kv_write",
            (math.ceil(rows * (num_heads + 2 * num_kv_heads) / heads_per_block),),
            (qkv, cos, sin, positions, slots, kv, q_norm, k_norm, out, *map(np.int32, sizes), np.float32(eps)),
            overlaps=True,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
        )
        return out

    def plan_decode_attention(
        self, num_heads: int, kv: Array, block_tables: Array, context_lens: Array, window: int
    ) -> Array:
        expect("context_lens", context_lens, _INT32, None)
        expect("block_tables", block_tables, _INT32, len(context_lens), None)
        return plan_decode_attention(self, num_heads, kv, block_tables, context_lens, window)

    def paged_decode_attention(
        self,
        q: Array,
        kv: Array,
        layer: int,
        block_tables: Array,
        context_lens: Array,
        scale: float,
        window: int,
        out: Array,
        plan: Array | None = None,
    ) -> None:
        self._expect_attention(q, kv, layer, block_tables, context_lens, out)
        expect("q", q, self.dtype, len(context_lens), None, None)
        decode_attention(self, q, kv, layer, block_tables, context_lens, scale, window, out, plan)

    def paged_prefill_attention(
        self,
        q: Array,
        kv: Array,
        layer: int,
        block_tables: Array,
        context_lens: Array,
        query_start: Array,
        max_query_len: int,
        scale: float,
        window: int,
        out: Array,
    ) -> None:
        self._expect_attention(q, kv, layer, block_tables, context_lens, out)
        expect("query_start", query_start, _INT32, len(context_lens) + 1)
        prefill_attention(
            self, q, kv, layer, block_tables, context_lens, query_start, max_query_len, scale, window, out
        )

    def silu_mul(self, gate_up: Array) -> Array:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        expect("gate_up", gate_up, self.dtype, rows, 2 * width)
        out = self.temporary((rows, width), self.dtype)
        columns = math.ceil(width / (_THREADS * _VEC_BYTES // self.dtype.itemsize))
        self.launch("silu_mul", (rows, columns), (gate_up, out, np.int32(width)), overlaps=True)
        return out

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        expect("kv", kv, self.dtype, *kv.shape)
        expect("sources", sources, _INT32, len(sources))
        expect("targets", targets, _INT32, len(sources))
        block_bytes = math.prod(kv.shape[1:]) * self.dtype.itemsize
        if block_bytes % _VEC_BYTES:
            raise ValueError(f"blocks of {block_bytes} bytes cannot be copied in pieces of {_VEC_BYTES}")
        vecs = block_bytes // _VEC_BYTES
        grid = (len(sources), math.ceil(vecs / (_THREADS * _COPY_VECS_PER_THREAD)))
        self.launch("copy_blocks", grid, (kv, sources, targets, np.int32(len(kv)), np.int32(vecs)))

    def sample(self, logits: Array, how: SamplingArrays, out: Array | None = None) -> Sampled:
        expect("logits", logits, _FLOAT32, len(how.temperature), None)
        if out is not None:
            expect("out", out, _INT32, len(logits))
        return sample(self, logits, how, out)

    def top_logprobs(self, logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
        expect("logits", logits, _FLOAT32, None, None)
        expect("token_ids", token_ids, _INT32, len(logits))
        return top_logprobs(self, logits, token_ids, num_best)

    def _allocate(self, num_bytes: int) -> cupy.cuda.MemoryPointer:
        with self.stream:
            return cupy.cuda.alloc(num_bytes)

    def _norm_threads(self, rows: int, width: int) -> int:
        """A vector a thread where few rows leave the device empty, else two, so that more loads are under way."""
        vecs = math.ceil(width * self.dtype.itemsize / _VEC_BYTES)
        threads = vecs if rows <= 2 * self.num_sms else math.ceil(vecs / 2)
        return min(1024, math.ceil(threads / 32) * 32)

    def _expect_attention(self, q, kv, layer, block_tables, context_lens, out) -> None:
        num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        expect("kv", kv, self.dtype, num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        expect("q", q, self.dtype, None, None, head_dim)
        expect("out", out, self.dtype, *q.shape)
        expect("context_lens", context_lens, _INT32, None)
        expect("block_tables", block_tables, _INT32, len(context_lens), None)
        if q.shape[1] % num_kv_heads or not 0 <= layer < num_layers:
            raise ValueError(f"no attention of {q.shape[1]} heads to {num_kv_heads} in layer {layer} of {num_layers}")


def expect(name: str, array: Array, dtype: np.dtype, *shape: int | None) -> None:
    """Raises ValueError unless `array` is C-contiguous and has the dtype and shape; None stands for any size."""
    fits = array.ndim == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, expected {dtype} {shape}, contiguous")
