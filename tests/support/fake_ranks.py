"""Ranks of a GPU group that record their launches in one log."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from model.ops.cpu.ops import FLOAT32, NumpyOps


class Addressed(np.ndarray):
    """A NumPy array with CuPy's `data.ptr`."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


class FakeRank(NumpyOps):
    """Rank that computes everything but collectives on the CPU; ranks share `log`."""

    name, arch, num_sms, max_shared_bytes, dtype_code = "cuda", "90a", 132, 227 << 10, 0

    def __init__(self, number: int, log: list[tuple[object, ...]], dtype=FLOAT32):
        super().__init__(dtype)
        self.number, self.log, self.label = number, log, f"cuda:{number}, Fake, 0000:0{number}:00.0"
        self.is_capturing = self.is_missing = False
        self.current = [None]

    def use(self) -> None:
        self.log.append(("use", self.number))

    def upload(self, host):
        return np.array(host).view(Addressed)

    def shared(self, num_bytes):
        return np.zeros(num_bytes, np.uint8).view(Addressed)

    def temporary(self, shape, dtype):
        return np.zeros(shape, dtype).view(Addressed)

    def load_kernel(self, name, **defines):
        self.log.append(("load", self.number, name))
        return not self.is_missing

    def launch(self, name, grid, args, **how):
        self.log.append(("launch", self.number, name, grid, args, how))

    def begin_capture(self):
        self.is_capturing = True

    def end_capture(self):
        self.is_capturing = False
        return lambda: self.log.append(("replay", self.number))

    def compile_ahead(self, work, others=()):
        self.log.append(("compile", self.number, len(others)))
        work()

    def share_tuning(self, other):
        self.log.append(("share", self.number, other.number))

    def tune_linear(self, weights, bias, num_rows, *, dtype=None):
        self.log.append(("tune", self.number, tuple(num_rows)))


def launches(log) -> list[tuple[object, ...]]:
    """Return (rank, kernel, grid, defines) in order."""
    return [(one[1], one[2], one[3], one[5]) for one in log if one[0] == "launch"]
