"""Reverse-mode gradients of the few operations that an EAGLE-3 head needs, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EPS = 1e-5


class Tensor:
    """float32 values, and how their gradient reaches the tensors they were computed from."""

    def __init__(self, value: np.ndarray, parents: Sequence[Tensor] = (), backward: Callable | None = None):
        """`backward` takes the gradient and returns one for each parent, or None."""
        self.value, self.parents, self.backward = value, parents, backward
        self.gradient: np.ndarray | None = None


def propagate(loss: Tensor) -> None:
    """Add the gradient of a scalar to every tensor below it."""
    order: list[Tensor] = []
    seen: set[int] = set()
    stack = [(loss, False)]
    while stack:
        tensor, is_done = stack.pop()
        if is_done:
            order.append(tensor)
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            stack += [(tensor, True), *((parent, False) for parent in tensor.parents)]
    loss.gradient = np.ones_like(loss.value)
    for tensor in reversed(order):
        if tensor.backward is None:
            continue
        for parent, gradient in zip(tensor.parents, tensor.backward(tensor.gradient), strict=True):
            if gradient is not None:
                parent.gradient = gradient if parent.gradient is None else parent.gradient + gradient
        tensor.gradient = None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]."""

    def backward(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = gradient.reshape(-1, gradient.shape[-1])
        return gradient @ weight.value, flat.T @ x.value.reshape(-1, x.value.shape[-1])

    return Tensor(x.value @ weight.value.T, (x, weight), backward)


def add(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(a.value + b.value, (a, b), lambda gradient: (gradient, gradient))


def concat(a: Tensor, b: Tensor) -> Tensor:
    width = a.value.shape[-1]
    joined = np.concatenate([a.value, b.value], axis=-1)
    return Tensor(joined, (a, b), lambda gradient: (gradient[..., :width], gradient[..., width:]))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    scale = 1 / np.sqrt(np.mean(x.value**2, axis=-1, keepdims=True) + np.float32(EPS))
    normed = x.value * scale

    def backward(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inner = gradient * weight.value
        mean = np.mean(inner * normed, axis=-1, keepdims=True)
        return scale * (inner - normed * mean), (gradient * normed).reshape(-1, normed.shape[-1]).sum(axis=0)

    return Tensor(normed * weight.value, (x, weight), backward)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    sigmoid = 1 / (1 + np.exp(-np.clip(gate.value, -80, None)))
    silu = gate.value * sigmoid

    def backward(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slope = sigmoid * (1 + gate.value * (1 - sigmoid))
        return gradient * up.value * slope, gradient * silu

    return Tensor(silu * up.value, (gate, up), backward)


def rotate(x: Tensor, cos: np.ndarray, sin: np.ndarray) -> Tensor:
    """x [..., T, D], cos and sin [T, D / 2]."""

    def turned(value: np.ndarray, sin: np.ndarray) -> np.ndarray:
        low, high = np.split(value, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    return Tensor(turned(x.value, sin), (x,), lambda gradient: (turned(gradient, -sin),))


def heads(x: Tensor, num_heads: int, num_groups: int) -> Tensor:
    """x [N, T, heads * D] -> [N, num_heads, T, D], each head `num_groups` times."""
    n, t, width = x.value.shape
    split = x.value.reshape(n, t, num_heads, -1).transpose(0, 2, 1, 3)

    def backward(gradient: np.ndarray) -> tuple[np.ndarray]:
        summed = gradient.reshape(n, num_heads, num_groups, t, -1).sum(axis=2)
        return (summed.transpose(0, 2, 1, 3).reshape(n, t, width),)

    return Tensor(np.repeat(split, num_groups, axis=1), (x,), backward)


def joined_heads(x: Tensor) -> Tensor:
    """x [N, heads, T, D] -> [N, T, heads * D]."""
    n, count, t, d = x.value.shape
    return Tensor(
        x.value.transpose(0, 2, 1, 3).reshape(n, t, -1),
        (x,),
        lambda gradient: (gradient.reshape(n, t, count, d).transpose(0, 2, 1, 3),),
    )


def later(x: Tensor, axis: int = 1) -> Tensor:
    """Move each position's values to the next one; the first gets zeros."""

    def moved(value: np.ndarray, by: int) -> np.ndarray:
        rolled = np.roll(value, by, axis)
        first = [slice(None)] * value.ndim
        first[axis] = 0 if by > 0 else -1
        rolled[tuple(first)] = 0
        return rolled

    return Tensor(moved(x.value, 1), (x,), lambda gradient: (moved(gradient, -1),))


def attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """q, keys, values [N, heads, T, D] -> [N, heads, T, D].

    The first keys are of the model's own states: a query at t sees them up to t - (len(keys) - 1). Of each further
    pair, of drafted states, it sees the one at its own row alone.
    """
    (first_k, *own_k), (first_v, *own_v) = keys, values
    scale = np.float32(q.value.shape[-1] ** -0.5)
    t = q.value.shape[2]
    visible = np.arange(t) <= np.arange(t)[:, None] - len(own_k)
    scores = np.where(visible, q.value @ first_k.value.swapaxes(-1, -2) * scale, np.float32(-1e30))
    own = [np.sum(q.value * k.value, axis=-1, keepdims=True) * scale for k in own_k]
    scores = np.concatenate([scores, *own], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights[..., :t] @ first_v.value
    for index, v in enumerate(own_v):
        out += weights[..., t + index, None] * v.value

    def backward(gradient: np.ndarray) -> list[np.ndarray]:
        towards = [gradient @ first_v.value.swapaxes(-1, -2)]
        towards += [np.sum(gradient * v.value, axis=-1, keepdims=True) for v in own_v]
        slopes = np.concatenate(towards, axis=-1)
        slopes = weights * (slopes - np.sum(weights * slopes, axis=-1, keepdims=True)) * scale
        of_q = slopes[..., :t] @ first_k.value
        for index, k in enumerate(own_k):
            of_q += slopes[..., t + index, None] * k.value
        of_k = [slopes[..., :t].swapaxes(-1, -2) @ q.value]
        of_k += [slopes[..., t + index, None] * q.value for index in range(len(own_k))]
        of_v = [weights[..., :t].swapaxes(-1, -2) @ gradient]
        of_v += [weights[..., t + index, None] * gradient for index in range(len(own_k))]
        return [of_q, *of_k, *of_v]

    return Tensor(out, (q, *keys, *values), backward)


def cross_entropy(logits: Tensor, wanted: np.ndarray, weight: np.ndarray) -> Tensor:
    """logits and distributions `wanted` [..., V], weight [...] -> the sum of weighted losses."""
    shifted = logits.value - logits.value.max(axis=-1, keepdims=True)
    log_total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    loss = -np.sum((shifted - log_total) * wanted * weight[..., None])

    def backward(gradient: np.ndarray) -> tuple[np.ndarray]:
        given = np.exp(shifted - log_total)
        return (gradient * weight[..., None] * (given * wanted.sum(axis=-1, keepdims=True) - wanted),)

    return Tensor(np.float32(loss), (logits,), backward)
