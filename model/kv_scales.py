"""Scales of an fp8 KV cache, measured if the checkpoint has none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from model.batch import Batch
from model.families.llama import Llama
from model.kv_cache import allocate
from model.ops.fp8 import E4M3_MAX, widen
from model.ops.interface import Array, Ops

E4M3_NAME = "fp8_e4m3"

NUM_TOKENS = 128
TOKEN_STEP = 7919
"""A prime, so that ids spread over the vocabulary."""

LARGEST_EXPONENT = 5
"""The largest measured value is stored as 32 to 64: seven times as much fits in 448, and 1/2048 of it keeps all
bits."""

MAX_PASSES = 4
CHANGE_OUT_OF_RANGE = np.float32(64)


@dataclass(frozen=True)
class KvFormat:
    """Dtype and scales of a cache."""

    dtype: str  # "fp8_e4m3", "bfloat16", ...
    scales: str = ""  # of fp8: "stored" | "measured"
    key: str = ""  # of dtype and scales; blocks of different keys never match


def kv_format(model: Llama, block_size: int, max_model_len: int) -> KvFormat:
    """Return the format of the model's cache, after measuring its scales if needed and not stored."""
    dtype, weights = cache_dtype_name(model.ops), model.weights
    if weights.kv_scales is None:
        return KvFormat(dtype, key=dtype)
    if not weights.has_stored_kv_scales:
        measure_kv_scales(model, block_size, max_model_len)
    digest = hashlib.sha256(model.ops.download(weights.kv_scales).tobytes()).hexdigest()
    return KvFormat(dtype, "stored" if weights.has_stored_kv_scales else "measured", f"{dtype} {digest[:32]}")


def cache_dtype_name(ops: Ops) -> str:
    return E4M3_NAME if ops.kv_dtype == np.uint8 else ops.kv_dtype.name


def measure_kv_scales(model: Llama, block_size: int, max_model_len: int) -> np.ndarray:
    """Set and return `model.weights.kv_scales` float32[L, 2, Hkv]: a power of two per layer, side and head, measured on
    keys and values of a fixed token sequence.

    The forward pass runs on a separate cache until no scale changes. A head without a measurable value gets 1.
    """
    ops, config = model.ops, model.config
    num_tokens = min(NUM_TOKENS, max_model_len)
    num_blocks = -(-num_tokens // block_size)
    kv = allocate(ops, config, num_blocks, block_size)
    scales = np.ones((config.num_layers, 2, config.num_kv_heads), np.float32)
    for _ in range(MAX_PASSES):
        set_kv_scales(model, scales)
        with ops.scratch():
            model.hidden(_one_sequence(model, num_tokens, num_blocks), kv)
        largest = _largest(ops.download(kv), num_tokens)
        measured = _scales_of(largest, scales)
        if np.array_equal(measured, scales):
            break
        scales = measured
    scales[~(largest > 0)] = 1
    set_kv_scales(model, scales)
    return scales


def set_kv_scales(model: Llama, scales: np.ndarray) -> None:
    """Copy float32[L, 2, Hkv] to the device, in place."""

    def read(_: int, start: int, out: np.ndarray) -> None:
        out[...] = scales.reshape(-1)[start : start + out.size]

    model.ops.load_parallel([model.weights.kv_scales], read)


def _largest(stored: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the largest stored magnitude per [L, 2, Hkv] of e4m3 [num_blocks, L, 2, Hkv, B, D]."""
    by_token = stored.transpose(1, 2, 3, 0, 4, 5).reshape(*stored.shape[1:4], -1, stored.shape[5])
    codes = by_token[:, :, :, :num_tokens] & 0x7F
    largest_codes: np.ndarray = codes.max(axis=(3, 4))
    return widen(largest_codes)


def _scales_of(largest: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return better scales from the `largest` values stored with `scales`; NaN keeps a scale."""
    exponents = np.frexp(largest)[1] - 1 - LARGEST_EXPONENT
    better: np.ndarray = np.ldexp(scales, np.where(np.isfinite(largest), exponents, 0)).astype(np.float32)
    better[largest == 0] = scales[largest == 0] / CHANGE_OUT_OF_RANGE
    better[largest == E4M3_MAX] = scales[largest == E4M3_MAX] * CHANGE_OUT_OF_RANGE
    return better


def _one_sequence(model: Llama, num_tokens: int, num_blocks: int) -> Batch:
    def upload(*values: int) -> Array:
        return model.ops.upload(np.array(values, np.int32))

    positions = np.arange(num_tokens, dtype=np.int32)
    return Batch(
        token_ids=upload(*(positions.astype(np.int64) * TOKEN_STEP % model.config.vocab_size)),
        positions=upload(*positions),
        slots=model.ops.upload(positions.astype(np.int64)),
        block_tables=model.ops.upload(np.arange(num_blocks, dtype=np.int32)[None]),
        context_lens=upload(num_tokens),
        query_start=upload(0, num_tokens),
        logit_rows=None,
        num_decodes=0,
        num_tokens=num_tokens,
        num_sequences=1,
        max_query_len=num_tokens,
    )
