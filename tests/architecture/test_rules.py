"""File and folder sizes, unsafe calls, silent handlers, one page for Redis keys, and the files at the top level."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from service.queue import keys
from tests.support.source_tree import ROOT, Source, sources

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
LONG_FILE_LINES = 500
MAX_LONG_FILES = 5
MAX_FILES_IN_FOLDER = 20

TOP_LEVEL = {
    "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "pyproject.toml",
    "requirements.txt", "requirements-cuda.txt", "requirements-test.txt",
    "service", "model", "cuda", "tests", "deploy",
}  # fmt: skip

UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "os.system", "os.popen"}
UNSAFE_KEYWORDS = {"shell", "allow_pickle"}

KEY_PREFIX = "{quire}:"
KEY_PAGE = "service.queue.keys"
METRIC_PAGE = "service.observability.metrics"
DECODING_PAGE = "service.typed_decoding"
BUILDING = (".type_info", ".multi_type_info", ".schema", ".schema_components")
"""Functions of msgspec that build a type's table besides decoding."""


def large_files(modules: list[Source]) -> list[str]:
    """Files and functions over the hard limits; 500 and 40 lines are a lot."""
    found = []
    for module in modules:
        num_lines = len(module.text.splitlines())
        if num_lines > MAX_FILE_LINES:
            found.append(f"{module.name} has {num_lines} lines")
        for function in module.functions():
            num_lines = function.end_lineno - function.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{module.name}:{function.lineno} {function.name} has {num_lines} lines")
    return found


def unsafe_code(modules: list[Source]) -> list[str]:
    """Calls that could run bytes from outside: pickle and the like, eval, exec, a shell."""
    found = []
    for module in modules:
        for imported in module.imports():
            if imported.target.partition(".")[0] in UNSAFE_MODULES or imported.target == "os.system":
                found.append(f"{module.name}:{imported.line} imports {imported.target}")
        for call in _calls(module):
            name = ast.unparse(call.func)
            asked_for = {word.arg for word in call.keywords if ast.unparse(word.value) != "False"}
            if name in UNSAFE_CALLS or asked_for & UNSAFE_KEYWORDS:
                found.append(f"{module.name}:{call.lineno} calls {ast.unparse(call)[:60]}")
    return found


def silent_handlers(modules: list[Source]) -> list[str]:
    """Handlers that catch everything and do nothing."""
    found = []
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            catches_all = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            does_nothing = all(isinstance(line, ast.Pass | ast.Continue | ast.Expr) for line in node.body) and not any(
                isinstance(inner, ast.Call | ast.Await) for line in node.body for inner in ast.walk(line)
            )
            if node.type is None or (catches_all and does_nothing):
                found.append(f"{module.name}:{node.lineno} swallows every error")
    return found


def stray_keys(modules: list[Source]) -> list[str]:
    """Strings that begin like a Redis key, outside the pages of keys and metrics."""
    found = []
    for module in modules:
        if module.name in (KEY_PAGE, METRIC_PAGE):
            continue
        for node in module.nodes:
            if isinstance(node, ast.Constant) and _begins_like_a_key(node.value):
                found.append(f"{module.name}:{node.lineno} spells {node.value!r}")
    return found


def unprefixed_keys(modules: list[Source]) -> list[str]:
    """Functions of the key page that return a string without the prefix."""
    found = []
    for module in modules:
        if module.name != KEY_PAGE:
            continue
        for function in module.functions():
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            if not function.name.startswith("_") and not all(map(_is_prefixed, returned)):
                found.append(f"{module.name}:{function.lineno} {function.name}")
    return found


def unsafe_decoding(modules: list[Source]) -> list[str]:
    """Calls of msgspec that may build a type's table while another thread does."""
    found = []
    for module in modules:
        if module.name == DECODING_PAGE:
            continue
        for call in _calls(module):
            name = ast.unparse(call.func)
            is_typed = name.endswith(".decode") and any(word.arg == "type" for word in call.keywords)
            is_typed |= name.endswith(BUILDING)
            if name == "msgspec.convert" or (name.startswith(("msgspec.", "inspect.")) and is_typed):
                found.append(f"{module.name}:{call.lineno} calls {ast.unparse(call)[:60]}")
    return found


def texts_of_the_locale(modules: list[Source]) -> list[str]:
    """Text files opened without an encoding: they would be read in the locale's."""
    found = []
    for module in modules:
        for call in _calls(module):
            words = {word.arg: word.value for word in call.keywords}
            is_open = isinstance(call.func, ast.Name) and call.func.id == "open"
            is_text = isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text")
            mode = ast.unparse(words.get("mode", call.args[1] if len(call.args) > 1 else ast.Constant("r")))
            if (is_text or (is_open and "b" not in mode)) and "encoding" not in words:
                found.append(f"{module.name}:{call.lineno} calls {ast.unparse(call)[:60]}")
    return found


def _calls(module: Source) -> Iterator[ast.Call]:
    return (node for node in module.nodes if isinstance(node, ast.Call))


def _begins_like_a_key(value: object) -> bool:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return isinstance(text, str) and text.startswith(KEY_PREFIX)


def _is_prefixed(node: ast.expr | None) -> bool:
    first = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return isinstance(first, ast.Constant) and _begins_like_a_key(first.value)


