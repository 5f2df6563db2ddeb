"""Entries of foreign producers: any body that JSON can hold, up to a depth, under a plain name."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.queue.codec import MAX_BODY_DEPTH, WireError, decode, encode, pack_ids
from service.queue.messages import IngressJob

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=30,
)


@given(st.dictionaries(st.text(max_size=10), JSON, max_size=6))
def test_any_json_body_survives_the_way(body):
    job = IngressJob(v=1, id="a", endpoint="/v1/completions", body=body)
    assert decode(IngressJob, encode(job)) == job


def ingress(body) -> bytes:
    return msgpack.packb({"v": 1, "id": "a", "endpoint": "/v1/completions", "body": body})


@pytest.mark.parametrize("job_id", ["", "a b", "ä", "a" * 65, "a/b", "a\n", "*", "{x}"])
def test_an_ingress_id_is_a_plain_name(job_id):
    with pytest.raises(WireError, match="field id"):
        decode(IngressJob, encode(IngressJob(v=1, id=job_id, endpoint="e", body={})))


def nested(depth: int) -> dict:
    value: object = 1
    for _ in range(depth - 1):
        value = [value]
    return {"x": value}


def test_a_body_nests_so_deep_and_no_deeper():
    decode(IngressJob, ingress(nested(MAX_BODY_DEPTH - 1)))
    with pytest.raises(WireError, match="deep"):
        decode(IngressJob, ingress(nested(MAX_BODY_DEPTH + 1)))


@pytest.mark.parametrize("value", [b"x", [b"x"], {"a": b"x"}, float("nan"), [float("inf")], {b"k": 1}])
def test_a_body_holds_what_json_holds(value):
    with pytest.raises(WireError):
        decode(IngressJob, ingress({"x": value}))


def test_a_prompt_may_come_packed():
    ids = list(range(5000))
    job = decode(IngressJob, ingress({"prompt": pack_ids(ids), "n": 1}))
    assert job.body == {"prompt": ids, "n": 1}
    with pytest.raises(WireError):
        decode(IngressJob, ingress({"prompt": b"abc"}))
    with pytest.raises(WireError):
        decode(IngressJob, ingress({"prompt": ids}))
