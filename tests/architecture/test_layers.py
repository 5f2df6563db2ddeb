"""Imports go down the layers, without cycles, at the top of a module, and CuPy stays in `model/ops/gpu`."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.source_tree import ROOT, Source, is_within, module_graph, sources

LAYERS = (
    ("service.cli", "service.bench", "service.offline"),
    ("service.gateway", "service.worker"),
    ("service.engine", "service.queue"),
    ("service.config",),
    ("service.observability",),
    (
        "service.errors",
        "service.fair_share",
        "service.cuda_contexts",
        "service.garbage",
        "service.import_root",
        "service.shutdown",
        "service.typed_decoding",
    ),
    ("model",),
)
"""Layers from the top down. A package imports itself and the layers below, never its neighbours."""
SAME_LAYER = ({"service.cli", "service.bench"}, {"service.cli", "service.offline"})
"""Neighbours that may import each other."""

GATEWAY = "service.gateway"
GATEWAY_LAYERS = tuple(
    tuple(f"{GATEWAY}.{package}" for package in packages)
    for packages in (
        ("process",),
        ("app", "ingress"),
        ("openapi",),
        ("batches",),
        ("routes",),
        ("http",),
        ("endpoints",),
        ("anthropic",),
        ("openai",),
        ("core",),
        ("grammars",),
    )
)
"""The same inside the gateway."""

CORE = f"{GATEWAY}.core"
NO_API = ("aiohttp", "msgspec", f"{GATEWAY}.openai")
"""The gateway's core knows no API: it takes and gives dataclasses, without HTTP or JSON."""

TEXT = ("text",)
ARRAYS = (
    "weights",
    "families",
    "ops",
    "cuda_graphs",
    "draft_graphs",
    "rope",
    "kv_cache",
    "kv_scales",
    "adapter_slots",
    "batch",
    "sampler",
    "step_inputs",
)
COMMON = (
    "config", "config_fields", "gguf_config", "gguf_file",
    "presets", "rope_config", "stored_names", "families.configs", "sampling_params", "dtypes", "json_files", "errors",
    "hub",
    "ops.adapter_interface", "ops.host_blocks", "ops.interface", "ops.packing", "ops.weight",
)  # fmt: skip
TRAINING = "demo"
"""Makes the demo model. It may use all of `model`, and nothing of the service or the model uses it."""

GATES = {
    "model.ops.backend": ("model.ops.gpu.ops", "model.ops.gpu.group.open"),
    "model.ops.gpu.group.open": ("model.ops.gpu.group.nccl",),
    "model.hub.locate": ("model.hub.download",),
    "service.observability.tracing": ("service.observability.otel",),
    "service.cli.verbs": ("service",),
    "service.cli.processes.workers": ("service.cli.processes.hand_over",),
    "service.gateway.core.adapter_files": ("model.weights.lora.adapter",),
    "service.cli.models": ("model.weights.lora.adapter",),
    "service.offline.public": ("service.offline.api",),
}
"""The only imports inside functions: optional or slow dependencies and the command line's verbs, loaded on demand."""
GPU_PACKAGES = ("cupy", "cupyx", "cupy_backends", "cuda", "nvmath", "nvidia")
GPU_FOLDER = "model.ops.gpu"
EVERY_VERB = "from service.cli.parser import make_parser; make_parser()"
RANK = "service.engine.execution.model_runner"


def upward_imports(modules: list[Source]) -> list[str]:
    """Imports that go up or sideways, and modules in no layer."""
    in_gateway = [module for module in modules if module.name.startswith(GATEWAY + ".")]
    found = _climbing(modules, LAYERS) + _climbing(in_gateway, GATEWAY_LAYERS)
    for module in modules:
        if is_within(module.name, "model"):
            upward = (imported for imported in module.imports() if is_within(imported.target, "service"))
            found += [f"{module.name}:{imported.line} imports {imported.target}" for imported in upward]
    return sorted(set(found))


