"""The wheel: one import root, everything inside, and a service next to a foreign `service` and `model`."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

BACKEND = ROOT / "deploy" / "wheel"
BUILD = """
import sys
build, out = sys.argv[1:]
sys.path.insert(0, build)
import quire_build
quire_build.build_wheel(out)
quire_build.build_sdist(out)
"""
GENERATE = """
import sys
import quire
assert not any(name.startswith("quire.") for name in sys.modules)  # the command line starts without the API
from quire import LLM, SamplingParams
(found,) = LLM(max_model_len=64).generate("Once upon a time", SamplingParams(temperature=0), use_tqdm=False)
assert not {"redis", "aiohttp", "service", "model"} & set(sys.modules)
print(found.outputs[0].text)
"""
RUN = "import quire.service.gateway.process; from quire.service.cli.entry import run; raise SystemExit(run())"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    subprocess.run([*command, str(BACKEND), str(folder)], cwd=ROOT, check=True, capture_output=True, timeout=110)
    return folder


def test_the_wheel_has_one_import_root_and_every_file_that_a_service_reads(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"quire"}
    for folder, patterns in {
        "service": ("**/*.py", "**/*.lua", "gateway/ui/*.*", "gateway/ui/vendor/uPlot*"),
        "model": ("*.py", "text/**/*.py", "ops/**/*.json", "demo/*.json", "demo/**/*.safetensors", "demo/*.jinja"),
        "cuda": ("**/*.cu", "**/*.cuh"),
    }.items():
        for pattern in patterns:
            found = {f"quire/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).glob(pattern)}
            assert found
            assert found <= names
    assert not any("training" in name for name in names)
    assert {entry.date_time[:3] for entry in zipfile.ZipFile(wheel).infolist()} == {(1980, 1, 1)}


def test_the_sdist_has_what_the_wheel_is_built_from(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "PKG-INFO", "CHANGELOG.md", "deploy/wheel/quire_build.py"} <= names
    assert {"service/cli/entry.py", "model/config.py", "cuda/common/types.cuh", "model/demo/config.json"} <= names


def test_it_runs_with_foreign_packages_of_the_old_names(built, tmp_path):
    """`quire check` in a folder with another `service` and `model`, whose import is an error."""
    site, foreign = tmp_path / "site", tmp_path / "foreign"
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("service", "model"):
        (foreign / name).mkdir(parents=True)
        (foreign / name / "__init__.py").write_text("raise ImportError('the wrong one')")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(foreign), str(site)))}

    def python(script: str, *words: str) -> str:
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(command, cwd=foreign, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "llama, 0.00518 B parameters" in python(RUN, "check", "--device", "cpu")
    assert python(GENERATE).startswith(" there was")


def test_the_description_links_only_to_the_web_and_itself(monkeypatch):
    monkeypatch.syspath_prepend(str(BACKEND))
    import quire_build

    text = "[a](x/b.md#c) ![d](e.svg) [f](https://g) [h](#i)"
    assert quire_build.description(text) == "a  [f](https://g) [h](#i)"


def test_an_import_that_cannot_be_rewritten_stops_the_build(monkeypatch):
    monkeypatch.syspath_prepend(str(BACKEND))
    import quire_build

    text = "from service.errors import (\n    A,\n)\nfrom model import x\nimport json\n"
    expected = text.replace("from service", "from quire.service").replace("from model", "from quire.model")
    assert quire_build.rewritten(text, "x.py") == expected
    with pytest.raises(ValueError, match=r"x.py:1: only"):
        quire_build.rewritten("import service.errors", "x.py")
