"""The systemd units: systemd itself reads and scores them, and what they say agrees with the settings beneath."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.config.sources import RESERVED_VARIABLES
from service.gateway.routes.probes import DEAD_AFTER_S
from service.worker.watchdog import DEFAULT_STEP_TIMEOUT_S, LAST_RESORT_S
from tests.support.served import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "systemd"
GATEWAY, WORKER, TARGET = "quire-gateway.service", "quire-worker@.service", "quire.target"
MOST_EXPOSED = {GATEWAY: 1.5, WORKER: 2.0}
"""systemd's own measure, 0 to 10: what may be called safe ends at 2."""
GOODBYE_S = 13.0
"""Seconds that a process needs after its drain time: last events, card, thread, connections."""
MOST_GATEWAYS = 16
"""Value of --api-server-count in one unit."""
ANALYZE = shutil.which("systemd-analyze")

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def settings_of(unit: str) -> dict[str, list[str]]:
    """Every setting of a unit file with its values, in order."""
    found = defaultdict(list)
    for line in (FOLDER / unit).read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


@pytest.fixture
def installed(tmp_path) -> Path:
    """The units, with a program that is there in the place of the one that a server would have."""
    for path in FOLDER.iterdir():
        text = path.read_text().replace("/opt/quire/.venv/bin/quire", sys.executable)
        (tmp_path / path.name).write_text(re.sub(r"(?m)^(Documentation=|ExecStartPre=).*\n", "", text))
    return tmp_path


def analyze(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([ANALYZE, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
@pytest.mark.parametrize("unit", [TARGET, GATEWAY, "quire-worker@0.service"])
def test_systemd_understands_every_line(installed, unit):
    found = analyze("verify", "--man=no", f"./{unit}", folder=installed)
    assert (found.returncode, found.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", MOST_EXPOSED)
def test_systemd_finds_little_to_attack(installed, unit):
    found = analyze("security", "--no-pager", "--offline=true", f"./{unit}", folder=installed)
    if "unrecognized option" in found.stderr:
        pytest.skip("this systemd-analyze cannot score units that do not run (it is older than 250)")
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", found.stdout)
    assert exposure, found.stdout + found.stderr
    print(f"{unit}: {exposure[1]}")
    assert float(exposure[1]) <= MOST_EXPOSED[unit]


@needs_systemd
def test_a_broken_unit_would_be_seen(installed):
    path = installed / GATEWAY
    path.write_text(path.read_text().replace("Type=notify", "Type=notifier"))
    assert "notifier" in analyze("verify", "--man=no", f"./{GATEWAY}", folder=installed).stderr


@pytest.mark.parametrize("unit", [GATEWAY, WORKER])
def test_systemd_hears_of_readiness_and_ends_only_the_main_process_gently(unit):
    found = settings_of(unit)
    assert (found["Type"], found["NotifyAccess"], found["KillMode"]) == (["notify"], ["main"], ["mixed"])
    assert found["PartOf"] == [TARGET]
    assert found["Restart"] == ["always"]
    assert float(found["TimeoutStopSec"][0]) >= Settings().drain_timeout + GOODBYE_S
    assert found["User"][0].startswith("quire-")


def test_each_watchdog_is_slower_than_the_one_inside():
    inner_s = DEFAULT_STEP_TIMEOUT_S["cuda"] + LAST_RESORT_S
    assert float(settings_of(WORKER)["WatchdogSec"][0]) > inner_s
    assert float(settings_of(GATEWAY)["WatchdogSec"][0]) >= DEAD_AFTER_S


@pytest.mark.parametrize("unit", [GATEWAY, WORKER])
def test_every_variable_is_a_setting_and_every_secret_a_credential(unit):
    found = settings_of(unit)
    variables = dict(line.split("=", 1) for line in found["Environment"])
    known = {f"QUIRE_{name.upper()}" for name in Settings.__dataclass_fields__} | RESERVED_VARIABLES
    assert {name for name in variables if name.startswith("QUIRE_")} <= known
    credentials = {line.partition(":")[0] for line in found["LoadCredential"]}
    used = {value.removeprefix("%d/") for value in variables.values() if value.startswith("%d/")}
    assert used == credentials
    assert "redis-password" in credentials
    assert not any("PASSWORD=" in line or "API_KEY=" in line for line in found["Environment"])


def test_only_the_ports_that_are_used_are_open():
    probe_port = int(dict(map(_pair, settings_of(GATEWAY)["Environment"]))["QUIRE_PROBE_PORT"])
    ports = {f"tcp:{Settings().port}", f"tcp:{probe_port}-{probe_port + MOST_GATEWAYS - 1}"}
    assert set(settings_of(GATEWAY)["SocketBindAllow"]) == ports
    assert settings_of(WORKER)["SocketBindAllow"] == []
    for unit in (GATEWAY, WORKER):
        assert settings_of(unit)["SocketBindDeny"] == settings_of(unit)["IPAddressDeny"] == ["any"]


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name, value
