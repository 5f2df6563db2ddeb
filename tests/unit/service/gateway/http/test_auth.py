"""The key file: valid lines, refusals, and reloading."""

from __future__ import annotations

import os

import pytest

from service.cli.main import main
from service.errors import RequestError, StartupError
from service.gateway.http.auth import RELOAD_INTERVAL_S, Client, KeyRing, line_of, make_key, read_keys

HASH = "sha256$" + "0" * 64


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def tick(self) -> None:
        self.now_s += RELOAD_INTERVAL_S + 0.1


def ring_of(path, *lines, clock=None):
    path.write_text("".join(f"{line}\n" for line in lines))
    return KeyRing((), path, clock or Clock())


def enters(ring, key):
    try:
        return ring.client_of([f"Bearer {key}"])
    except RequestError as error:
        return None if error.status == 401 else error


def test_a_line_names_client_tenant_and_limit(tmp_path):
    ring = ring_of(
        tmp_path / "keys",
        "# who may enter",
        "",
        line_of("k1", "alice", None, None),
        line_of("k2", "alice", None, None),
        line_of("k3", "bob", "team", 7),
    )
    assert enters(ring, "k1") == enters(ring, "k2") == Client("alice", "alice", None)
    assert enters(ring, "k3") == Client("bob", "team", 7)
    assert enters(ring, "k4") is None


def test_keys_are_kept_nowhere(tmp_path):
    key = make_key()
    ring = ring_of(tmp_path / "keys", line_of(key, "alice", None, None))
    assert key not in (tmp_path / "keys").read_text()
    assert enters(ring, key)
    assert len({make_key() for _ in range(100)}) == 100
    assert len(make_key()) > 50


def test_an_empty_file_lets_none_in_and_no_file_all(tmp_path):
    assert enters(ring_of(tmp_path / "keys"), "any") is None
    assert KeyRing(()).client_of([]).tenant == "anonymous"


def test_settings_and_file_add_up(tmp_path):
    path = tmp_path / "keys"
    path.write_text(line_of("listed", "alice", None, None))
    ring = KeyRing(("fixed",), path)
    assert enters(ring, "fixed").tenant.startswith("key-")
    assert enters(ring, "listed").tenant == "alice"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("alice", "sha256"),
        ("alice:0000", "sha256"),
        (f"alice:{HASH[:-1]}", "sha256"),
        (f"alice:md5$${'0' * 32}", "sha256"),
        (f":{HASH}", "name"),
        (f"a b:{HASH}", "name"),
        (f"{'a' * 65}:{HASH}", "name"),
        (f"a:{HASH}:tenant=", "tenant"),
        (f"a:{HASH}:tenant=x y", "tenant"),
        (f"a:{HASH}:tenant=x:tenant=y", "once"),
        (f"a:{HASH}:max_open=0", "max_open"),
        (f"a:{HASH}:max_open=-1", "max_open"),
        (f"a:{HASH}:max_open=many", "max_open"),
        (f"a:{HASH}:quota=5", "only"),
        ("sk-quire-a-key-in-the-clear", "sha256"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_not_shown(tmp_path, line, word):
    path = tmp_path / "keys"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(StartupError, match=f"line 2: .*{word}") as refusal:
        KeyRing((), path)
    assert line not in str(refusal.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        read_keys(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(StartupError, match="not plain text"):
        read_keys(tmp_path / "binary")
    (tmp_path / "long").write_text("#" * (1 << 21))
    with pytest.raises(StartupError, match="longer than"):
        read_keys(tmp_path / "long")
    (tmp_path / "twice").write_text(f"a:{HASH}\nb:{HASH}\n")
    with pytest.raises(StartupError, match="twice"):
        read_keys(tmp_path / "twice")
    (tmp_path / "many").write_text("".join(f"a:sha256${number:064x}\n" for number in range(4097)))
    with pytest.raises(StartupError, match="more than 4096"):
        read_keys(tmp_path / "many")


def test_a_change_is_seen_and_a_bad_one_changes_nothing(tmp_path, caplog):
    path, clock = tmp_path / "keys", Clock()
    ring = ring_of(path, line_of("old", "alice", None, None), clock=clock)
    path.write_text(line_of("newer", "alice", None, None) + "\n")
    assert enters(ring, "old"), "not looked at again so soon"
    clock.tick()
    assert enters(ring, "old") is None
    assert enters(ring, "newer")
    path.write_text("nonsense\n")
    for _ in range(3):
        clock.tick()
        assert enters(ring, "newer")
    assert caplog.text.count("key file not reloaded") == 1
    os.unlink(path)
    clock.tick()
    assert enters(ring, "newer")
    path.write_text(f"{line_of('third', 'carol', None, None)}\n")
    clock.tick()
    assert enters(ring, "newer") is None
    assert enters(ring, "third").name == "carol"


def test_the_verb_makes_a_key_that_enters(tmp_path, capsys):
    path = tmp_path / "keys"
    for flags in (["alice"], ["bob", "--tenant", "team", "--max-open", "3"]):
        assert main(["key", *flags, "--file", str(path)]) == 0
    keys = capsys.readouterr().out.split()
    ring = KeyRing((), path)
    assert [enters(ring, key) for key in keys] == [Client("alice", "alice"), Client("bob", "team", 3)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["key", "carol"]) == 0
    key, line = capsys.readouterr().out.split()
    path.write_text(line)  # without an end of line
    assert main(["key", "dan", "--file", str(path)]) == 0
    ring = KeyRing((), path)
    assert enters(ring, key).name == "carol"
    assert enters(ring, capsys.readouterr().out.strip()).name == "dan"


@pytest.mark.parametrize(
    "flags", [["a b"], ["a:b"], ["a", "--tenant", "x:y"], ["a", "--max-open", "0"], ["a", "--file", "/nowhere/keys"]]
)
def test_the_verb_refuses_what_no_line_may_hold(flags, capsys):
    assert main(["key", *flags]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1


def test_the_verb_leaves_a_file_alone_that_holds_no_keys(tmp_path, capsys):
    path = tmp_path / "notes"
    path.write_text("buy milk\n")
    assert main(["key", "alice", "--file", str(path)]) == 2
    assert path.read_text() == "buy milk\n"
    assert not capsys.readouterr().out
