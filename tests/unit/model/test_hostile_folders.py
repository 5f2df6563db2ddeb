"""Model folders made to hang a start or fill the memory: each is refused in one line, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig, generation_defaults
from model.errors import ModelError
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tokenizer_files import check_growth
from model.weights.checkpoint import Checkpoint
from tests.support.make_tokenizers import ALL_STYLES
from tests.support.served import REPOSITORY

DEMO = REPOSITORY / "model" / "demo"
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
AT_ONCE_S = 20.0
MEMORY_BYTES = 2 << 30


def read_all(folder: Path) -> None:
    config = ModelConfig.read(folder)
    generation_defaults(folder)
    ChatTemplate.read(folder, Tokenizer.read(folder))
    Checkpoint.open(folder, config)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's address is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


MADE: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": make_socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in DEMO.iterdir():
        if path.name in FILES:
            shutil.copy(path, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)  # or the older file would not be looked at
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def load_error_of(folder: Path) -> str:
    """Return the error of loading the folder, "" without one, in bounded time."""
    received: list[str] = []

    def read() -> None:
        try:
            read_all(folder)
        except ModelError as error:
            received.append(str(error))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(AT_ONCE_S)
    assert not reading.is_alive(), "it hangs"
    return received[0] if received else ""


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused(folder, name, kind):
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    MADE[kind](folder / name)
    assert load_error_of(folder) == f"{folder / name}: not a regular file"


def test_a_shard_that_is_a_pipe_is_refused(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert load_error_of(folder) == f"{folder / 'a.safetensors'}: not a regular file"


def test_links_to_files_are_followed(folder):
    """Folders of symbolic links, as in model caches."""
    for path in [*folder.iterdir()]:
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    assert load_error_of(folder) == ""


def sequence(kind: str, step: dict[str, Any], times: int) -> dict[str, Any]:
    return {"type": "Sequence", kind: [step] * times}


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
GROWING: dict[str, dict[str, Any]] = {
    "doubled": {"normalizer": sequence("normalizers", DOUBLED, 32)},
    "doubled in sequences": {"normalizer": sequence("normalizers", sequence("normalizers", DOUBLED, 6), 6)},
    "long": {"normalizer": {**DOUBLED, "content": "a" * 10**6}},
    "empty pattern": {"normalizer": sequence("normalizers", {**DOUBLED, "pattern": {"String": ""}}, 9)},
    "regular expression": {"normalizer": sequence("normalizers", {**DOUBLED, "pattern": {"Regex": "."}}, 9)},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**7}},
    "bytes of bytes": {"normalizer": sequence("normalizers", {"type": "ByteLevel"}, 30)},
    "pre-tokenized": {"pre_tokenizer": sequence("pretokenizers", BYTES, 30)},
    "decoded": {"decoder": sequence("decoders", DOUBLED, 32)},
    "framed": {
        "post_processor": sequence(
            "processors",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
                "special_tokens": {},
            },
            30,
        )
    },
    "many steps": {"normalizer": sequence("normalizers", {"type": "NFC"}, 10**5)},
    "deep": {"normalizer": [[]]},
    "unknown": {"normalizer": {"type": "Doubled"}},
    "added tokens": {
        "normalizer": sequence("normalizers", DOUBLED, 8),
        "added_tokens": [
            {
                "id": 10**5,
                "content": "a" * 10**6,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": True,
                "special": False,
            }
        ],
    },
}
RUN = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
from model.errors import ModelError
from model.text.tokenizer import Tokenizer
try:
    tokenizer = Tokenizer.read(Path(sys.argv[1]))
    print(len(tokenizer.encode("a" * 1000)))
    print(len(tokenizer.decode(tokenizer.encode("a"))))
except ModelError as error:
    print("refused", error)
"""


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_that_makes_texts_long_is_refused(folder, name):
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**file, **GROWING[name]}))
    command = [sys.executable, "-c", RUN, str(folder), str(MEMORY_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.stdout.startswith(f"refused {folder / 'tokenizer.json'}: "), done.stderr[-500:]
    assert done.stdout.count("\n") == 1
    assert len(done.stdout) < 600


@pytest.mark.parametrize("style", ALL_STYLES, ids=lambda style: style.__name__)
def test_real_tokenizers_are_far_from_the_bound(tmp_path, style):
    file = json.loads((style(tmp_path) / "tokenizer.json").read_text())
    assert 1 <= check_growth(file, "tokenizer.json") <= 24


def test_texts_are_bounded_by_what_the_tokenizer_makes_of_them(folder, monkeypatch):
    monkeypatch.setattr("model.text.tokenizer.MAX_NORMALIZED_BYTES", 1000)
    tokenizer = Tokenizer.read(folder)
    assert tokenizer.encode("a" * 30)
    with pytest.raises(ValueError, match="too long for the tokenizer"):
        tokenizer.encode("a" * 1001)


def broken_tokenizer(folder: Path) -> None:
    file = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**file, **GROWING["doubled"]}))


def pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def deep_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}")


@pytest.mark.parametrize("spoil", [broken_tokenizer, pipe, deep_template])
def test_serve_reports_it_in_one_line_and_ends(folder, tmp_path_factory, spoil):
    spoil(folder)
    data = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-m", "service.cli.entry", "serve", "--port=0", "--device=cpu", f"--data-dir={data}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    done = subprocess.run(
        [*command, f"--model={folder}"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environ,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if str(folder) in line]) >= 1
