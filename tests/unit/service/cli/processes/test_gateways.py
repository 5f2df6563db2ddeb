import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from service.cli.processes import gateways
from service.cli.processes.gateways import open_gateways, require_ports, reserved_port, share_of
from service.config.settings import Settings
from service.errors import StartupError
from service.observability.gateway_group import GatewayGroup


def listening(port, **options):
    return socket.create_server(("127.0.0.1", port), **options)


def test_gateways_share_a_reserved_port_and_get_all_of_its_connections():
    with reserved_port("127.0.0.1", 0) as port, listening(port, reuse_port=True) as one:
        with listening(port, reuse_port=True) as other:
            clients = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(64)]
            taken = []
            for server in (one, other):
                server.settimeout(0)
                taken.append(0)
                try:
                    while True:
                        server.accept()[0].close()
                        taken[-1] += 1
                except BlockingIOError:
                    pass
            for client in clients:
                client.close()
        assert sum(taken) == 64
        assert min(taken) >= 8  # of a fair coin, once in 10**10


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_others_listen_on_is_refused(shared):
    with (
        listening(0, reuse_port=shared) as server,
        pytest.raises(StartupError, match=r"^cannot listen on 127\.0\.0\.1:\d+: Address already in use$"),
        reserved_port("127.0.0.1", server.getsockname()[1]),
    ):
        pass


def test_a_full_disk_for_shared_files_is_refused(monkeypatch):
    """They are mapped: a write to a page that the disk has no room for is a bus error."""
    monkeypatch.setattr(gateways, "disk_usage", lambda path: namedtuple("Usage", "free")(3 << 20))
    refused = r"^--api-server-count: 2 gateways need 4 MiB in .* \(TMPDIR\), 3 are free$"
    with pytest.raises(StartupError, match=refused), open_gateways(Settings(api_server_count=2, port=0)):
        pass


def test_bounds_of_a_process_are_divided_but_not_bounds_in_redis():
    whole = Settings(api_server_count=3, max_connections=100, max_body_bytes=2 << 20, max_body_bytes_in_flight=6 << 20)
    part = share_of(whole, GatewayGroup(Path(), 1, 3))
    assert part == replace(
        whole,
        api_server_count=1,
        max_connections=34,
        max_connections_per_client=2731,
        max_body_bytes_in_flight=4 << 20,  # twice a body
    )


def test_each_gateway_has_its_own_probe_port():
    group = [GatewayGroup(Path(), index, 3) for index in range(3)]
    assert [share_of(Settings(probe_port=8001), one).probe_port for one in group] == [8001, 8002, 8003]
    assert [share_of(Settings(probe_port=0), one).probe_port for one in group] == [0, 0, 0]
    for wrong in (7999, 65534):
        with pytest.raises(StartupError, match=rf"^--probe-port: {wrong}: "):
            require_ports(Settings(probe_port=wrong, api_server_count=3))
