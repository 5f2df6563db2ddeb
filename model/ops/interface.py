"""The contract between the model and the machine: `Device` (memory, transfers, graphs, events) and `Ops` (operations).

Two backends implement it: `cpu` is the specification and runs anywhere, `gpu` launches the kernels of `cuda/`. Both
take and return their own arrays; only transfers cross between host and device. Names of dimensions:

    T  tokens of this step, over all sequences      H  hidden size             V  vocabulary (width of the logits)
    S  sequences of this step                       D  head_dim                I  intermediate size of the MLP
    Hq, Hkv  query and key/value heads              B  block_size              R  rows that are sampled

Activations are in `Ops.dtype` (float32, float16 or bfloat16), the cache in `Ops.kv_dtype`, weights in their
`Weight.format`; accumulation is always in float32. Arrays that an op returns live until the surrounding `scratch()`
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from model.ops.host_blocks import HostBlocks
from model.ops.packing import TableRows
from model.ops.weight import Array as Array
from model.ops.weight import Weight, WeightFormat

NO_WINDOW = 1 << 30
"""Sliding-window width of a layer that attends to all preceding tokens."""


@dataclass(frozen=True)
class SamplingArrays:
    """How each of R rows of logits becomes a token; arrays of the device.

    `Penalties` and `Bias` are ragged rows in CSR form: entries of row r are `indptr[r]:indptr[r + 1]`. None: no row
    needs it. Token ids outside 0..V-1 are ignored.
    """

    temperature: Array  # float32[R], 0 = greedy
    top_k: Array  # int32[R], V or more = off
    top_p: Array  # float32[R], 1 = off
    min_p: Array  # float32[R], 0 = off
    seed: Array  # uint64[R]
    position: Array  # uint32[R], index of the sampled token in its sequence (the counter of the RNG)
    branch: Array  # uint32[R]
    penalties: Penalties | None
    bias: Bias | None
    num_logprobs: int  # K: most alternatives that a row asks for; 0 = chosen token only
    with_logprobs: bool  # False: no log-probabilities at all
    mask: TokenMask | None = None
    adjusts_logprobs: bool = False  # apply bias, penalties and mask to the log-probabilities returned, too


@dataclass(frozen=True)
class Penalties:
    """Tokens of each row. Repetition counts prompt and output, presence and frequency the output alone."""

    repetition: Array  # float32[R], 1 = off
    presence: Array  # float32[R]
    frequency: Array  # float32[R]
    indptr: Array  # int32[R + 1]
    token_ids: Array  # int32[N], unique within a row
    output_counts: Array  # int32[N], 0 = in the prompt only


@dataclass(frozen=True)
class Bias:
    """Values added to single logits; -inf forbids a token."""

    indptr: Array  # int32[R + 1]
    token_ids: Array  # int32[N]
    values: Array  # float32[N]


@dataclass(frozen=True)
class TokenMask:
    """Tokens that a grammar allows: bit i % 32 of word i // 32 is token i's; tokens beyond the words are forbidden."""

    rows: Array  # int32[R], the row of `words` for a row of logits; outside 0..M-1: all tokens are allowed
    words: Array  # uint32[M, W]


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens. Log-probabilities are of the raw logits, before bias, penalties, mask and temperature; with
    `SamplingArrays.adjusts_logprobs`, bias, penalties and mask are then applied to them."""

    token_ids: Array  # int32[R]
    is_nan: Array  # bool[R], the adjusted row has no finite maximum: its token id is a meaningless 0
    logprobs: Array | None  # float32[R], of the chosen token
    top_ids: Array | None  # int32[R, K], best first, ties by lower id
    top_logprobs: Array | None  # float32[R, K]


@dataclass(frozen=True)
class Fp8Rows:
    """A matrix in e4m3 with a scale for each row: data * scale[:, None]."""

    data: Array  # uint8[rows, K], the bits of float8_e4m3fn
    scale: Array  # float32[rows]


@dataclass(frozen=True)
class AttentionBatch:
    """The S sequences of one attention call in one layer: the cache, what each of them sees of it, and the scale."""

    kv: Array  # [num_blocks, L, 2, Hkv, B, D]
    layer: int
    block_tables: Array  # int32[S, max_blocks]
    context_lens: Array  # int32[S], tokens in the cache, those of this step included
    scale: float = 1.0  # of the scores
    window: int = NO_WINDOW  # a query at position p sees keys from p - window + 1 on
    query_start: Array | None = None  # int32[S + 1], prefill: rows query_start[s]:query_start[s + 1] are sequence s's
    max_query_len: int = 1  # prefill: at least the longest chunk
    plan: Array | None = None  # decode: of `plan_decode_attention`; None: the op makes its own


@dataclass(frozen=True)
class HeadRotation:
    """How the heads of q and k are normalised and rotated."""

    cos: Array  # float32[max_len, D / 2]
    sin: Array  # float32[max_len, D / 2]
    q_norm: Array | None = None  # [D]; None: not normalised
    k_norm: Array | None = None  # [D]
    eps: float = 0.0


class Device(Protocol):
    """Memory, transfers, recorded work and events of one device, for one thread at a time."""

    name: str  # "numpy" | "cuda"
    device_name: str  # "NVIDIA H200", "CPU"

    def upload(self, host: np.ndarray) -> Array:
        """Return a copy of `host` on the device, same shape and dtype; it lives until nothing refers to it."""

    def upload_all(
        self, hosts: Sequence[np.ndarray], into: Array | None = None, rows: TableRows | None = None
    ) -> list[Array]:
        """Copy small host arrays, and rows of a table, in one transfer without waiting for it.

        The host arrays may change at once. The copies lie in `into` uint8[N] if given (at the same offsets for the same
        shapes), else they live as `upload`'s do.
        """

    def load_parallel(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        """Fill large contiguous arrays from the host, in several threads; return when they are full.

        read(i, start, out) writes the elements of targets[i], flattened, from `start` on into `out` [n], of its dtype.
        An exception of `read` is raised here.
        """

    def download(self, array: Array) -> np.ndarray:
        """Return a host copy of `array`; waits for the work that makes it."""

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        """Start to copy `arrays` as they are after all work submitted so far; a call of the result waits for them."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run `work`, whose results are not used, so that its kernels are compiled.

        It may run twice, the first time with ops that write nothing: its control flow must not depend on results.
        """

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        """Record `work` if the backend can, and return a function that runs it again on the same arrays.

        `work` uses ops of this backend alone, on memory that stays allocated. It runs once before it is recorded;
        `warm_up_run`, which must need the same kernels, product shapes and scratch, runs in its place if given.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Allocate memory that outlives every scratch (weights, KV cache); contents are undefined."""

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Allocate memory that lives until the surrounding scratch ends; contents are undefined."""

    def scratch(self) -> AbstractContextManager[None]:
        """Free at its end every array that ops returned within it. Scratches nest."""

    def host_blocks(self, kv: Array, num_blocks: int) -> HostBlocks:
        """Allocate host memory for `num_blocks` blocks of the cache `kv` [N, L, 2, Hkv, B, D], in the background."""

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the memory that `empty` draws from."""

    def synchronize(self) -> None:
        """Wait until all work submitted so far is done."""

    def record_event(self) -> Any:
        """Record a point in the work submitted so far, for `elapsed_s`."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Seconds of the device between two events; waits for the later one."""


