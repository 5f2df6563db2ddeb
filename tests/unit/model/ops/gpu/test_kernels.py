"""The cache of compiled kernels. It needs the compiler, no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

kernels = pytest.importorskip(
    "model.ops.gpu.kernels", reason="no compiler: needs the packages of the compile extra", exc_type=ImportError
)

KERNEL = ("copy_blocks", "90a", {"QUIRE_DTYPE": 2})


@pytest.fixture
def compiled(monkeypatch) -> list:
    """Record what is compiled from here on."""
    calls = []
    compile_cubin = kernels.compile_cubin

    def counting(*kernel):
        calls.append(kernel)
        return compile_cubin(*kernel)

    monkeypatch.setattr(kernels, "compile_cubin", counting)
    return calls


def cached_cubin(name: str, arch: str, defines: dict[str, int], cache: Path) -> bytes:
    return kernels.cached_cubin(name, arch, defines, cache, kernels.headers_digest())


def test_threads_of_a_new_process_compile_at_once():
    """NVRTC's own loading at the first program is not made for that."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from model.ops.gpu.kernels import compile_cubin
with ThreadPoolExecutor(4) as threads:
    cubins = threads.map(lambda _: compile_cubin("copy_blocks", "90a", {"QUIRE_DTYPE": 2}), range(4))
    print([cubin[:4] for cubin in cubins])
"""
    received = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert received.strip() == str([b"\x7fELF"] * 4)


def test_a_kernel_is_compiled_once(tmp_path, compiled):
    first = cached_cubin(*KERNEL, tmp_path / "new" / "folder")
    assert first.startswith(b"\x7fELF")
    assert cached_cubin(*KERNEL, tmp_path / "new" / "folder") == first
    assert compiled == [KERNEL]
    assert [path.name.rpartition("-")[0] for path in (tmp_path / "new" / "folder").iterdir()] == ["copy_blocks-sm_90a"]


@pytest.mark.parametrize("damage", [b"", b"\x7fELF not ours", "torn", "flipped"])
def test_a_file_that_is_not_whole_is_made_anew(tmp_path, compiled, caplog, damage):
    good = cached_cubin(*KERNEL, tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes({"torn": content[:-9], "flipped": content[:-1] + bytes([content[-1] ^ 1])}.get(damage, damage))
    assert cached_cubin(*KERNEL, tmp_path) == good
    assert path.read_bytes() == content
    assert len(compiled) == 2
    assert "compiling it anew" in caplog.text


def test_a_cache_that_cannot_be_used_only_costs_time(tmp_path, compiled, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    assert cached_cubin(*KERNEL, in_the_way).startswith(b"\x7fELF")
    assert len(compiled) == 1
    assert "cannot read" in caplog.text
    assert "cannot keep" in caplog.text


@pytest.mark.parametrize("changed", ["memory/copy_blocks.cu", "common/types.cuh", "attention/kv_split.cuh"])
def test_a_changed_source_or_header_is_another_kernel(tmp_path, monkeypatch, compiled, changed):
    sources = shutil.copytree(kernels.source_folder(), tmp_path / "cuda")
    monkeypatch.setattr(kernels, "source_folder", lambda: sources)
    cached_cubin(*KERNEL, tmp_path / "cache")
    with (sources / changed).open("a") as file:
        file.write("// changed\n")
    cached_cubin(*KERNEL, tmp_path / "cache")
    assert len(compiled) == 2


def test_types_architectures_and_defines_are_kept_apart(tmp_path, compiled):
    name, arch, defines = KERNEL
    for kernel in ((name, arch, defines), (name, "80", defines), (name, arch, {"QUIRE_DTYPE": 0})):
        cached_cubin(*kernel, tmp_path)
    assert len(compiled) == len(list(tmp_path.iterdir())) == 3


def test_an_unknown_kernel_is_named(tmp_path):
    with pytest.raises(kernels.KernelError, match=r"there is no kernel .*no_such\.cu"):
        cached_cubin("no_such", "90a", {}, tmp_path)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("QUIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.cache_folder() == tmp_path / "quire" / "kernels"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "own"))
    assert kernels.cache_folder() == tmp_path / "own" / "kernels"


def test_hopper_gets_its_own_instructions():
    assert [kernels.arch_of(capability) for capability in ("80", "90", "120")] == ["80", "90a", "120"]


class LaunchedModules:
    """Modules whose kernels write down their launches."""

    def __init__(self, monkeypatch):
        self.loaded, self.launched = [], []
        monkeypatch.setattr(kernels, "Module", lambda: self)

    def load(self, cubin: bytes):
        self.loaded.append(cubin)

    def get_function(self, name: str):
        return lambda *launch: self.launched.append(name)


def test_what_the_cache_lacks_is_compiled_ahead_and_nothing_is_launched_meanwhile(tmp_path, monkeypatch, compiled):
    modules = LaunchedModules(monkeypatch)

    def work():
        for name in ("copy_blocks", "rms_norm", "copy_blocks"):
            store.get(name, QUIRE_DTYPE=2)((1,), (32,), (), 0, None)

    store = kernels.Kernels("90a", tmp_path)
    store.compile_ahead(work)
    assert modules.launched == []
    work()
    assert modules.launched == ["copy_blocks", "rms_norm", "copy_blocks"]
    assert len(compiled) == len(modules.loaded) == len(list(tmp_path.iterdir())) == 2

    next(path for path in tmp_path.iterdir() if path.name.startswith("rms_norm")).unlink()
    store = kernels.Kernels("90a", tmp_path)
    store.compile_ahead(work)
    store.compile_ahead(work)
    work()
    assert [kernel[0] for kernel in compiled[2:]] == ["rms_norm"]


def test_the_cache_is_searched_once_for_a_kernel(tmp_path, monkeypatch):
    cached_cubin(*KERNEL, tmp_path)
    searched, cubin_path = [], kernels._cubin_path
    monkeypatch.setattr(kernels, "_cubin_path", lambda *build: (searched.append(build[0]), cubin_path(*build))[1])
    store = kernels.Kernels("90a", tmp_path)
    store.compile_ahead(lambda: [store.get("copy_blocks", QUIRE_DTYPE=2) for _ in range(3)])
    assert searched == ["copy_blocks"]


def test_a_group_compiles_a_kernel_once(tmp_path, monkeypatch, compiled):
    modules = LaunchedModules(monkeypatch)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no cache")
    ranks = [kernels.Kernels("90a", in_the_way) for _ in range(2)]

    def work():
        for rank in ranks:
            rank.get("copy_blocks", QUIRE_DTYPE=2)((1,), (32,), (), 0, None)

    ranks[0].compile_ahead(work, ranks[1:])
    work()
    assert len(compiled) == 1
    assert modules.launched == ["copy_blocks"] * 2


def test_a_kernel_that_does_not_compile_is_reported_where_it_is_launched(tmp_path):
    store = kernels.Kernels("90a", tmp_path)
    store.compile_ahead(lambda: store.get("rms_norm", QUIRE_DTYPE=7)((1,), (32,), (), 0, None))
    with pytest.raises(kernels.KernelError, match="QUIRE_DTYPE is 0, 1 or 2"):
        store.get("rms_norm", QUIRE_DTYPE=7)
