"""The embedded server: quick to start, alone on its folder, durable, and gone with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from service.errors import StartupError
from service.wire import embedded_redis
from service.wire.embedded_redis import EmbeddedRedis

PARENT = """
import sys, time
from pathlib import Path
from service.wire.embedded_redis import EmbeddedRedis
print(EmbeddedRedis.start(Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody has buried yet."""
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
    monkeypatch.setattr(embedded_redis, "LOCK_WAIT_S", 0.1)
    server = EmbeddedRedis.start(data_dir)
    with pytest.raises(StartupError, match="in use by another Quire"):
        EmbeddedRedis.start(data_dir)
    server.stop()
    EmbeddedRedis.start(data_dir).stop()


def test_the_next_instance_waits_for_the_last_server_to_leave(data_dir):
    server = EmbeddedRedis.start(data_dir)
    threading.Timer(0.3, server.stop).start()
    EmbeddedRedis.start(data_dir).stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
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


def test_a_failed_start_tells_the_servers_own_words(data_dir):
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


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="folder of the embedded Redis"):
        EmbeddedRedis.start(tmp_path / "file" / "data")


def write_until_killed(server: EmbeddedRedis, after_s: float) -> int:
    """How many entries the server has said that it took, before it was killed."""
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


def test_what_a_killed_server_left_lying_is_in_nobodys_way(data_dir):
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
