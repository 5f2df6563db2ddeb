"""Compiles the kernels of `cuda/` with NVRTC, caches them per architecture and digest of all inputs, and loads them.

CuPy's compiler targets plain sm_90, needs a device and ignores included headers in its cache key.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from cuda.pathfinder import find_nvidia_header_directory
from cupy.cuda.function import Function, Module
from cupy_backends.cuda.api import driver
from cupy_backends.cuda.libs import nvrtc

_MAGIC = b"quire cubin 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size

_Key = tuple[Any, ...]

_log = logging.getLogger(__name__)
_loading = Lock()


class KernelError(Exception):
    """Missing or uncompilable kernel; the message has the compiler's log."""


class Kernels:
    """Kernels of one device; each build is compiled once per source."""

    def __init__(self, arch: str, cache: Path | None = None):
        self.arch = arch
        self._cache = cache if cache is not None else cache_folder()
        self._modules: dict[_Key, Module] = {}
        self._functions: dict[_Key, Function] = {}
        self._compilers: ThreadPoolExecutor | None = None
        self._compiling: dict[_Key, Future[bytes] | None] = {}  # None: in the cache

    def get(self, name: str, *, shared_bytes: int = 0, shared_percent: int = 0, **defines: int) -> Function:
        """Return the function `name` of cuda/<folder>/<name>.cu, built with -D<define>=<value>.

        Call it as `function(grid, block, args, shared_mem, stream)`, shared_mem <= `shared_bytes`. `shared_percent` is
        the share of an SM's memory used as shared memory while this build runs; 0: as little as its blocks need.
        """
        if self._compilers is not None:
            self._compile_in(self._compilers, name, defines)
            return _launch_nothing
        key = (name, shared_bytes, shared_percent, *defines.items())
        function = self._functions.get(key)
        if function is None:
            function = self._module(name, defines).get_function(name)
            limit = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            # the limit is 48 KiB, or what an earlier `get` set
            if shared_bytes and shared_bytes > driver.funcGetAttribute(limit, function.ptr):
                driver.funcSetAttribute(function.ptr, limit, shared_bytes)
            if shared_percent:
                carveout = driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                driver.funcSetAttribute(function.ptr, carveout, shared_percent)
            self._functions[key] = function
        return function

    @functools.cached_property
    def _headers(self) -> str:
        return headers_digest()

    @property
    def are_compiled_ahead(self) -> bool:
        """True while the work of `compile_ahead` runs, which launches nothing."""
        return self._compilers is not None

    def compile_ahead(self, work: Callable[[], None], others: Sequence[Kernels] = ()) -> None:
        """Run `work` without launching its kernels and start compiling the missing ones, one thread per core.

        `get` waits for a kernel that is being compiled. The `others` of a group launch nothing either and use the same
        cubins. The control flow of `work` must not depend on results.
        """
        together = (self, *others)
        compilers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        for kernels in together:
            kernels._compilers, kernels._compiling = compilers, self._compiling
        try:
            work()
        finally:
            for kernels in together:
                kernels._compilers = None
            compilers.shutdown(wait=False)

    def _compile_in(self, compilers: ThreadPoolExecutor, name: str, defines: Mapping[str, int]) -> None:
        key = (name, *sorted(defines.items()))
        if key in self._modules or key in self._compiling:
            return
        build = name, self.arch, defines, self._cache, self._headers
        is_cached = os.path.exists(_cubin_path(*build))
        self._compiling[key] = None if is_cached else compilers.submit(cached_cubin, *build)

    def _module(self, name: str, defines: Mapping[str, int]) -> Module:
        key = (name, *sorted(defines.items()))
        module = self._modules.get(key)
        if module is None:
            compiling = self._compiling.get(key)
            build = name, self.arch, defines, self._cache, self._headers
            module = self._modules[key] = _loaded(cached_cubin(*build) if compiling is None else compiling.result())
        return module


def _loaded(cubin: bytes) -> Module:
    module = Module()
    module.load(cubin)
    return module


def _launch_nothing(
    grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_bytes: int, stream: Any
) -> None:
    """Stand in for a kernel that is compiled ahead."""


