"""Libraries that people speak to OpenAI with, against a service as a user runs it; each where it is installed."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.served import REPOSITORY, Served

MODULES = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),
    "langchain": ("langchain_openai",),
    "langchain_anthropic": ("langchain_anthropic",),
    "llama_index": ("llama_index", "llama_index.llms.openai_like"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = Served(tmp_path_factory.mktemp("data"), "--max-model-len=512", "--reasoning-parser=deepseek_r1")
    yield running
    running.terminate()


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("library", MODULES)
def test_it_chats_streams_and_calls(library, request):
    missing = [module for module in MODULES[library] if not is_installed(module)]
    if missing:
        pytest.skip(f"{library} is not installed: no {missing[0]}")
    url = request.getfixturevalue("served").url
    command = [sys.executable, "tests/support/smoke_clients.py", f"{url}/v1", "demo", library]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{library}: all well" in done.stdout
