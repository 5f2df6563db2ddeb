"""Other users of the host see neither a prompt on the disk nor a key in the process list."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.support.served import Served

KEY = "sk-secret-that-was-given-as-a-flag"
PROMPT = "a prompt that is a user's own business"
NOBODY = 65534
FIND = """
import os, sys
if os.getuid() == 0 and sys.argv[2] != "0":
    os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                print("holds it" if sys.argv[3].encode() in file.read() else "read", os.path.join(folder, name))
        except OSError as error:
            print(error)
"""
"""Prints what this user can read below a folder, and whether a text lies there."""


def readable(folder, user):
    command = [sys.executable, "-S", "-c", FIND, str(folder), str(user), PROMPT]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def data_dir():
    """A folder that others can enter, as are those above it: pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="quire-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "redis.log").write_text("of an earlier start")
        (folder / "redis.log").chmod(0o644)
        if os.geteuid() == 0:
            assert readable(folder, NOBODY) == [f"read {folder}/redis.log"]
        yield folder


@pytest.fixture(scope="module")
def served(data_dir):
    before = os.umask(0o022)
    try:
        running = Served(data_dir, f"--api-key={KEY}", "--log-level", "info")
    finally:
        os.umask(before)
    yield running
    running.terminate()


def test_prompts_lie_in_files_that_only_their_owner_reads(served, data_dir):
    body = json.dumps({"model": "demo", "input": PROMPT, "max_output_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(f"{served.url}/v1/responses", body, headers), timeout=30):
        pass
    assert any(line.startswith("holds it") for line in readable(data_dir, 0)), "the test must be able to find it"
    assert {path for path in data_dir.rglob("*") if path.lstat().st_mode & 0o077} == set()
    if os.geteuid() == 0:
        assert [line for line in readable(data_dir, NOBODY) if not line.startswith("[Errno 13]")] == []
    assert served.output.count("others could read files of --data-dir") == 1


def test_no_key_is_in_the_process_list(served):
    processes = {served.process.pid, *served.descendants()}
    assert len(processes) >= 4
    for pid in processes:
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes(), pid
    assert served.output.count("--api-key: other users of this host could read it in the process list") == 1
    assert KEY not in served.output


@pytest.mark.parametrize(
    ("arguments", "secret", "masked"),
    [
        (["gateway", "--api-key", KEY], KEY, True),
        (["gateway", f"--api-key={KEY},{KEY}2"], KEY, True),
        (["gateway", "--api-key", f"{KEY}1", f"{KEY}2"], KEY, True),
        (["worker", "--redis-url=redis://user:pass-word@127.0.0.1:1"], "pass-word", True),
        (["gateway", "--redis-url", "redis+sentinel://a/b?sentinel_password=pass-word"], "pass-word", True),
        (["dead", "list", "--redis-url=redis://:pass-word@127.0.0.1:1"], "pass-word", True),
        (["chat", "--api-key", KEY], KEY, True),
        (["worker", "--redis-url=redis://127.0.0.1:1"], "redis://127.0.0.1:1", False),
    ],
)
def test_every_verb_hides_what_is_secret_and_nothing_else(arguments, secret, masked):
    script = (
        "import sys; from service.cli import main, parser\n"
        "parsing = parser.parser_for(sys.argv[1:])\n"
        "parsed = parsing.parse_known_args(parser.translated(sys.argv[1:], parsing).argv)[0]\n"
        "print(len(main.hide_secrets(parsed)), open('/proc/self/cmdline').read())"
    )
    command = [sys.executable, "-c", script, *arguments]
    received = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert received.startswith("1 " if masked else "0 ")
    assert (secret not in received) == masked
    assert received.count("\0") == len(command), "as many arguments as before"