RULES = {
    rule.__name__: rule
    for rule in (
        large_files, unsafe_code, silent_handlers, stray_keys, unprefixed_keys, unsafe_decoding, texts_of_the_locale,
    )
}  # fmt: skip
ALSO_TESTS = {"large_files"}


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule):
    folders = ("service", "model", "tests") if rule in ALSO_TESTS else ("service", "model")
    assert RULES[rule](sources(*folders)) == []


BROKEN = [
    ("large_files", "service.x", "\n" * 701),
    ("large_files", "service.x", "def f():\n" + "    a()\n" * 60),
    ("large_files", "service.x", "class C:\n    async def f(self):\n" + "        a()\n" * 60),
    ("unsafe_code", "service.x", "import pickle"),
    ("unsafe_code", "model.x", "from marshal import loads"),
    ("unsafe_code", "model.x", "x = eval(text)"),
    ("unsafe_code", "model.x", "exec(text)"),
    ("unsafe_code", "model.x", "np.load(path, allow_pickle=True)"),
    ("unsafe_code", "service.x", "subprocess.run(text, shell=True)"),
    ("unsafe_code", "service.x", "os.system(text)"),
    ("silent_handlers", "service.x", "try:\n    f()\nexcept:\n    g()"),
    ("silent_handlers", "service.x", "for x in y:\n    try:\n        f()\n    except Exception:\n        continue"),
    ("stray_keys", "service.gateway.x", "KEY = '{quire}:jobs'"),
    ("stray_keys", "service.gateway.x", "key = f'{{quire}}:feed:{door}'"),
    ("stray_keys", "service.gateway.x", "key = b'{quire}:jobs'"),
    ("unprefixed_keys", KEY_PAGE, "def events(job_id):\n    return f'events:{job_id}'"),
    ("unprefixed_keys", KEY_PAGE, "def events(job_id):\n    return job_id"),
    ("texts_of_the_locale", "service.x", "path.read_text()"),
    ("texts_of_the_locale", "service.x", "path.write_text(text)"),
    ("texts_of_the_locale", "service.x", "open(path, 'w')"),
    ("unsafe_decoding", "service.x", "msgspec.convert(fields, Body)"),
    ("unsafe_decoding", "service.x", "msgspec.json.decode(data, type=Body)"),
    ("unsafe_decoding", "service.x", "inspect.type_info(Body)"),
    ("unsafe_decoding", "service.x", "msgspec.inspect.multi_type_info([Body])"),
    ("unsafe_decoding", "service.x", "msgspec.json.schema(Body)"),
    ("unsafe_decoding", "service.x", "msgspec.json.schema_components([Body], ref_template='')"),
]


@pytest.mark.parametrize(("rule", "name", "text"), BROKEN)
def test_the_rule_can_fail(rule, name, text):
    assert RULES[rule]([Source.of(name, text)])


def test_constants_of_the_key_page_are_prefixed_or_not_keys():
    page = inspect.getsource(keys)
    kinds = r"(?:Stream|Sorted set|String|Set|Hash|List)\."
    named = re.findall(rf'^([A-Z_]+) = "([^"]*)"\n"""{kinds}', page, re.MULTILINE)
    assert named, "the page names its keys' types"
    assert [name for name, value in named if not value.startswith(KEY_PREFIX)] == []


def test_lua_scripts_get_their_keys_from_outside():
    spelled = [
        f"{path.name}:{number}"
        for path in sorted((ROOT / "service").rglob("*.lua"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KEY_PREFIX in line.partition("--")[0]
    ]
    assert spelled == []


def test_the_top_level_holds_the_agreed_files():
    assert unexpected_at_the_top(path.name for path in ROOT.iterdir()) == []
    assert unexpected_at_the_top(["utils", "notes.md", "quire.egg-info", ".ci"]) == ["notes.md", "utils"]


def unexpected_at_the_top(names: Iterator[str]) -> list[str]:
    """Names that are not agreed, hidden or ignored by git."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    return sorted(
        name
        for name in names
        if name not in TOP_LEVEL and name[0] != "." and not any(fnmatch(name, pattern) for pattern in ignored)
    )


def test_at_most_five_files_are_long():
    long = [module.name for module in sources("service", "model") if len(module.text.splitlines()) > LONG_FILE_LINES]
    assert len(long) <= MAX_LONG_FILES, long


def test_no_folder_is_crowded():
    folders = [ROOT / name for name in ("service", "model", "cuda", "deploy")]
    folders += [
        path for folder in folders for path in folder.rglob("*") if path.is_dir() and path.name != "__pycache__"
    ]
    counts = {
        folder.relative_to(ROOT).as_posix(): sum(
            path.is_file() and path.name != "__init__.py" for path in folder.iterdir()
        )
        for folder in folders
    }
    assert {name: count for name, count in counts.items() if count > MAX_FILES_IN_FOLDER} == {}


def test_all_packages_are_installed():
    """A package missing from pyproject.toml would work in a checkout only."""
    listed = set(_project()["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("service", "model")
        for path in Path(ROOT / folder).rglob("__init__.py")
    }
    assert listed == {*present, "quire"}
    assert _project()["tool"]["setuptools"]["package-dir"] == {"quire": "service/offline/public"}


def test_tests_run_with_warnings_as_errors_and_a_time_limit():
    options = _project()["tool"]["pytest"]["ini_options"]
    assert options["filterwarnings"][0] == "error"
    assert options["timeout"] <= 120
    assert {"--strict-markers", "--strict-config"} <= set(options["addopts"].split())


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
