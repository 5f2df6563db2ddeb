"""Imports only go downstairs, in no circle, at the top of a module, and none brings CuPy where it does not belong."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.source_tree import ROOT, Source, is_within, module_graph, sources

FLOORS = (
    ("service.cli",),
    ("service.gateway", "service.worker"),
    ("service.engine", "service.wire"),
    ("service.config_sources",),
    ("service.config", "service.logs", "service.metrics", "service.sd_notify", "service.tracing"),
    ("service.errors", "service.fair_share", "service.garbage", "service.otel", "service.setting_values"),
    ("model",),
)
"""From the roof down. A room imports itself and what is below its floor, never its neighbours."""

GATEWAY = "service.gateway"
GATEWAY_FLOORS = tuple(
    tuple(f"{GATEWAY}.{room}" for room in rooms)
    for rooms in (
        ("process",),
        ("http_door", "queue_door"),
        ("openapi",),
        ("batches",),
        ("endpoints",),
        ("http_server",),
        ("hall",),
        ("grammars",),
        ("openai",),
        ("generation",),
    )
)
"""The same inside the gateway."""

TEXT_HALF = (
    "tokenizer", "tokenizer_files", "tokenizer_growth", "vocabulary", "decoding", "detokenizer",
    "chat_template", "template_sandbox", "template_bounds", "template_meter", "disguise", "grammar", "grammar_compiler",
    "grammar_matcher", "grammar_task", "tool_calls", "tool_call_stream", "tool_call_json", "tool_call_python",
    "tool_call_reader", "tool_call_xml", "functions", "json_schema", "schema_bounds",
)  # fmt: skip
ARRAY_HALF = (
    "loader", "weights", "safetensors_file", "llama", "step_graphs", "rope", "kv_cache", "batch", "sampler", "ops",
)  # fmt: skip
COMMON = (
    "config", "config_fields", "rope_config", "sampling_params", "dtypes", "json_files", "errors",
    "ops.host_blocks", "ops.interface", "ops.packing",
)  # fmt: skip
WORKSHOP = "demo"
"""Makes the demo model. It may use all of `model`, and nothing of the service or the model uses it."""

GATES = {"model.ops.backend": "model.ops.cuda_ops", "service.tracing": "service.otel"}
"""The imports inside functions, by these modules, of those: of what many machines do without."""
GPU_PACKAGES = ("cupy", "cupyx", "cupy_backends", "cuda", "nvmath", "nvidia")
GPU_ROOM = "model.ops"
NEVER_GPU = tuple(
    f"{GPU_ROOM}.{name}"
    for name in ("interface", "host_blocks", "numpy_ops", "numpy_sampling", "numpy_host_blocks", "philox", "backend")
)


def upstairs_imports(modules: list[Source]) -> list[str]:
    """Imports that leave their floor upward or sideways, and modules that stand on no floor."""
    rooms_of_the_gateway = [module for module in modules if module.name.startswith(GATEWAY + ".")]
    found = _climbing(modules, FLOORS) + _climbing(rooms_of_the_gateway, GATEWAY_FLOORS)
    for module in modules:
        if is_within(module.name, "model"):
            upward = (imported for imported in module.imports() if is_within(imported.target, "service"))
            found += [f"{module.name}:{imported.line} imports {imported.target}" for imported in upward]
    return sorted(set(found))


def _climbing(modules: list[Source], floors: tuple[tuple[str, ...], ...]) -> list[str]:
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    found = []
    for module in modules:
        room = _room(module.name, floor_of)
        if room is None:
            found += [] if module.name == "service" else [f"{module.name} stands on no floor"]
            continue
        for imported in module.imports():
            other = _room(imported.target, floor_of)
            if other not in (None, room) and floor_of[other] <= floor_of[room]:
                found.append(f"{module.name}:{imported.line} imports {imported.target}")
    return found


def mixed_halves(modules: list[Source]) -> list[str]:
    """Imports between the text half and the array half of `model`, and modules that belong to neither."""
    half_of = {f"model.{name}": "common" for name in COMMON}
    half_of |= {f"model.{name}": "text" for name in TEXT_HALF} | {f"model.{name}": "array" for name in ARRAY_HALF}
    half_of[f"model.{WORKSHOP}"] = "workshop"
    allowed = {
        "common": {"common"},
        "text": {"text", "common"},
        "array": {"array", "common"},
        "workshop": {"workshop", "text", "array", "common"},
    }
    found = []
    for module in modules:
        room = _room(module.name, half_of)
        if room is None:
            found += [] if module.name == "model" else [f"{module.name} belongs to no half of the model"]
            continue
        for imported in module.imports():
            other = _room(imported.target, half_of)
            if other is not None and half_of[other] not in allowed[half_of[room]]:
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
            is_gate = module.name in GATES and is_within(imported.target, GATES[module.name])
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
    return sorted(name for name in tainted if not is_within(name, GPU_ROOM) or name in NEVER_GPU)


def _room(name: str, rooms: dict) -> str | None:
    return max((room for room in rooms if is_within(name, room)), key=len, default=None)


RULES = {rule.__name__: rule for rule in (upstairs_imports, mixed_halves, cycles, hidden_imports, gpu_imports)}
ROOMS = {"mixed_halves": ("model",)}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(rule):
    assert RULES[rule](sources(*ROOMS.get(rule, ("service", "model")))) == []


BROKEN = [
    ("upstairs_imports", {"service.wire.x": "from service.gateway.hall import relay"}),
    ("upstairs_imports", {"service.wire.x": "from service.engine.step import StepPlan"}),
    ("upstairs_imports", {"service.worker.x": "import service.gateway.http_server.sse"}),
    ("upstairs_imports", {"service.gateway.hall.x": "from ...worker import courier"}),
    ("upstairs_imports", {"service.gateway.hall.x": "from service.gateway.endpoints import responses"}),
    ("upstairs_imports", {"service.gateway.queue_door.x": "from service.gateway.http_door import probes"}),
    ("upstairs_imports", {"service.gateway.attic": ""}),
    ("upstairs_imports", {"service.errors": "from service.logs import fields"}),
    ("upstairs_imports", {"service.logs": "from service import config"}),
    ("upstairs_imports", {"model.x": "from service.errors import EndReason"}),
    ("upstairs_imports", {"model.x": "import service"}),
    ("upstairs_imports", {"service.attic": ""}),
    ("mixed_halves", {"model.tokenizer": "from model.weights import open_weights"}),
    ("mixed_halves", {"model.llama": "from model import tokenizer"}),
    ("mixed_halves", {"model.config": "from model.ops.numpy_ops import NumpyOps"}),
    ("mixed_halves", {"model.loader": "from model.demo import story_maker"}),
    ("mixed_halves", {"model.attic": ""}),
    ("cycles", {"model.a": "from model import b", "model.b": "from model.c import X", "model.c": "import model.a"}),
    ("hidden_imports", {"service.x": "def f():\n    import json"}),
    ("hidden_imports", {"model.ops.backend": "def f():\n    from model.ops import gemm"}),
    ("hidden_imports", {"service.x": "from typing import TYPE_CHECKING"}),
    ("hidden_imports", {"service.x": "import typing\nif typing.TYPE_CHECKING:\n    import json"}),
    ("hidden_imports", {"service.x": "import importlib\nimportlib.import_module('json')"}),
    ("gpu_imports", {"service.x": "import cupy as cp"}),
    ("gpu_imports", {"model.ops.numpy_ops": "from cuda.bindings import driver"}),
    ("gpu_imports", {"model.ops.gemm": "import cupy", "model.llama": "from model.ops import gemm"}),
]


@pytest.mark.parametrize(("rule", "files"), BROKEN)
def test_the_rule_can_fail(rule, files):
    assert RULES[rule]([Source.of(name, text) for name, text in files.items()])


def test_the_gate_is_no_way_in():
    gate = Source.of("model.ops.backend", "def f():\n    from model.ops.cuda_ops import CudaOps")
    backend = Source.of("model.ops.cuda_ops", "import cupy")
    assert hidden_imports([gate, backend]) == gpu_imports([gate, backend]) == []


@pytest.mark.parametrize("module", ["service.gateway.process", "service.cli.main"])
def test_nothing_loads_cupy_before_it_is_asked_to(module):
    program = f"import sys, {module}; sys.exit(any(name.split('.')[0] in {GPU_PACKAGES} for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