def _climbing(modules: list[Source], layers: tuple[tuple[str, ...], ...]) -> list[str]:
    layer_of = {package: number for number, packages in enumerate(layers) for package in packages}
    found = []
    for module in modules:
        package = _package(module.name, layer_of)
        if package is None:
            found += [] if module.name == "service" else [f"{module.name} is in no layer"]
            continue
        for imported in module.imports():
            other = _package(imported.target, layer_of)
            if other in (None, package) or {package, other} in SAME_LAYER:
                continue
            if layer_of[other] <= layer_of[package]:
                found.append(f"{module.name}:{imported.line} imports {imported.target}")
    return found


def mixed_text_and_arrays(modules: list[Source]) -> list[str]:
    """Imports between `model.text` and the arrays, and modules of `model` that belong to neither."""
    part_of = {f"model.{name}": "common" for name in COMMON}
    part_of |= {f"model.{name}": "text" for name in TEXT} | {f"model.{name}": "array" for name in ARRAYS}
    part_of[f"model.{TRAINING}"] = "training"
    allowed = {
        "common": {"common"},
        "text": {"text", "common"},
        "array": {"array", "common"},
        "training": {"training", "text", "array", "common"},
    }
    found = []
    for module in modules:
        package = _package(module.name, part_of)
        if package is None:
            found += [] if module.name == "model" else [f"{module.name} is neither text, arrays, common nor training"]
            continue
        for imported in module.imports():
            other = _package(imported.target, part_of)
            if other is not None and part_of[other] not in allowed[part_of[package]]:
                found.append(f"{module.name}:{imported.line} imports {imported.target}")
    return found


def cycles(modules: list[Source]) -> list[str]:
    """The first circle of imports, as one line."""
    try:
        TopologicalSorter(module_graph(modules)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def hidden_imports(modules: list[Source]) -> list[str]:
    """Imports inside functions but for the gates, `TYPE_CHECKING`, and imports by name at run time."""
    found = []
    for module in modules:
        for imported in module.imports():
            is_gate = any(is_within(imported.target, gate) for gate in GATES.get(module.name, ()))
            if imported.inside_function and not is_gate:
                found.append(f"{module.name}:{imported.line} imports {imported.target} inside a function")
            if imported.target in ("typing.TYPE_CHECKING", "importlib.import_module"):
                found.append(f"{module.name}:{imported.line} imports {imported.target}")
        for word in ("TYPE_CHECKING", "import_module(", "__import__("):
            if word in module.text:
                found.append(f"{module.name} says {word}")
    return found


def gpu_imports(modules: list[Source]) -> list[str]:
    """Modules that bring in the GPU packages, themselves or through others, and should not."""
    graph = module_graph(modules, deferred=False)
    tainted = {
        module.name
        for module in modules
        for imported in module.imports()
        if any(is_within(imported.target, package) for package in GPU_PACKAGES)
    }
    while more := {name for name, targets in graph.items() if targets & tainted} - tainted:
        tainted |= more
    return sorted(name for name in tainted if not is_within(name, GPU_FOLDER))


def plans_in_ranks(modules: list[Source]) -> list[str]:
    """Imports of the service by the module that runs a rank: StepInputs is all that reaches it."""
    return [
        f"{module.name}:{imported.line} imports {imported.target}"
        for module in modules
        if module.name == RANK
        for imported in module.imports()
        if is_within(imported.target, "service")
    ]


def apis_in_core(modules: list[Source]) -> list[str]:
    """Imports of HTTP, JSON or an API in the gateway's core."""
    return [
        f"{module.name}:{imported.line} imports {imported.target}"
        for module in modules
        if is_within(module.name, CORE)
        for imported in module.imports()
        if any(is_within(imported.target, package) for package in NO_API)
    ]


def _package(name: str, packages: dict) -> str | None:
    return max((package for package in packages if is_within(name, package)), key=len, default=None)


RULES = {
    rule.__name__: rule
    for rule in (
        *(upward_imports, mixed_text_and_arrays, cycles, hidden_imports),
        *(gpu_imports, plans_in_ranks, apis_in_core),
    )
}
FOLDERS = {"mixed_text_and_arrays": ("model",)}


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule):
    assert RULES[rule](sources(*FOLDERS.get(rule, ("service", "model")))) == []


