from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from service.typed_decoding import convert, decode_json, decode_msgpack, fields_of, schemas_of
from tests.support.source_tree import ROOT

FIRST_USES = """
import sys, threading
import msgspec
from service.typed_decoding import convert, decode_json, fields_of, schemas_of

sys.setswitchinterval(1e-6)
for _ in range(20):
    part = msgspec.defstruct("Part", [(f"p{n}", "int | None", None) for n in range(30)])
    body = msgspec.defstruct("Body", [(f"b{n}", dict[str, list[part]] | None, None) for n in range(10)])
    start = threading.Barrier(8)

    def use(number, kind=body, start=start):
        start.wait()
        if number % 4 == 0:
            convert({"b4": {"x": [{"p1": 2}]}}, kind)
        elif number % 4 == 1:
            decode_json(b'{"b4": {"x": [{"p1": 2}]}}', kind)
        elif number % 4 == 2:
            fields_of(kind)
        else:
            schemas_of([kind], "{name}")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
"""msgspec's own functions crash in the first rounds."""


class Body(msgspec.Struct):
    name: str
    data: bytes = b""


def test_threads_may_use_a_type_for_the_first_time_at_once():
    done = subprocess.run([sys.executable, "-c", FIRST_USES], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_values_are_decoded():
    assert convert({"name": "x", "data": b"y"}, Body, builtin_types=(bytes,)) == Body("x", b"y")
    assert decode_json(b'{"name": "x"}', Body) == Body("x")
    assert decode_msgpack(msgspec.msgpack.encode({"name": "x"}), Body) == Body("x")


@pytest.mark.parametrize("fields", [{"name": 1}, {}])
def test_types_are_strict(fields):
    with pytest.raises(msgspec.ValidationError):
        convert(fields, Body)


def test_types_are_described():
    assert [field.name for field in fields_of(Body)] == ["name", "data"]
    assert schemas_of([Body], "{name}")["Body"]["required"] == ["name"]
