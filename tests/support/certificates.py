"""Test certificates made by openssl: a CA and one for localhost."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Certificates:
    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make certificates for `localhost` and 127.0.0.1, valid for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    names = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    key = str(folder / "ca.key")
    _openssl(
        "req", "-x509", *curve, "-subj", "/CN=test", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", key, "-out", str(names.authority),
    )  # fmt: skip
    _openssl(
        "req", "-x509", *curve, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-addext", "basicConstraints=critical,CA:FALSE", "-CA", str(names.authority), "-CAkey", key,
        "-keyout", str(names.key), "-out", str(names.certificate),
    )  # fmt: skip
    return names


def _openssl(*arguments: str) -> None:
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True, timeout=30)