def is_there(kernel: Callable[..., None]) -> bool:
    return kernel is not _launch_nothing


def arch_of(compute_capability: str) -> str:
    """Map CuPy's "90" to "90a", which has wgmma and setmaxnreg."""
    return "90a" if compute_capability == "90" else compute_capability


def source_folder() -> Path:
    """Return `cuda/` of a checkout or an installed package. Raises KernelError."""
    folder = Path(__file__).resolve().parents[3] / "cuda"
    if (folder / "common" / "types.cuh").is_file():
        return folder
    raise KernelError(f"the CUDA sources are not in {folder}")


def source_path(name: str) -> Path:
    """Return cuda/*/<name>.cu; names are unique. Raises KernelError."""
    for path in source_folder().glob(f"*/{name}.cu"):
        return path
    raise KernelError(f"there is no kernel {source_folder()}/*/{name}.cu")


def cache_folder() -> Path:
    """Return the folder `kernels` of $QUIRE_CACHE_DIR, else $XDG_CACHE_HOME/quire, else ~/.cache/quire."""
    own = os.environ.get("QUIRE_CACHE_DIR")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
    return root / "kernels"


def cached_cubin(name: str, arch: str, defines: Mapping[str, int], cache: Path, headers: str) -> bytes:
    """Return the result of `compile_cubin` through `cache`; replace a damaged file. `headers` is `headers_digest`."""
    path = _cubin_path(name, arch, defines, cache, headers)
    cubin = _read(path)
    if cubin is None:
        cubin = compile_cubin(name, arch, defines)
        _write(path, cubin)
    return cubin


def headers_digest() -> str:
    """Return a digest of all headers of `cuda/`, since a kernel may include any of them."""
    folder = source_folder()
    headers = sorted(folder.rglob("*.cuh"))
    parts = [header.relative_to(folder).as_posix() + header.read_text(encoding="utf-8") for header in headers]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cubin_path(name: str, arch: str, defines: Mapping[str, int], cache: Path, headers: str) -> Path:
    parts = [source_path(name).read_text(encoding="utf-8"), repr(_options(arch, defines)), repr(nvrtc.getVersion())]
    fingerprint = hashlib.sha256("\0".join([*parts, headers]).encode()).hexdigest()[:20]
    return cache / f"{name}-sm_{arch}-{fingerprint}.cubin"


def compile_cubin(name: str, arch: str, defines: Mapping[str, int], *more_options: str) -> bytes:
    """Compile cuda/<folder>/<name>.cu for sm_<arch>, without a GPU. Raises KernelError."""
    folder = source_folder()
    source = source_path(name)
    headers = find_nvidia_header_directory("cudart")
    if headers is None:
        raise KernelError("cuda_fp16.h was not found: install the 'cuda' extra (cuda-toolkit[cudart])")
    with _loading:
        _load_compiler()
    options = (*_options(arch, defines), f"-I{folder}", f"-I{headers}", *more_options)
    program = nvrtc.createProgram(source.read_text(encoding="utf-8"), str(source), (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise KernelError(f"{name} for sm_{arch}, {dict(defines)}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _load_compiler() -> None:
    """Load NVRTC's builtins, because concurrent first programs race to load them."""
    program = nvrtc.createProgram("", "nothing.cu", (), ())
    nvrtc.compileProgram(program, ())
    nvrtc.destroyProgram(program)


def _options(arch: str, defines: Mapping[str, int]) -> tuple[str, ...]:
    defined = (f"-D{key}={defines[key]}" for key in sorted(defines))
    # --minimal omits NVRTC's declarations of textures and runtime functions
    return ("--std=c++17", "-default-device", "-lineinfo", "--minimal", f"-arch=sm_{arch}", *defined)


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read the kernel cache %s: %s", path, error)
        return None
    digest, cubin = content[len(_MAGIC) :][:_DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
    if not content.startswith(_MAGIC) or hashlib.sha256(cubin).digest() != digest:
        _log.warning("%s is not a whole kernel of ours: compiling it anew", path)
        return None
    return cubin


def _write(path: Path, cubin: bytes) -> None:
    """Replace the file atomically; only warn on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("cannot keep a compiled kernel in %s: %s", path, error)
