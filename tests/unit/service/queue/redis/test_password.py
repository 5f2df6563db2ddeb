"""A password from a file becomes part of the URL, with any characters; an unusable file is refused."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import parse_url

from service.errors import StartupError
from service.queue.redis.password import with_password

ODD = "p:a/s@s#w?o%r d+é"


@pytest.mark.parametrize(
    ("url", "user"),
    [
        ("redis://quire-gateway@queue:6379/2", "quire-gateway"),
        ("redis://queue:6379", None),
        ("rediss://quire-worker@queue:6379?ssl_ca_certs=/ca.pem", "quire-worker"),
        ("unix://quire-worker@/run/redis.sock", "quire-worker"),
        ("unix:///run/redis.sock?db=1", None),
        ("redis://me@[::1]:6379", "me"),
    ],
)
def test_the_client_reads_user_and_password(tmp_path, url, user):
    path = tmp_path / "password"
    path.write_text(f"{ODD}\n")
    before, after = parse_url(url), parse_url(with_password(url, path))
    assert after.pop("password") == ODD
    assert (after.pop("username", None) or None) == user
    before.pop("username", None)
    assert after == before


def test_without_a_file_the_url_stays():
    assert with_password("redis://a:b@c", None) == "redis://a:b@c"


@pytest.mark.parametrize("content", [b"", b"\n", b"one\ntwo\n", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_password(tmp_path, content):
    path = tmp_path / "password"
    path.write_bytes(content)
    with pytest.raises(StartupError, match="--redis-password-file"):
        with_password("redis://queue", path)


def test_no_file_and_two_passwords(tmp_path):
    with pytest.raises(StartupError, match="cannot be read"):
        with_password("redis://queue", tmp_path / "none")
    (tmp_path / "password").write_text("secret")
    with pytest.raises(StartupError, match="of its own") as refusal:
        with_password("redis://me:mine@queue", tmp_path / "password")
    assert "mine" not in str(refusal.value)
