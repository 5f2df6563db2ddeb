"""A finished request leaves no body in memory, even before garbage collection."""

from __future__ import annotations

import gc
import json
import types

import pytest

from tests.support.gateway import MODEL, open_gateway

LONG = 150_000
ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/batches",
    "/tokenize",
    "/detokenize",
)


def kept_by(garbage: list[object]) -> list[str]:
    """Return the functions whose frames hold a long object."""
    return [
        frame.f_code.co_qualname
        for frame in garbage
        if isinstance(frame, types.FrameType)
        for value in frame.f_locals.values()
        if isinstance(value, bytes | bytearray | str) and len(value) > LONG // 2
    ]


@pytest.mark.parametrize("body", ["unknown field", "no json", "wrong type"])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_refused_body_goes_with_its_refusal(model_folder, route, body):
    data = {
        "unknown field": json.dumps({"model": MODEL, "prompt": "x", "more": "y" * LONG}).encode(),
        "no json": b'{"a": ' + b"y" * LONG,
        "wrong type": json.dumps(
            dict.fromkeys(("model", "prompt", "messages", "input", "tokens"), "y" * LONG)
        ).encode(),
    }[body]
    async with open_gateway(model_folder, enable_embeddings=True) as gateway:
        await gateway.post(route, data)  # what is made once
        gc.collect()
        gc.freeze()  # for good: the rest of the process is not searched again
        gc.disable()
        try:
            status, _ = await gateway.post(route, data)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert 400 <= status < 500
            assert kept_by(gc.garbage) == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
