"""Launches the norm kernels."""

from __future__ import annotations

import math

import numpy as np

from model.ops.gpu.launcher import KernelLauncher
from model.ops.interface import Array

_VEC_BYTES = 16


def rms_norm(device: KernelLauncher, x: Array, weight: Array, eps: float) -> Array:
    """Implement `Ops.rms_norm`."""
    rows, width = x.shape
    out = device.temporary(x.shape, device.dtype)
    args = (x, weight, out, np.int32(width), np.float32(eps))
    device.launch("rms_norm", (rows,), args, threads=norm_threads(device, rows, width), overlaps=True)
    return out


def add_rms_norm(device: KernelLauncher, x: Array, residual: Array, weight: Array, eps: float, out: Array) -> None:
    """Implement `Ops.add_rms_norm`."""
    rows, width = x.shape
    args = (x, residual, weight, out, np.int32(width), np.float32(eps))
    device.launch("add_rms_norm", (rows,), args, threads=norm_threads(device, rows, width), overlaps=True)


def normalise_qk(device: KernelLauncher, qkv: Array, q_norm: Array, k_norm: Array, eps: float) -> None:
    """Implement `Ops.normalise_qk`."""
    sizes = map(np.int32, (qkv.shape[1], len(q_norm), len(k_norm)))
    threads = norm_threads(device, 2 * len(qkv), len(q_norm))
    args = (qkv, q_norm, k_norm, *sizes, np.float32(eps))
    device.launch("normalise_qk", (len(qkv), 2), args, threads=threads, overlaps=True)


def norm_threads(device: KernelLauncher, rows: int, width: int) -> int:
    """Return threads per block: one vector per thread if few rows would leave the device idle, else two."""
    vecs = math.ceil(width * device.dtype.itemsize / _VEC_BYTES)
    threads = vecs if rows <= 2 * device.num_sms else math.ceil(vecs / 2)
    return min(1024, math.ceil(threads / 32) * 32)