BROKEN = [
    ("upward_imports", {"service.queue.x": "from service.gateway.core import dispatcher"}),
    ("upward_imports", {"service.queue.x": "from service.engine.step import StepPlan"}),
    ("upward_imports", {"service.worker.x": "import service.gateway.http.sse"}),
    ("upward_imports", {"service.gateway.core.x": "from ...worker import job_loop"}),
    ("upward_imports", {"service.gateway.core.x": "from service.gateway.routes import responses"}),
    ("upward_imports", {"service.gateway.ingress.x": "from service.gateway import app"}),
    ("upward_imports", {"service.gateway.attic": ""}),
    ("upward_imports", {"service.errors": "from service.observability.logs import fields"}),
    ("upward_imports", {"service.observability.logs": "from service import config"}),
    ("upward_imports", {"model.x": "from service.errors import EndReason"}),
    ("upward_imports", {"model.x": "import service"}),
    ("upward_imports", {"service.attic": ""}),
    ("mixed_text_and_arrays", {"model.text.tokenizer": "from model.weights.checkpoint import open_weights"}),
    ("mixed_text_and_arrays", {"model.families.llama": "from model.text import tokenizer"}),
    ("mixed_text_and_arrays", {"model.config": "from model.ops.cpu.ops import NumpyOps"}),
    ("mixed_text_and_arrays", {"model.weights.loader": "from model.demo.training import story_maker"}),
    ("mixed_text_and_arrays", {"model.attic": ""}),
    ("cycles", {"model.a": "from model import b", "model.b": "from model.c import X", "model.c": "import model.a"}),
    ("hidden_imports", {"service.x": "def f():\n    import json"}),
    ("hidden_imports", {"model.ops.backend": "def f():\n    from model.ops.gpu import gemm"}),
    ("hidden_imports", {"service.x": "from typing import TYPE_CHECKING"}),
    ("hidden_imports", {"service.x": "import typing\nif typing.TYPE_CHECKING:\n    import json"}),
    ("hidden_imports", {"service.x": "import importlib\nimportlib.import_module('json')"}),
    ("plans_in_ranks", {RANK: "from service.engine.step import StepPlan"}),
    ("gpu_imports", {"service.x": "import cupy as cp"}),
    ("apis_in_core", {"service.gateway.core.x": "from aiohttp import web"}),
    ("apis_in_core", {"service.gateway.core.x": "import msgspec"}),
    ("apis_in_core", {"service.gateway.core.x": "from service.gateway import openai"}),
    ("gpu_imports", {"model.ops.cpu.ops": "from cuda.bindings import driver"}),
    ("gpu_imports", {"model.ops.gpu.gemm": "import cupy", "model.families.llama": "from model.ops.gpu import gemm"}),
]


@pytest.mark.parametrize(("rule", "files"), BROKEN)
def test_the_rule_can_fail(rule, files):
    assert RULES[rule]([Source.of(name, text) for name, text in files.items()])


def test_a_gate_opens_for_its_own_module_only():
    gate = Source.of("model.ops.backend", "def f():\n    from model.ops.gpu.ops import CudaOps")
    backend = Source.of("model.ops.gpu.ops", "import cupy")
    assert hidden_imports([gate, backend]) == gpu_imports([gate, backend]) == []


@pytest.mark.parametrize(
    ("program", "slow"),
    [
        ("import service.cli.serve, service.cli.main", (*GPU_PACKAGES, "numpy", "redis")),
        ("import service.cli.gateway, service.cli.main", (*GPU_PACKAGES, "numpy")),
        (EVERY_VERB, GPU_PACKAGES),
    ],
)
def test_a_process_does_not_load_what_it_may_never_use(program, slow):
    program += f"; import sys; print(*{{name.split('.')[0] for name in sys.modules}} & {{*{slow}}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
