"""A device that only records kernel launches."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ADDRESS = 1 << 20


class FakeArray:
    """Array with the attributes of CuPy's that launches read."""

    def __init__(self, shape, dtype, address=ADDRESS):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), SimpleNamespace(ptr=address)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return FakeArray((len(range(*rows.indices(len(self)))), *self.shape[1:]), self.dtype, self.data.ptr)


class FakeLauncher:
    """Launcher that records its launches."""

    def __init__(self, arch="90a", dtype=BFLOAT16, max_shared_bytes=227 << 10):
        self.arch, self.dtype, self.max_shared_bytes, self.num_sms = arch, np.dtype(dtype), max_shared_bytes, 132
        self.tensor_maps = SimpleNamespace(get=lambda *_, **__: None)
        self.launched = []

    def launch(self, name, grid, args, **_):
        self.launched.append(name)

    def temporary(self, shape, dtype):
        return FakeArray(shape, dtype)

    def dense(self, x, weight, bias, out):
        self.launched.append("linear")


class FakeStack(FakeArray):
    """FakeArray with views, slices and gathers."""

    flags = SimpleNamespace(c_contiguous=True)

    def view(self, dtype):
        width = self.shape[-1] * self.dtype.itemsize // np.dtype(dtype).itemsize
        return FakeStack((*self.shape[:-1], width), dtype)

    def reshape(self, *shape):
        return FakeStack(shape if -1 not in shape else (self.shape[0], *shape[1:]), self.dtype)

    @property
    def size(self):
        return int(np.prod(self.shape))


class StackLauncher(FakeLauncher):
    dtype_code = 2

    def temporary(self, shape, dtype):
        return FakeStack(shape, dtype)
