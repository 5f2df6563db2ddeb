"""Notifications, only with a supervisor and only at its interval."""

from __future__ import annotations

import os
import secrets
import socket

import pytest

from service.observability.systemd import Supervisor


@pytest.fixture(params=["path", "abstract"])
def listener(request, tmp_path):
    address = f"@quire-{secrets.token_hex(8)}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address.replace("@", "\0", 1))
        sock.settimeout(5)
        yield address, sock


def heard(sock):
    sock.setblocking(False)
    messages = []
    while True:
        try:
            messages.append(sock.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_words_of_a_life(listener):
    address, sock = listener
    supervisor = Supervisor({"NOTIFY_SOCKET": address})
    supervisor.ready("takes jobs")
    supervisor.feed()
    supervisor.stopping()
    assert heard(sock) == ["READY=1\nSTATUS=takes jobs", "STOPPING=1\nSTATUS=draining"]
    assert supervisor.feed_every_s is None


def test_it_is_fed_four_times_in_its_patience_however_often_we_turn(listener, monkeypatch):
    address, sock = listener
    now_s = [100.0]
    monkeypatch.setattr("service.observability.systemd.time.monotonic", lambda: now_s[0])
    supervisor = Supervisor({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())})
    assert supervisor.feed_every_s == 2.0
    for _ in range(800):
        supervisor.feed()
        now_s[0] += 0.01
    assert heard(sock) == ["WATCHDOG=1"] * 4


def test_the_watchdog_of_another_process_is_not_ours():
    environ = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "1"}
    assert Supervisor(environ).feed_every_s is None


def test_without_a_supervisor_nothing_happens():
    supervisor = Supervisor({})
    supervisor.ready("x")
    supervisor.feed()
    supervisor.stopping()


def test_a_supervisor_that_has_left_is_no_reason_to_fail(tmp_path, caplog):
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("x")
    assert "not reachable" in caplog.text
