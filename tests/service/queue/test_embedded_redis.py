"""The embedded server: quick to start, alone on its folder, durable, and gone with its parent."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from redis import Redis
from redis.exceptions import RedisError

from service.errors import StartupError
from service.queue.embedded import data_folder
from service.queue.embedded import redis as embedded_redis
from service.queue.embedded.redis import EmbeddedRedis

PARENT = """
import sys, time
from pathlib import Path
from service.queue.embedded.redis import EmbeddedRedis
print(EmbeddedRedis.start(Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    """Return whether the process has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for_end(pid: int, seconds: float = 5.0) -> None:
    give_up = time.monotonic() + seconds
    while not has_ended(pid):
        assert time.monotonic() < give_up, "the server outlives its parent"
        time.sleep(0.02)


def test_it_starts_quickly_and_keeps_its_data(data_dir):
    started = time.monotonic()
    server = EmbeddedRedis.start(data_dir)
    assert time.monotonic() - started < 3.0
    with Redis.from_url(server.url) as redis:
        redis.set("a", "b")
        settings = redis.config_get("*")
    server.stop()
    server.stop()
    wanted = {"appendonly": "yes", "appendfsync": "no", "maxmemory-policy": "noeviction", "port": "0", "save": ""}
    assert {name: settings[name] for name in wanted} == wanted
    again = EmbeddedRedis.start(data_dir)
    with Redis.from_url(again.url) as redis:
        assert redis.get("a") == b"b"
    again.stop()


def test_only_its_owner_reaches_the_socket(data_dir):
    server = EmbeddedRedis.start(data_dir)
    folder = Path(server.url.removeprefix("unix://")).parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    server.stop()
    assert mode == 0o700


def test_a_long_folder_gets_a_short_socket(tmp_path):
    data_dir = tmp_path / ("d" * 60) / ("e" * 60)
    server = EmbeddedRedis.start(data_dir)
    path = Path(server.url.removeprefix("unix://"))
    assert len(os.fsencode(path)) <= 100
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with Redis.from_url(server.url) as redis:
        assert redis.ping()
    server.stop()
    assert not path.parent.exists()


def test_two_instances_do_not_share_a_folder(data_dir, monkeypatch):
    monkeypatch.setattr(data_folder, "LOCK_WAIT_S", 0.1)
    server = EmbeddedRedis.start(data_dir)
    with pytest.raises(StartupError, match="in use by another Quire"):
        EmbeddedRedis.start(data_dir)
    server.stop()
    EmbeddedRedis.start(data_dir).stop()


def test_the_next_instance_waits_for_the_last_server_to_leave(data_dir):
    server = EmbeddedRedis.start(data_dir)
    threading.Timer(0.3, server.stop).start()
    EmbeddedRedis.start(data_dir).stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child at its parent's end")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(data_dir, number):
    with subprocess.Popen([sys.executable, "-c", PARENT, str(data_dir)], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.send_signal(number)
        parent.wait()
        wait_for_end(pid)
    EmbeddedRedis.start(data_dir).stop()


def test_it_outlives_the_thread_that_started_it(data_dir):
    servers = []
    thread = threading.Thread(target=lambda: servers.append(EmbeddedRedis.start(data_dir)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with Redis.from_url(servers[0].url) as redis:
        assert redis.ping()
    servers[0].stop()


def test_a_log_cut_off_in_the_middle_is_read_as_far_as_it_goes(data_dir):
    server = EmbeddedRedis.start(data_dir)
    with Redis.from_url(server.url) as redis:
        for number in range(50):
            redis.set(f"k{number}", "v" * 100)
    server.stop()
    (tail,) = (data_dir / "appendonlydir").glob("*.incr.aof")
    os.truncate(tail, tail.stat().st_size - 37)
    again = EmbeddedRedis.start(data_dir)
    with Redis.from_url(again.url) as redis:
        assert redis.dbsize() == 49
    again.stop()


def test_a_failed_start_reports_the_servers_own_words(data_dir):
    server = EmbeddedRedis.start(data_dir)
    server.stop()
    (manifest,) = (data_dir / "appendonlydir").glob("*.manifest")
    manifest.write_text("nonsense\n")
    with pytest.raises(StartupError, match="manifest"):
        EmbeddedRedis.start(data_dir)
    assert not (data_dir / "socket" / "redis.sock").exists()


def test_a_missing_program_is_one_clear_line(data_dir, monkeypatch):
    monkeypatch.setattr(embedded_redis.shutil, "which", lambda name: None)
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="no redis-server or valkey-server found"):
        EmbeddedRedis.start(data_dir)


FAKE = """#!/bin/sh
[ "$1" = --version ] && echo "Redis server v=6.0.16 sha=0:0 malloc=libc bits=64 build=0" && exit
echo "# Can't handle RDB format version 80"
exit 1
"""


@pytest.fixture
def old_server(tmp_path):
    """A program that says it is an old server, and that reads nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("redis-server", "valkey-server"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    return folder / "redis-server"


def test_the_bundled_server_runs_whatever_is_on_the_path(data_dir, old_server, monkeypatch):
    monkeypatch.setenv("PATH", f"{old_server.parent}:{os.environ['PATH']}")
    server = EmbeddedRedis.start(data_dir)
    with Redis.from_url(server.url) as redis:
        version = redis.info("server")["valkey_version"]
        redis.set("a", "b")
    server.stop()
    assert (data_dir / "written-by").read_text() == f"valkey {version}\n"


def test_without_a_bundled_server_one_on_the_path_runs(data_dir, old_server, monkeypatch):
    bundled = embedded_redis.find_program()
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{Path(bundled).parent}:/usr/bin:/bin")
    EmbeddedRedis.start(data_dir).stop()
    monkeypatch.setenv("PATH", f"{old_server.parent}:/usr/bin:/bin")
    with pytest.raises(StartupError, match=r"was written by valkey [0-9.]+, and redis 6\.0\.16 cannot read it"):
        EmbeddedRedis.start(data_dir)
    monkeypatch.setenv("PATH", f"{Path(bundled).parent}:/usr/bin:/bin")
    EmbeddedRedis.start(data_dir).stop()


@pytest.mark.parametrize("note", [None, b"", b"\xff", b"x" * 9000, b"redis\x1b[2J 9\n"])
def test_data_without_a_good_note_are_anothers(data_dir, old_server, monkeypatch, note):
    EmbeddedRedis.start(data_dir).stop()
    (data_dir / "written-by").unlink()
    if note is not None:
        (data_dir / "written-by").write_bytes(note)
    monkeypatch.setattr(embedded_redis, "find_program", lambda: str(old_server))
    with pytest.raises(
        StartupError, match=r"was written by another server, or is damaged, and redis 6\.0\.16 cannot"
    ) as error:
        EmbeddedRedis.start(data_dir)
    assert str(error.value).isprintable()


def test_an_old_server_on_a_folder_without_data_just_does_not_start(data_dir, old_server, monkeypatch):
    monkeypatch.setattr(embedded_redis, "find_program", lambda: str(old_server))
    with pytest.raises(StartupError, match="ended at once: # Can't handle"):
        EmbeddedRedis.start(data_dir)


INSTALLED = shutil.which("redis-server") or shutil.which("valkey-server")


@pytest.mark.skipif(INSTALLED is None, reason="no redis-server of the system is installed")
def test_an_installed_server_reads_the_folder_or_names_its_writer(data_dir, monkeypatch):
    """And what it wrote itself, the bundled one reads, or says who wrote it."""
    bundled = embedded_redis.find_program()
    for first, second in ((bundled, INSTALLED), (INSTALLED, bundled)):
        folder = data_dir / Path(first).name
        monkeypatch.setattr(embedded_redis, "find_program", lambda first=first: first)
        server = EmbeddedRedis.start(folder)
        with Redis.from_url(server.url) as redis:
            redis.set("a", "b")
        server.stop()
        monkeypatch.setattr(embedded_redis, "find_program", lambda second=second: second)
        try:
            server = EmbeddedRedis.start(folder)
        except StartupError as error:
            problem = str(error)
        else:
            problem = None
            with Redis.from_url(server.url) as redis:
                assert redis.get("a") == b"b"
            server.stop()
        assert problem is None or re.search(r"was written by \w+ [0-9.]+, and \w+ [0-9.]+ cannot read it", problem)


def test_a_program_that_does_not_say_its_version_is_one_clear_line(data_dir, monkeypatch):
    monkeypatch.setattr(embedded_redis, "find_program", lambda: "/bin/true")
    with pytest.raises(StartupError, match="does not say which version"):
        EmbeddedRedis.start(data_dir)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_its_files_are_private_whatever_the_folder_is(data_dir, umask):
    data_dir.mkdir(mode=0o755, exist_ok=True)
    data_dir.chmod(0o755)
    before = os.umask(umask)
    try:
        server = EmbeddedRedis.start(data_dir)
        with Redis.from_url(server.url) as redis:
            redis.set("a", "b")
            redis.bgrewriteaof()
            while redis.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.01)
        found = modes(data_dir)
        server.stop()
    finally:
        os.umask(before)
    assert {"lock", "redis.log", "written-by", "appendonlydir", "socket"} <= found.keys()
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o755, "the folder is its owner's"


def test_files_that_others_can_read_become_private(data_dir, caplog):
    EmbeddedRedis.start(data_dir).stop()
    for path in data_dir.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    EmbeddedRedis.start(data_dir).stop()
    assert {name: oct(mode) for name, mode in modes(data_dir).items() if mode & 0o077} == {}
    assert len([record for record in caplog.records if "others could read" in record.getMessage()]) == 1


def test_a_link_in_the_place_of_its_log_is_not_followed(data_dir, tmp_path):
    EmbeddedRedis.start(data_dir).stop()
    theirs = tmp_path / "theirs"
    theirs.write_text("not for us to empty")
    (data_dir / "redis.log").unlink()
    (data_dir / "redis.log").symlink_to(theirs)
    with pytest.raises(StartupError):
        EmbeddedRedis.start(data_dir)
    assert theirs.read_text() == "not for us to empty"


def test_files_of_another_user_are_refused(data_dir, monkeypatch):
    EmbeddedRedis.start(data_dir).stop()
    monkeypatch.setattr(data_folder.os, "geteuid", lambda: os.getuid() + 12345)
    with pytest.raises(StartupError, match="belongs to another user"):
        EmbeddedRedis.start(data_dir)


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"--data-dir: .*/file/data cannot be written: Not a directory"):
        EmbeddedRedis.start(tmp_path / "file" / "data")


def test_a_long_path_without_a_tmp_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(StartupError, match="too long for a socket, and /tmp cannot be written: Permission denied"):
        EmbeddedRedis.start(tmp_path / ("x" * 120))


def write_until_killed(server: EmbeddedRedis, after_s: float) -> int:
    """Return the number of entries that the server acknowledged before it was killed."""
    killer = threading.Timer(after_s, os.kill, (server.pid, signal.SIGKILL))
    num_taken = 0
    with Redis.from_url(server.url) as redis, suppress(RedisError):
        killer.start()
        while True:
            redis.xadd("s", {"m": b"x" * 2000})
            num_taken += 1
    killer.join()
    return num_taken


@pytest.mark.parametrize("after_s", [0.3, 1.02, 2.1])
def test_killed_it_has_lost_nothing_that_it_took(data_dir, after_s):
    """Around the moments when the data go to the disk too."""
    server = EmbeddedRedis.start(data_dir)
    num_taken = write_until_killed(server, after_s)
    server.wait()
    server.restart()
    with Redis.from_url(server.url) as redis:
        num_kept = redis.xlen("s")
        redis.set("a", "b")
    server.stop()
    assert num_taken <= num_kept <= num_taken + 1, "the last one may be there and not have been answered for"
    again = EmbeddedRedis.start(data_dir)
    with Redis.from_url(again.url) as redis:
        assert (redis.xlen("s"), redis.get("a")) == (num_kept, b"b")
    again.stop()


def test_what_a_killed_server_left_lying_is_in_the_way_of_none(data_dir):
    server = EmbeddedRedis.start(data_dir)
    with Redis.from_url(server.url) as redis:
        redis.set("a", "b")
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    left = [data_dir / "temp-rewriteaof-1.aof", data_dir / "temp-1.rdb", data_dir / "appendonlydir" / "temp-x.aof"]
    for path in left:
        path.write_bytes(b"half a file")
    assert Path(server.url.removeprefix("unix://")).exists()
    server.restart()
    with Redis.from_url(server.url) as redis:
        assert redis.get("a") == b"b"
    server.stop()
    server.restart()  # it was stopped: nothing starts
    assert has_ended(server.pid)


def synced_again(synced: threading.Event) -> bool:
    synced.clear()
    return synced.wait(2 * embedded_redis.SYNC_EVERY_S)


def test_its_data_go_to_the_disk_every_second(data_dir, monkeypatch):
    synced = threading.Event()
    real = os.fsync
    monkeypatch.setattr(embedded_redis.os, "fsync", lambda number: (real(number), synced.set()))
    server = EmbeddedRedis.start(data_dir)
    with Redis.from_url(server.url) as redis:
        assert synced.wait(5)
        for value in range(2):
            synced.clear()
            redis.set("a", value)
            assert synced.wait(5)
        assert any(not synced_again(synced) for _ in range(4)), "nothing new, nothing to do"
    server.stop()
