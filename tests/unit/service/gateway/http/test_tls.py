"""The gateway's certificate: the newest usable one."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest

from service.errors import StartupError
from service.gateway.http import tls
from service.gateway.http.tls import open_tls
from tests.support.certificates import OPENSSL, make_certificates

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificates")


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(tls, "RELOAD_INTERVAL_S", 0.02)
    return make_certificates(tmp_path / "first")


async def shown(port: int) -> bytes:
    """The certificate that a new connection gets."""
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anyone)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return found


async def test_a_new_certificate_is_shown_and_a_bad_one_is_not(made, tmp_path, caplog):
    caplog.set_level("INFO")
    other = make_certificates(tmp_path / "second")
    async with open_tls(made.certificate, made.key) as context:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        first = await shown(port)
        shutil.copy(other.certificate, made.certificate)  # its key is still the old one
        async with asyncio.timeout(10):
            while "certificate not reloaded" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await shown(port) == first
        shutil.copy(other.key, made.key)
        async with asyncio.timeout(10):
            while "certificate read" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await shown(port) == ssl.PEM_cert_to_DER_cert(other.certificate.read_text())
        made.key.unlink()
        async with asyncio.timeout(10):
            while caplog.text.count("certificate not reloaded") < 2:
                await asyncio.sleep(0.01)
        assert await shown(port) != first
        server.close()
        await server.wait_closed()


async def test_certificate_and_key_in_one_file(made, tmp_path):
    both = tmp_path / "both.pem"
    both.write_text(made.certificate.read_text() + made.key.read_text())
    async with open_tls(both, None) as context:
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    async with open_tls(None, None) as context:
        assert context is None


async def test_an_encrypted_key_asks_none(made, tmp_path):
    locked = tmp_path / "locked.key"
    command = [OPENSSL, "pkey", "-in", made.key, "-aes128", "-passout", "pass:x", "-out", locked]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=30)
    with pytest.raises(StartupError, match="encrypted"):
        async with open_tls(made.certificate, locked):
            pass
