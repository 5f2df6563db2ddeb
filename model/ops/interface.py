"""Contracts of `Device` (memory, transfers, graphs, events) and `Ops` (operations), on each backend's own arrays.

LoRA operations: `adapter_interface`. `cpu` is the specification, `gpu` launches the kernels of `cuda/`.
Dimensions:

    T  tokens of this step       H  hidden size   V  vocabulary (width of the logits)
    S  sequences of this step    D  head_dim      I  intermediate size of the MLP
    Hq, Hkv  query and kv heads  B  block_size    R  rows that are sampled
    L  layers                E  experts        k  experts of a token
    P  T * k, pairs of a token's row and an expert

Activations are in `Ops.dtype` (float32, float16, bfloat16), the cache in `Ops.kv_dtype`; accumulation is in float32.
Returned arrays live until the surrounding `scratch()` ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from model.config_fields import NO_WINDOW as NO_WINDOW
from model.ops.host_blocks import HostBlocks
from model.ops.packing import TableRows
from model.ops.weight import Array as Array
from model.ops.weight import ExpertWeights, Weight, WeightFormat

MAX_EXACT_ROWS = 24
"""Most rows of `Ops.exact_rows`, enough for a sequence with 16 drafts."""


@dataclass(frozen=True)
class SamplingArrays:
    """Sampling parameters of R rows of logits, on the device.

    `Penalties` and `Bias` are in CSR form: row r has the entries `indptr[r]:indptr[r + 1]`; None if no row needs them.
    Token ids outside 0..V-1 are ignored.
    """

    temperature: Array  # float32[R], 0 = greedy
    top_k: Array  # int32[R], V or more = off
    top_p: Array  # float32[R], 1 = off
    min_p: Array  # float32[R], 0 = off
    seed: Array  # uint64[R]
    position: Array  # uint32[R], of the sampled token
    branch: Array  # uint32[R]
    penalties: Penalties | None
    bias: Bias | None
    num_logprobs: int  # K, the largest of all rows; 0 = chosen token only
    with_logprobs: bool
    mask: TokenMask | None = None
    adjusts_logprobs: bool = False  # log-probabilities include bias, penalties and mask
    has_thresholds: bool = True  # False: top_k, top_p and min_p of every row are off


SAMPLING_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "branch")
"""Fields of `SamplingArrays` with one value per row."""


@dataclass(frozen=True)
class Penalties:
    """Tokens to penalise in each row. Repetition counts prompt and output, presence and frequency the output only."""

    repetition: Array  # float32[R], 1 = off
    presence: Array  # float32[R]
    frequency: Array  # float32[R]
    indptr: Array  # int32[R + 1]
    token_ids: Array  # int32[N], unique within a row
    output_counts: Array  # int32[N], 0 = in the prompt only


@dataclass(frozen=True)
class Bias:
    """Values added to logits; -inf forbids a token."""

    indptr: Array  # int32[R + 1]
    token_ids: Array  # int32[N]
    values: Array  # float32[N]


@dataclass(frozen=True)
class TokenMask:
    """Tokens allowed by a grammar: bit i % 32 of word i // 32; tokens beyond the words are forbidden."""

    rows: Array  # int32[R], row of `words`; outside 0..M-1: all tokens
    words: Array  # uint32[M, W]


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens. Log-probabilities are those of the raw logits, unless `SamplingArrays.adjusts_logprobs`."""

    token_ids: Array  # int32[R]
    is_nan: Array  # bool[R], no finite maximum: the token id is a meaningless 0
    logprobs: Array | None  # float32[R], of the chosen token
    top_ids: Array | None  # int32[R, K], best first, ties by lower id
    top_logprobs: Array | None  # float32[R, K]


@dataclass(frozen=True)
class TokenCandidates:
    """Best token of a part of the vocabulary, by highest score, then tie, then lowest id."""

    token_ids: Array  # int32[R], or [R, parts]
    score: Array  # float32, of the same shape; NaN: the part holds NaN or infinity
    tie: Array  # float32; -inf: no token is allowed


@dataclass(frozen=True)
class Fp8Rows:
    """An e4m3 matrix with row scales: data * scale[:, None]."""

    data: Array  # uint8[rows, K], bits of float8_e4m3fn
    scale: Array  # float32[rows]


@dataclass(frozen=True)
class ExpertGroups:
    """Pairs of a row and an expert, sorted by expert, then by row; undefined from offsets[E] on."""

    rows: Array  # int32[P], row of each sorted pair
    places: Array  # int32[T, k], sorted positions of a row's pairs; -1: padding
    offsets: Array  # int32[E + 1]: expert e has the sorted pairs offsets[e]:offsets[e + 1]


@dataclass(frozen=True)
class Routing:
    """Choice of experts, as arguments of `Ops.route_experts`."""

    num_used: int
    renormalise: bool
    slots: Array | None = None  # int64[T]
    num_slots: int = 0


@dataclass(frozen=True)
class AttentionBatch:
    """S sequences of an attention call."""

    kv: Array  # [num_blocks, L, 2, Hkv, B, D]
    layer: int
    block_tables: Array  # int32[S, max_blocks]
    context_lens: Array  # int32[S], tokens in the cache, including this step's
    scale: float = 1.0
    window: int = NO_WINDOW  # a query at p sees keys from p - window + 1 on
    query_start: Array | None = None  # int32[S + 1], prefill: rows query_start[s]:query_start[s + 1]
    max_query_len: int = 1  # prefill: at least the longest chunk
    plan: Array | None = None  # decode, from `plan_decode_attention`; None: planned by the op
    kv_scales: Array | None = None  # float32[L, 2, Hkv] of an e4m3 cache
    exact: bool = False  # decode: each row is split as in a batch of one
    drafted: bool = False  # decode: adjacent rows may be a token and its drafts, which read common tokens once
    rounds_output: bool = False  # the output is rounded to 8 bits, so a last bit may matter: the CPU adds in float64


@dataclass(frozen=True)
class DraftRuns:
    """Rows of S sequences sampled by a step, and the blocks for their next drafts."""

    rows: Array  # int32[S, 4]: first row, first sample, number of rows (0: padding), capacity of the blocks in tokens
    block_tables: Array  # int32[S, W]
    block_size: int


@dataclass(frozen=True)
class DraftPlan:
    """Positions and slots of K draft tokens of S sequences, after the last accepted row of each."""

    last_rows: Array  # int32[S]; -1: padding
    num_accepted: Array  # int32[S], drafts
    places: Array  # int32[K + 2, S], positions, beginning with the last row's
    slots: Array  # int64[K, S], their slots; -1: not written


@dataclass(frozen=True)
class HeadRotation:
    """Norms and rotation of the heads of q and k."""

    cos: Array  # float32[max_len, D / 2]
    sin: Array  # float32[max_len, D / 2]
    q_norm: Array | None = None  # [D]; None: no norm
    k_norm: Array | None = None  # [D]
    eps: float = 0.0


class Device(Protocol):
    """Memory, transfers, graphs and events of one device, used by one thread at a time."""

    name: str  # "numpy" | "cuda"
    device_name: str  # "NVIDIA H200", "CPU"
    num_ranks: int  # ranks that a model is divided among; 1: whole

    def upload(self, host: np.ndarray) -> Array:
        """Return a device copy of the same shape and dtype, freed with its last reference."""

    def upload_all(
        self, hosts: Sequence[np.ndarray], into: Array | None = None, rows: TableRows | None = None
    ) -> list[Array]:
        """Copy small host arrays, and rows of a table, in one transfer without waiting; the host arrays may change at
        once.

        The copies lie in `into` uint8[N] if given (equal shapes have equal offsets), else they live like those of
        `upload`.
        """

    def load_parallel(self, targets: Sequence[Array], read: Callable[[int, int, np.ndarray], None]) -> None:
        """Fill large contiguous arrays in several threads, and wait.

        read(i, start, out) writes the flattened targets[i], from `start` on, to `out` [n]. Its exceptions are raised
        here.
        """

    def release_staging(self) -> None:
        """Free the host memory that `load_parallel` keeps for its next call."""

    def download(self, array: Array) -> np.ndarray:
        """Return a host copy once the array is computed."""

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        """Start to copy `arrays` as of all submitted work; the returned function waits for the copies."""

    def compile_ahead(self, work: Callable[[], None]) -> None:
        """Start to compile the kernels of `work`; later work waits for them.

        A backend that compiles runs `work` without computing, so its control flow must not depend on results. Other
        backends do not run it.
        """

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        """Record `work` if the backend can; return a function that replays it on the same arrays.

        `work` uses only this backend's ops, on memory that stays allocated. It first runs once, or else `warm_up_run`
        does, which must need the same kernels, product shapes and scratch.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Allocate undefined memory outside of scratches."""

    def temporary(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Allocate undefined memory until the surrounding scratch ends."""

    def scratch(self) -> AbstractContextManager[None]:
        """Free on exit the arrays that ops returned within the scope. Scopes nest."""

    def host_blocks(self, kv: Array, num_blocks: int) -> HostBlocks:
        """Allocate `num_blocks` blocks of `kv` [N, L, 2, Hkv, B, D] on the host, in the background."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return (free, total) bytes of the memory that `empty` uses."""

    def synchronize(self) -> None:
        """Wait for all work submitted so far."""

    def record_event(self) -> Any:
        """Record a point in the submitted work, for `elapsed_s`."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Return the device seconds between two events; wait for `end`."""


