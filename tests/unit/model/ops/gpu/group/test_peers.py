"""Groups that cannot be: each is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from model.errors import ModelError


class Refused(Exception):
    status = 217  # cudaErrorPeerAccessUnsupported


class EnabledBefore(Exception):
    status = 704


class Runtime:
    CUDARuntimeError = Exception

    def __init__(self, names=(b"A", b"A"), *, can_access=True, error: Exception | None = None):
        self.names, self.can_access, self.error, self.enabled = names, can_access, error, []

    def getDeviceCount(self):
        return len(self.names)

    def getDeviceProperties(self, device_id):
        return {"name": self.names[device_id], "totalGlobalMem": 141 << 30}

    def deviceCanAccessPeer(self, own, peer):
        return self.can_access

    def deviceEnablePeerAccess(self, peer):
        self.enabled.append(peer)
        if self.error is not None:
            raise self.error


@pytest.fixture
def peers(monkeypatch):
    reason = "needs the packages of the compile extra"
    module = pytest.importorskip("model.ops.gpu.group.peers", reason=reason, exc_type=ImportError)
    device = SimpleNamespace(use=lambda: None)
    monkeypatch.setattr(module, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda device_id: device)))

    def on(runtime: Runtime):
        monkeypatch.setattr(module, "runtime", runtime)
        return module

    return on


def test_each_reaches_each(peers):
    runtime = Runtime(error=EnabledBefore("already enabled"))
    peers(runtime).connect([0, 1])
    assert runtime.enabled == [1, 0]


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (Runtime((b"A", b"B")), r"cuda:0 is A with 141 GiB, cuda:1 is B with 141 GiB \(equal GPUs\)"),
        (Runtime(can_access=False), r"cuda:0 has no peer access to cuda:1 \(GPUs with NVLink between them\)"),
        (Runtime(error=Refused("unsupported")), r"cuda:0 has no peer access to cuda:1: unsupported"),
    ],
    ids=["different", "no access", "refused"],
)
def test_gpus_that_make_no_group(peers, runtime, message):
    with pytest.raises(ModelError, match=f"^--tensor-parallel-size: {message}$"):
        peers(runtime).connect([0, 1])


def test_too_few(peers):
    with pytest.raises(ModelError, match=r"^--tensor-parallel-size: 4 GPUs are needed, 2 are visible$"):
        peers(Runtime()).check_count(4)
