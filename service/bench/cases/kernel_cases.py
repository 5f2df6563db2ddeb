"""Cases of `quire bench kernels`: speed-critical operations of `Ops`, with their minimum bytes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.kv_cache import block_shape
from model.ops.fp8 import narrow
from model.ops.interface import Array, AttentionBatch, Fp8Rows, HeadRotation, Ops, SamplingArrays
from model.ops.weight import Weight, WeightFormat
from model.rope import rope_tables

Batch = tuple[tuple[int, int], ...]
"""Groups of (sequences, tokens each)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases.

    Input sets rotate through `rotated_bytes`: on a GPU twice the largest L2; on a CPU small cases stay in cache, as in
    practice.
    """

    num_tokens: int
    rows: tuple[int, ...]
    decode: tuple[Batch, ...]
    prefill: tuple[tuple[int, int], ...]  # (prompts, tokens each)
    tails: tuple[tuple[int, int], ...]  # (new tokens of a prompt, preceding cached tokens)
    sampled: tuple[int, ...]
    copied_blocks: int
    rotated_bytes: int

    @property
    def cache_tokens(self) -> int:
        tails = max(map(sum, self.tails))
        return max(tails, *(sum(map(math.prod, batch)) for batch in (*self.decode, self.prefill)))


GPU_SIZES = Sizes(
    num_tokens=8192,
    rows=(1, 16, 64, 256, 512, 8192),
    decode=(((32, 4096),), ((128, 1024),), ((256, 512),), ((1, 32768),), ((1, 131072), (31, 4096))),
    prefill=((4, 1024), (1, 4096), (1, 16384)),
    tails=((64, 2048),),
    sampled=(64, 256),
    copied_blocks=2048,
    rotated_bytes=256 << 20,
)
CPU_SIZES = Sizes(
    num_tokens=256,
    rows=(1, 16, 64),
    decode=(((1, 512),), ((16, 256),), ((1, 512), (3, 128))),
    prefill=((1, 256),),
    tails=((16, 256),),
    sampled=(16,),
    copied_blocks=16,
    rotated_bytes=4 << 20,
)


RANDOM_TILE = 1_000_003
"""Period of random inputs: a prime, so that no two rows are equal."""

QUANTISED = (WeightFormat.FP8, WeightFormat.INT8, WeightFormat.INT4)
GROUP_SIZE = 128
FP8_SIZE = 97.0  # root mean square of random e4m3

CACHE_LAYERS = 2

Launch = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One operation at one size, with its minimum work.

    `make(i)` returns the launch on the i-th input set. `peer` describes the case to `torch_reference.py`.
    """

    op: str
    size: str
    num_bytes: int
    num_flops: int
    make: Callable[[int], Launch]
    peer: dict[str, Any] | None = None