class Ops(Device, Protocol):
    """A model's operations on its device."""

    dtype: np.dtype  # of activations and dense weights
    kv_dtype: np.dtype  # of the cache; uint8: e4m3
    weight_formats: frozenset[WeightFormat]  # accepted by `prepare_weight`
    has_fp8: bool  # has products of e4m3 inputs; else FP8 weights are dequantised

    def find_nonfinite(self, x: Array, found: Array) -> None:
        """Set found[0] = 1 if x, of `self.dtype` or uint8 bits of e4m3, holds NaN or infinity; found int32[1]."""

    def gather_rows(self, table: Array, ids: Array) -> Array:
        """table [N, H] of activations or float32, ids int32[T] -> [T, H]; zeros for an id outside 0..N-1."""

    def place_columns(self, x: Array, out: Array, first: int) -> None:
        """Set out[:, first : first + H] = x; x [T, H] and out [T, W] are activations."""

    def pick_tokens(self, token_ids: Array, previous: Array, source: Array) -> None:
        """Set token_ids[i] = previous[source[i]] if 0 <= source[i] < P; token_ids, source int32[T], previous
        int32[P]."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [T, H] / sqrt(mean(x^2) + eps) * weight [H]; mean in float32."""

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        """residual [T, H] += x in its dtype; return its rms_norm, in `out` if given."""

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

        x is in `self.dtype`, or e4m3 for FP8 weights, which hold no NaN. A non-finite scale of x gives a non-finite
        row.
        """

    def add_norm_linear(
        self,
        x: Array,
        residual: Array,
        norm: tuple[Array, float],
        weight: Weight,
        bias: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return `linear` of `add_rms_norm`; `norm` is (weight, eps)."""

    def prepare_weight(self, weight: Weight) -> Weight:
        """Return a loaded weight in the form that `linear` reads, dequantised to DENSE if its format has no product.

        Call it once per weight, whose memory may be reused.
        """

    def tune_linear(
        self, weights: Sequence[Weight], bias: Array | None, num_rows: Sequence[int], *, dtype: np.dtype | None = None
    ) -> None:
        """Measure the fastest algorithm of `linear` for each of `num_rows`. Do not call within `capture`.

        The weights [N, K] are used in turn, so that they are read from memory as in a step.
        """

    def linear_sizes(self, most: int) -> list[int]:
        """Return row counts to run `linear` with, after which no count up to `most` loads or plans anything.

        The last count may exceed `most`.
        """

    def rope_kv_write(
        self,
        qkv: Array,
        rotation: HeadRotation,
        positions: Array,
        slots: Array,
        kv: Array,
        layer: int,
        kv_scales: Array | None = None,
    ) -> Array:
        """Normalise and rotate q and k per head, write k and v to the cache, return q [T, Hq, D].

        qkv [T, (Hq + 2 Hkv) * D]; positions int32[T]; slots int64[T] (block id * B + offset); kv [num_blocks, L, 2,
        Hkv, B, D]. Element i is paired with i + D/2 (Hugging Face's layout). Slots outside the cache and positions
        outside the table are not written; the latter give zeros for q.

        A uint8 cache stores e4m3(clamp(x / scale, -448, 448)) with scales from kv_scales float32[L, 2, Hkv]. x is first
        rounded to `self.dtype`, the division is in float32, rounding is to nearest even, and NaN is 0x7F. Attention
        reads stored * scale.
        """

    def normalise_qk(self, qkv: Array, q_norm: Array, k_norm: Array, eps: float) -> None:
        """Replace q [T, Hq * D] and k [T, Hkv * D], the first columns of qkv, by their `rms_norm` over all heads.

        q_norm [Hq * D], k_norm [Hkv * D].
        """

    def plan_decode_attention(self, num_heads: int, batch: AttentionBatch) -> Array | None:
        """Plan the splits of a decode for every layer with this window; return None if the backend plans nothing.

        The plan is valid for arrays of the same shapes and `num_heads` query heads. Tables with the same visible block
        at an index must agree on all preceding blocks, because a shared prefix may be read once.
        """

    def exact_rows(self) -> AbstractContextManager[None]:
        """Give each decode row and each row of `linear` the bits of a batch of one, for at most MAX_EXACT_ROWS rows.

        Exceptions: float32 products, products whose single row is computed by cuBLASLt, more than 16 rows of quantised
        weights, experts and adapters.
        """

    def rope_decode_attention(
        self,
        qkv: Array,
        rotation: HeadRotation,
        positions: Array,
        slots: Array,
        batch: AttentionBatch,
    ) -> Array:
        """Return [S, Hq * D]: `rope_kv_write`, then `paged_decode_attention`.

        qkv [S, (Hq + 2 Hkv) * D], positions int32[S] and slots int64[S] are those of the last tokens of S sequences, so
        no row reads what another writes. Rows without context write nothing and give zeros.
        """

    def paged_decode_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        """Attend with one query per sequence, at position context_lens[s] - 1; q, out [S, Hq, D].

        Query head h reads KV head h // (Hq / Hkv). Sequences with context_lens[s] = 0 are padding and give zeros.
        """

    def paged_prefill_attention(self, q: Array, batch: AttentionBatch, out: Array) -> None:
        """Attend causally with chunks of several sequences whose keys are already cached; q, out [T, Hq, D].

        Row i of sequence s has position context_lens[s] - (query_start[s + 1] - i). A sequence may have no row; rows of
        no sequence are not written. A non-finite value reaches the rows that see its key, and in 16 bits on a GPU also
        rows that share a tile with them.
        """

    def silu_mul(self, gate_up: Array) -> Array:
        """gate_up [T, 2 I] -> silu(gate_up[:, :I]) * gate_up[:, I:]."""

    def quantise_rows(self, x: Array, out: Fp8Rows | None = None) -> Fp8Rows:
        """Round x [T, K] to e4m3 with scale = max(|row|) / 448, at least 1e-12; in `out` if given.

        A row with NaN or infinity gets a non-finite scale.
        """

    def dequantise_rows(self, x: Fp8Rows) -> Array:
        """Return data * scale of x [T, K] in `self.dtype`."""

    def rms_norm_quantised(self, x: Array, weight: Array, eps: float) -> Fp8Rows:
        """Return `quantise_rows` of `rms_norm`, rounded to `self.dtype` first."""

    def add_rms_norm_quantised(
        self, x: Array, residual: Array, weight: Array, eps: float, out: Fp8Rows | None = None
    ) -> Fp8Rows:
        """Return `quantise_rows` of `add_rms_norm`, in `out` if given."""

    def silu_mul_quantised(self, gate_up: Array) -> Fp8Rows:
        """Return `quantise_rows` of `silu_mul`."""

    def gated_mlp(self, x: Array | Fp8Rows, gate_up: Weight, down: Weight) -> Array:
        """x [T, H], gate_up [2 I, H], down [H, I] -> [T, H]: `linear`, `silu_mul` (quantised if `down` takes e4m3) and
        `linear`, with the same bits."""

    def add_norm_gated_mlp(
        self, x: Array, residual: Array, norm: tuple[Array, float], gate_up: Weight, down: Weight
    ) -> Array:
        """Return `gated_mlp` of `add_rms_norm`; `norm` is (weight, eps). gate_up takes 16-bit rows."""

    def route_experts(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, Array]:
        """Return each row's k = num_used most probable experts int32[T, k] and probabilities float32[T, k].

        logits float32[T, E]; softmax over all E, in float32; best first, ties by lower id. `renormalise` divides by the
        sum of the k. A row with NaN or only -inf gives k different ids, and NaN. A row whose slot in slots int64[T] is
        outside 0..num_slots - 1 is padding: ids of -1 and zeros.
        """

    def group_by_expert(self, ids: Array, num_experts: int) -> ExpertGroups:
        """Sort the pairs of ids int32[T, k], which are in 0..num_experts - 1 and distinct within a row; leave out
        -1."""

    def route_to_groups(
        self, logits: Array, num_used: int, renormalise: bool, slots: Array | None = None, num_slots: int = 0
    ) -> tuple[Array, ExpertGroups]:
        """Return weights float32[T, k] of `route_experts` and their `group_by_expert`."""

    def experts_linear(
        self, x: Array | Fp8Rows, weight: Weight, groups: ExpertGroups, *, is_sorted: bool = False
    ) -> Array:
        """Return [P, N], the product of each sorted pair's row and its expert's matrix in weight [E, N, K]; undefined
        from groups.offsets[E] on.

        x is as in `linear`: [T, K], or [P, K] of sorted pairs if `is_sorted`.
        """

    def combine_experts(self, x: Array, groups: ExpertGroups, weights: Array) -> Array:
        """x [P, H] of sorted pairs, weights float32[T, k] -> [T, H]: the sum of weights[t, j] * x[places[t, j]].

        Sums are in float32, from j = 0 on, so none depends on other rows. Padding gives zeros.
        """

    def add_norm_experts(
        self, x: Array, residual: Array, weight: Array, eps: float, experts: ExpertWeights, routing: Routing
    ) -> Array:
        """residual [T, H] += x -> [T, H]: output of the experts to which its norm is routed; zeros for padding."""

    def gated_experts(self, x: Array, gate_up: Weight, down: Weight, groups: ExpertGroups, weights: Array) -> Array:
        """x [T, H], gate_up [E, 2 I, H], down [E, H, I] -> [T, H]: `experts_linear`, `silu_mul`, `experts_linear`,
        `combine_experts`."""

    def copy_blocks(self, kv: Array, sources: Array, targets: Array) -> None:
        """Set kv[targets[i]] = kv[sources[i]]; int32[N] each. No target is a source or repeated. Ids outside the pool
        are ignored."""

    def top_logprobs(self, logits: Array, token_ids: Array, num_best: int) -> tuple[Array, Array, Array]:
        """logits float32[R, V], token_ids int32[R] -> log-probabilities float32[R], the K = num_best <= V best ids
        int32[R, K] and their log-probabilities float32[R, K]; ties by lower id."""

    def sample(self, logits: Array, params: SamplingArrays, out: Array | None = None) -> Sampled:
        """Sample one token per row of logits float32[R, V], which do not change; ids go to `out` int32[R] if given.

        Order: bias, penalties, mask, temperature, top-k, top-p (of what top-k left), min-p; tokens tied with a
        threshold stay. The token is argmax(logit / temperature + Gumbel noise), ties to the lower id. Token v's noise
        comes from word v % 4 of Philox4x32-10 with key (seed low, seed high) and counter (v // 4, position, branch, 0):
        u = ((word >> 9) + 0.5) * 2^-23, noise = -log(-log(u)).
        """