class Ops(Device, Protocol):
    """The operations of a model on its device."""

    dtype: np.dtype  # of activations and dense weights
    kv_dtype: np.dtype  # of the KV cache
    weight_formats: frozenset[WeightFormat]  # that `prepare_weight` takes
    has_fp8: bool  # products of inputs in e4m3; without them weights in FP8 are dequantised in the product

    def find_nonfinite(self, x: Array, found: Array) -> None:
        """Set found[0] = 1 if x, of `self.dtype` and any shape, holds NaN or infinity; found int32[1]."""

    def gather_rows(self, table: Array, ids: Array) -> Array:
        """table [N, H] of activations or float32, ids int32[T] -> [T, H]; a row of zeros for an id outside 0..N-1."""

    def pick_tokens(self, token_ids: Array, previous: Array, source: Array) -> None:
        """Set token_ids[i] = previous[source[i]] wherever 0 <= source[i] < P; token_ids, source int32[T], previous
        int32[P]: tokens that the previous step sampled and the host has not read yet."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [T, H] / sqrt(mean(x^2) + eps) * weight [H]; mean in float32."""

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        """residual [T, H] += x in place, rounded to its dtype, then return rms_norm(residual), in `out` if given."""

    def linear(
        self,
        x: Array | Fp8Rows,
        weight: Weight,
        bias: Array | None = None,
        *,
        dtype: np.dtype | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return x [T, K] @ weight [N, K].T + bias [N] as [T, N] in `dtype` (default: `self.dtype`), in `out` if given.

        x is in `self.dtype`, or in e4m3 for weights in FP8, which hold no NaN. A row of x in e4m3 with a scale that is
        not finite gives a row that is not finite.
        """

    def prepare_weight(self, weight: Weight) -> Weight:
        """Return a loaded weight in the form that `linear` reads; its memory may be reused. Call it once a weight.

        A format that the backend has no product for is dequantised to DENSE.
        """

    def tune_linear(
        self, weights: Sequence[Weight], bias: Array | None, num_rows: Sequence[int], *, dtype: np.dtype | None = None
    ) -> None:
        """Measure the fastest algorithm of `linear` for each of `num_rows` and these weights, all of one shape [N, K].

        Affects speed alone. The weights are used in turn, so that they come from memory as in a step. Not within
        `capture`.
        """

    def linear_sizes(self, most: int) -> list[int]:
        """Numbers of rows to run `linear` with, so that no number up to `most` loads or plans anything; the last may
        exceed it."""

    def rope_kv_write(
        self, qkv: Array, rotation: HeadRotation, positions: Array, slots: Array, kv: Array, layer: int
    ) -> Array:
        """Normalise and rotate q and k per head, write k and v to the cache, return q [T, Hq, D].

        qkv [T, (Hq + 2 Hkv) * D]; positions int32[T]; slots int64[T] (block id * B + offset); kv
        [num_blocks, L, 2, Hkv, B, D]. Rotation pairs element i with i + D/2 (Hugging Face's layout). Rows whose slot is
        outside the cache are not written; rows whose position is outside the table get q of zeros.
        """

    def plan_decode_attention(self, num_heads: int, batch: AttentionBatch) -> Array | None:
        """Plan the splits of a decode for every layer of this window; None if the backend plans nothing.

        For `paged_decode_attention` of arrays of the same shapes and `num_heads` query heads. Tables that name one
        block at one place, within what both see, must name the same blocks before it: a prefix shared by several
        sequences may be read once for all of them.
        """

    def paged_decode_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        """Attend with one query row a sequence, at position context_lens[s] - 1, to its cached keys and values.

        q, out [S, Hq, D]. Query head h reads kv head h // (Hq / Hkv). A row with context_lens[s] = 0 is padding and
        gives zeros.
        """

    def paged_prefill_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        """Attend causally with chunks of several sequences to the cache, which already holds the chunks' own keys.

        q, out [T, Hq, D]; the rows of sequence s are its last positions: row i has position
        context_lens[s] - (query_start[s + 1] - i). A sequence may have no row; rows before the first sequence's and
        after the last's are not written. A value in the cache that is NaN or infinite reaches the rows that see its
        key; in fp16 and bf16 on a GPU also rows that share a tile with one of these.
        """

    def silu_mul(self, gate_up: Array) -> Array:
        """gate_up [T, 2 I] -> silu(gate_up[:, :I]) * gate_up[:, I:]."""

    def quantise_rows(self, x: Array, out: Fp8Rows | None = None) -> Fp8Rows:
        """Round the rows of x [T, K] to e4m3 with scale = max(|row|) / 448, at least 1e-12; in `out` if given.

        A row with NaN or infinity gets a scale that is not finite.
        """

    def dequantise_rows(self, x: Fp8Rows) -> Array:
        """Return data * scale of x [T, K] in `self.dtype`."""

    def rms_norm_quantised(self, x: Array, weight: Array, eps: float) -> Fp8Rows:
        """`quantise_rows` of `rms_norm`'s result, which is rounded to `self.dtype` before."""

    def add_rms_norm_quantised(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Fp8Rows | None = None
    ) -> Fp8Rows:
        """`quantise_rows` of `add_rms_norm`'s result, in `out` if given; residual [T, H] += x in place as there."""

    def silu_mul_quantised(self, gate_up: Array) -> Fp8Rows:
        """`quantise_rows` of `silu_mul`'s result."""

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        """Set kv[targets[i]] = kv[sources[i]] over all layers; int32[N] each; no target is a source or occurs twice.
        A pair with an id outside the pool is ignored."""

    def top_logprobs(self, logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
        """logits float32[R, V], token_ids int32[R] -> (those tokens' log-probabilities float32[R], the K = num_best
        best ids int32[R, K], theirs float32[R, K]), best first, ties by lower id; K at most V."""

    def sample(self, logits: Array, how: SamplingArrays, out: Array | None = None) -> Sampled:
        """Sample one token a row of logits float32[R, V], which do not change; the ids go to `out` int32[R] if given.

        Order: bias, penalties, mask, temperature, top-k, top-p (of what top-k left), min-p. A value that ties with the
        threshold stays. The token is argmax(logit / temperature + Gumbel noise) over the rest, independent of the order
        of summation; ties go to the lower id. The noise of token v comes from word v % 4 of Philox4x32-10 with key
        (seed low, seed high) and counter (v // 4, position, branch, 0): u = ((word >> 9) + 0.5) * 2^-23,
        noise = -log(-log(u)).
        """