class KernelCases:
    def __init__(self, ops: Ops, config: ModelConfig, sizes: Sizes, block_size: int = 16):
        self._ops = ops
        self._config = config
        self.sizes = sizes
        self._block_size = block_size
        self._item = ops.dtype.itemsize
        self._rng = np.random.default_rng(0)
        self._tile = self._rng.standard_normal(RANDOM_TILE, np.float32)
        num_blocks = max(math.ceil(sizes.cache_tokens / block_size), 2 * sizes.copied_blocks)
        _, *of_a_layer = block_shape(config, block_size)
        self._kv = self._random((num_blocks, CACHE_LAYERS, *of_a_layer), dtype=ops.kv_dtype)
        self._kv_item = ops.kv_dtype.itemsize
        self._kv_scales = None
        if ops.kv_dtype == np.uint8:
            self._kv_scales = ops.upload(np.ones((CACHE_LAYERS, 2, config.num_kv_heads), np.float32))
        self._kept: dict[tuple[str | int, ...], Array] = {}
        self._quantised_weights: dict[tuple[str | int, ...], Weight] = {}

    def all(self) -> Iterator[Case]:
        """Yield every case, in the order of a forward pass."""
        yield from self._rows()
        yield from self._products()
        yield from self._quantised_products()
        yield self._rope()
        yield self._plan(((max(self.sizes.rows[:-1]), 2 * self._block_size),))
        yield from map(self._plan, self.sizes.decode)
        yield from (self._decode(batch, planned=True) for batch in self.sizes.decode)
        yield from (self._decode(batch, planned=False) for batch in self.sizes.decode)
        yield from (self._prefill(*each) for each in self.sizes.prefill)
        yield from (self._prefill(1, *each) for each in self.sizes.tails)
        yield self._copies()
        yield from self._sampling()

    def _rows(self) -> Iterator[Case]:
        ops, tokens, width = self._ops, self.sizes.num_tokens, self._config.hidden_size
        inner, row_bytes, eps = self._config.intermediate_size, tokens * width * self._item, self._config.rms_norm_eps
        weight = self._random((width,))

        def gather(_: int) -> Launch:
            table = self._random((2 * tokens, width))
            ids = ops.upload(self._rng.permutation(2 * tokens)[:tokens].astype(np.int32))
            return lambda: ops.gather_rows(table, ids)

        def pick(_: int) -> Launch:
            ids, previous = (ops.upload(np.zeros(tokens, np.int32)) for _ in range(2))
            source = ops.upload(self._rng.permutation(tokens).astype(np.int32))
            return lambda: ops.pick_tokens(ids, previous, source)

        def nonfinite(_: int) -> Launch:
            x, found = self._random((tokens, width)), ops.upload(np.zeros(1, np.int32))
            return lambda: ops.find_nonfinite(x, found)

        def norm(_: int) -> Launch:
            x = self._random((tokens, width))
            return lambda: ops.rms_norm(x, weight, eps)

        def add_norm(_: int) -> Launch:
            x, residual = self._random((tokens, width)), self._random((tokens, width))
            return lambda: ops.add_rms_norm(x, residual, weight, eps)

        def silu(_: int) -> Launch:
            gate_up = self._random((tokens, 2 * inner))
            return lambda: ops.silu_mul(gate_up)

        yield Case("gather_rows", f"{tokens} x {width}", 2 * row_bytes, 0, gather)
        yield Case("pick_tokens", f"{tokens}", 12 * tokens, 0, pick)
        yield Case("find_nonfinite", f"{tokens} x {width}", row_bytes, 0, nonfinite)
        yield Case("rms_norm", f"{tokens} x {width}", 2 * row_bytes, 0, norm)
        yield Case("add_rms_norm", f"{tokens} x {width}", 4 * row_bytes, 0, add_norm)
        yield Case("silu_mul", f"{tokens} x {inner}", 3 * tokens * inner * self._item, 0, silu)

    def _matrices(self) -> dict[str, tuple[int, int]]:
        config = self._config
        heads = config.num_heads + 2 * config.num_kv_heads
        matrices = {
            "qkv": (heads * config.head_dim, config.hidden_size),
            "output": (config.hidden_size, config.num_heads * config.head_dim),
        }
        if config.experts is not None and all(config.experts.layers):
            return matrices
        return matrices | {
            "gate_up": (2 * config.intermediate_size, config.hidden_size),
            "down": (config.hidden_size, config.intermediate_size),
        }

    def _products(self) -> Iterator[Case]:
        config, head_rows = self._config, max(self.sizes.sampled)
        for rows in self.sizes.rows:
            yield from (self._product(name, rows, *shape) for name, shape in self._matrices().items())
            if rows <= head_rows:
                yield self._product("lm_head", rows, config.vocab_size, config.hidden_size)

    def _product(self, name: str, rows: int, width: int, inner: int) -> Case:
        ops = self._ops

        def make(i: int) -> Launch:
            x, weight = self._random((rows, inner)), self._keep((name, i), (width, inner), inner**-0.5)
            return lambda: ops.linear(x, Weight(weight))

        num_bytes = (rows * inner + width * inner + rows * width) * self._item
        peer = {"what": "linear", "rows": rows, "width": width, "inner": inner}
        return Case("linear", f"{name} {rows} x {width} x {inner}", num_bytes, 2 * rows * width * inner, make, peer)

    def _quantised_products(self) -> Iterator[Case]:
        for kind, rows in product(QUANTISED, self.sizes.rows):
            for name, (width, inner) in self._matrices().items():
                yield self._quantised_product(name, kind, rows, width, inner)

    def _quantised_product(self, name: str, kind: WeightFormat, rows: int, width: int, inner: int) -> Case:
        """Return a quantized product. FLOPs count at the 16-bit rate; FP8 inputs are e4m3 if the device supports it."""
        ops = self._ops

        def make(i: int) -> Launch:
            weight = self._quantised(kind, (name, i), width, inner)
            x: Array | Fp8Rows = self._random((rows, inner))
            if kind is WeightFormat.FP8 and ops.has_fp8:
                scale = ops.upload(np.full(rows, inner**-0.5 / FP8_SIZE, np.float32))
                x = Fp8Rows(self._codes((rows, inner)), scale)
            return lambda: ops.linear(x, weight)

        weight_bytes = width * inner // 2 * (1 if kind is WeightFormat.INT4 else 2)
        num_bytes = weight_bytes + rows * (inner + width) * self._item
        size = f"{name} {kind} {rows} x {width} x {inner}"
        return Case("linear", size, num_bytes, 2 * rows * width * inner, make)

    def _quantised(self, kind: WeightFormat, name: tuple[str | int, ...], width: int, inner: int) -> Weight:
        """Return shared random weights: INT4 in groups of 128 inputs, others with row scales."""
        name = (kind, *name)
        if name not in self._quantised_weights:
            ops, is_int4 = self._ops, kind is WeightFormat.INT4
            data = self._codes((width, inner // 2 if is_int4 else inner))
            groups = (width, inner // GROUP_SIZE) if is_int4 else (width,)
            scale = ops.upload(np.full(groups, inner**-0.5 / FP8_SIZE, np.float16 if is_int4 else np.float32))
            if kind is WeightFormat.INT8:
                data = data.view(np.int8)
            weight = Weight(data, kind, scale, group_size=GROUP_SIZE if is_int4 else 0)
            self._quantised_weights[name] = ops.prepare_weight(weight)
        return self._quantised_weights[name]

    def _codes(self, shape: tuple[int, int]) -> Array:
        """Return random bytes without e4m3 NaNs."""
        return self._ops.upload(self._rng.integers(0, 256, shape, np.uint8) & np.uint8(0xF7))

    def _rope(self) -> Case:
        ops, config, tokens = self._ops, self._config, min(self.sizes.num_tokens, self.sizes.cache_tokens)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        rotation = HeadRotation(*map(ops.upload, rope_tables(config.rope, config.head_dim, tokens)))
        positions = ops.upload(np.arange(tokens, dtype=np.int32))
        slots = ops.upload(self._rng.permutation(self.sizes.cache_tokens)[:tokens].astype(np.int64))

        def make(i: int) -> Launch:
            qkv, layer = self._random((tokens, width)), i % CACHE_LAYERS
            return lambda: ops.rope_kv_write(qkv, rotation, positions, slots, self._kv, layer, self._kv_scales)

        written = tokens * config.head_dim * (config.num_heads * self._item + 2 * config.num_kv_heads * self._kv_item)
        return Case("rope_kv_write", f"{tokens} x {width}", tokens * width * self._item + written, 0, make)

    def _plan(self, batch: Batch) -> Case:
        """Return the planning that a step runs once for all layers."""
        ops, num_heads = self._ops, self._config.num_heads
        tables, lengths = self._paged(batch)

        def make(_: int) -> Launch:
            return lambda: ops.plan_decode_attention(num_heads, AttentionBatch(self._kv, 0, tables, lengths))

        return Case("plan_decode_attention", _named(batch), 36 * len(tables), 0, make)

    def _decode(self, batch: Batch, *, planned: bool) -> Case:
        """Return one layer's attention, planned beforehand as in a step, or in each call."""
        ops, num_heads, head_dim = self._ops, self._config.num_heads, self._config.head_dim
        tables, lengths = self._paged(batch)
        shape = (len(tables), num_heads, head_dim)

        def make(i: int) -> Launch:
            q, out = self._random(shape), ops.empty(shape, ops.dtype)
            layer, scales = i % CACHE_LAYERS, self._kv_scales
            batch = AttentionBatch(self._kv, layer, tables, lengths, head_dim**-0.5, kv_scales=scales)
            if planned:
                batch = replace(batch, plan=ops.plan_decode_attention(num_heads, batch))
            return lambda: ops.paged_decode_attention(q, batch, out)

        num_tokens = sum(map(math.prod, batch))
        cached = 2 * num_tokens * self._config.num_kv_heads * head_dim
        num_bytes = cached * self._kv_item + 2 * math.prod(shape) * self._item
        num_flops = 4 * num_tokens * num_heads * head_dim
        peer = self._peer("decode", *batch[0]) if len(batch) == 1 else None
        size = _named(batch) + ("" if planned else ", and its plan")
        return Case("paged_decode_attention", size, num_bytes, num_flops, make, peer)

    def _prefill(self, sequences: int, length: int, known: int = 0) -> Case:
        ops, config = self._ops, self._config
        tables, lengths = self._paged(((sequences, known + length),))
        start = ops.upload(np.arange(sequences + 1, dtype=np.int32) * length)
        shape = (sequences * length, config.num_heads, config.head_dim)

        def make(i: int) -> Launch:
            q, out, layer = self._random(shape), ops.empty(shape, ops.dtype), i % CACHE_LAYERS
            chunks = {"query_start": start, "max_query_len": length, "kv_scales": self._kv_scales}
            attended = AttentionBatch(self._kv, layer, tables, lengths, config.head_dim**-0.5, **chunks)
            return lambda: ops.paged_prefill_attention(q, attended, out)

        cached = 2 * sequences * (known + length) * config.num_kv_heads * config.head_dim
        num_bytes = cached * self._kv_item + 2 * math.prod(shape) * self._item
        num_seen = known * length + length * (length + 1) // 2
        num_flops = 4 * config.num_heads * config.head_dim * sequences * num_seen
        peer = self._peer("prefill", sequences, length) if known == 0 else None
        size = f"{sequences} x {length}{f' behind {known}' if known else ''}"
        return Case("paged_prefill_attention", size, num_bytes, num_flops, make, peer)

    def _copies(self) -> Case:
        ops, count = self._ops, self.sizes.copied_blocks
        num_bytes = 2 * count * math.prod(self._kv.shape[1:]) * self._kv_item

        def make(_: int) -> Launch:
            sources, targets = self._rng.permutation(len(self._kv))[: 2 * count].astype(np.int32).reshape(2, count)
            blocks = ops.upload(sources), ops.upload(targets)
            return lambda: ops.copy_blocks(self._kv, *blocks)

        return Case("copy_blocks", f"{count} of {CACHE_LAYERS} layers", num_bytes, 0, make)

    def _sampling(self) -> Iterator[Case]:
        vocab = self._config.vocab_size
        ways: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0.0},
            "top-p": {"temperature": 0.7, "top_p": 0.9},
            "5 logprobs": {"best": 5},
        }
        for rows in self.sizes.sampled:
            for name, way in ways.items():
                make = self._sampler(rows, **way)
                yield Case("sample", f"{name}, {rows} x {vocab}", 4 * rows * vocab, 0, make)
            yield Case("top_logprobs", f"{rows} x {vocab}", 4 * rows * vocab, 0, self._scorer(rows))

    def _scorer(self, rows: int) -> Callable[[int], Launch]:
        vocab = self._config.vocab_size
        token_ids = self._ops.upload(self._rng.integers(0, vocab, rows).astype(np.int32))

        def make(_: int) -> Launch:
            logits = self._ops.upload(self._rng.standard_normal((rows, vocab), np.float32))
            return lambda: self._ops.top_logprobs(logits, token_ids, 1)

        return make

    def _sampler(
        self, rows: int, temperature: float = 1.0, top_p: float = 1.0, best: int = 0
    ) -> Callable[[int], Launch]:
        upload, vocab = self._ops.upload, self._config.vocab_size
        params = SamplingArrays(
            temperature=upload(np.full(rows, temperature, np.float32)),
            top_k=upload(np.full(rows, vocab, np.int32)),
            top_p=upload(np.full(rows, top_p, np.float32)),
            min_p=upload(np.zeros(rows, np.float32)),
            seed=upload(np.arange(rows, dtype=np.uint64)),
            position=upload(np.arange(rows, dtype=np.uint32)),
            branch=upload(np.zeros(rows, np.uint32)),
            penalties=None,
            bias=None,
            num_logprobs=best,
            with_logprobs=best > 0,
        )

        def make(i: int) -> Launch:
            logits = self._keep(("logits", rows, i), (rows, vocab), 2.5, np.dtype(np.float32))
            return lambda: self._ops.sample(logits, params)

        return make

    def _paged(self, batch: Batch) -> tuple[Array, Array]:
        lengths = np.concatenate([np.full(*group, np.int32) for group in batch])
        held = np.arange(-(-lengths.max() // self._block_size)) < -(-lengths[:, None] // self._block_size)
        tables = np.zeros(held.shape, np.int32)
        tables[held] = self._rng.permutation(len(self._kv))[: np.count_nonzero(held)]
        return self._ops.upload(tables), self._ops.upload(lengths)

    def _peer(self, what: str, sequences: int, length: int) -> dict[str, Any] | None:
        """Describe PyTorch's attention; None for an e4m3 cache, which it lacks."""
        if self._kv_scales is not None:
            return None
        config = self._config
        heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        return {"what": what, "sequences": sequences, "length": length, **heads}

    def _keep(
        self, name: tuple[str | int, ...], shape: tuple[int, ...], scale: float, dtype: np.dtype[Any] | None = None
    ) -> Array:
        """Return shared random numbers: creating large ones takes longer than measuring."""
        if name not in self._kept:
            self._kept[name] = self._random(shape, scale, dtype)
        return self._kept[name]

    def _random(self, shape: tuple[int, ...], scale: float = 1.0, dtype: np.dtype | None = None) -> Array:
        tile = self._tile * np.float32(scale)
        tile = narrow(tile) if dtype == np.uint8 else tile.astype(dtype or self._ops.dtype)
        return self._ops.upload(np.resize(np.roll(tile, int(self._rng.integers(RANDOM_TILE))), shape))


def _named(batch: Batch) -> str:
    return " + ".join(f"{sequences} x {length}" for sequences, length in batch)