@runtime_checkable
class DraftOps(Ops, Protocol):
    """Operations of a single device, which also runs EAGLE-3 heads."""

    def draft_input(
        self, token_ids: Array, table: Array, hidden: Array, weights: tuple[Array, Array], eps: float
    ) -> Array:
        """Return [T, 2 H]: rms_norm of table[token_ids] by weights[0], then of hidden [T, H] by weights[1].

        table [N, H], token_ids int32[T]; zeros for an id outside 0..N-1.
        """

    def plan_drafts(self, sampled: Array, rows: tuple[Array, Array], runs: DraftRuns, out: DraftPlan) -> None:
        """Fill `out`. A run accepts drafts, the tokens after its first row, while they equal the sampled tokens.

        sampled int32[P]; rows: token ids and positions int32[T] of a step.
        """

    def spread_logits(self, logits: Array, columns: Array) -> Array:
        """logits float32[R, N], columns int32[V] -> float32[R, V]: logits[:, columns], -inf for one outside 0..N-1."""


class PartOps(Ops, Protocol):
    """A backend as one rank of a group, run by one thread with the others."""

    def use(self) -> None:
        """Make this rank's device the thread's current one, as other methods require."""

    def sample_part(self, logits: Array, params: SamplingArrays, first_token: int) -> TokenCandidates:
        """Return each row's best token; logits [R, n] begin at token `first_token`.

        Samples like `sample`, without mask, thresholds or log-probabilities.
        """
