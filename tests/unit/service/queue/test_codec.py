"""Messages survive the way, and nothing else gets in: no type, no size, no version, no error family but WireError."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling_params import SamplingParams
from service.errors import EndReason
from service.queue.codec import LIMITS, WireError, decode, encode, pack_floats, pack_ids, unpack_floats, unpack_ids
from service.queue.messages import (
    BlockTable,
    Cancel,
    Event,
    IngressJob,
    Job,
    Part,
    Reply,
    RequestRecord,
    TokenLogprobs,
    Usage,
    WorkerCard,
)
from tests.support.num_examples import num_examples

BODY = {"model": "m", "messages": [{"role": "user", "content": "häß"}], "temperature": 0.5, "n": 1, "stop": None}
SAMPLES = [
    Job(
        job_id="01ARZ3NDEKTSV4RRFFQ69G5FAV",
        tenant="t",
        prompt=pack_ids([1, 2**32 - 1]),
        sampling=SamplingParams(
            max_tokens=5, seed=2**64 - 1, top_k=3, stop_token_ids=(1, 2), logit_bias=((7, -100.0), (8, 1.5))
        ),
        submitted_at_s=1.5,
        deadline_s=9.25,
        feed="d",
    ),
    Event(job_id="J", number=1, parts=(Part(tokens=pack_ids([5])), Part(branch=1, end=EndReason.STOP))),
    Event(
        job_id="J",
        number=2,
        parts=(
            Part(logprobs=TokenLogprobs(chosen=pack_floats([-0.5]), top_ids=pack_ids([1]), top=pack_floats([-0.5]))),
        ),
        end=EndReason.LENGTH,
        choices=(0,),
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1),
    ),
    Cancel(job_id="J", reason=EndReason.DEADLINE),
    WorkerCard(
        worker_id="w",
        model="m",
        ready=True,
        max_model_len=1,
        num_blocks=2,
        block_size=16,
        beat_at_s=1.0,
        stats={"a": 1.0},
        tables=(
            BlockTable(
                request_id="R/1",
                branch=0,
                num_prompt_tokens=1,
                num_tokens=2,
                num_computed_tokens=1,
                num_blocks=1,
                blocks=pack_ids([7]),
                holders=pack_ids([1]),
                states=b"\0",
            ),
        ),
    ),
    IngressJob(v=1, id="a.b-c_1", endpoint="/v1/chat/completions", body=BODY),
    Reply(
        id="a", number=3, text="x", finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2), done=True
    ),
    Reply(id="a", number=1, error={"message": "no", "type": "t", "param": None, "code": None}, done=True),
    RequestRecord(
        request_id="R",
        tenant="t",
        endpoint="/v1/completions",
        outline=b"{}",
        digest=b"d",
        created_s=1.0,
        deadline_s=2.0,
        num_prompt_tokens=pack_ids([3, 4]),
        prompt_texts=("a", "b"),
        prompt_ids=pack_ids([1, 2, 3, 4, 5, 6, 7]),
        stays=True,
        client_id="trace-1",
    ),
]
KINDS = list(LIMITS)


def as_map(message) -> dict:
    return msgpack.unpackb(encode(message))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_way(message):
    assert decode(type(message), encode(message)) == message


def test_the_wire_form_is_a_plain_map_with_a_version():
    assert as_map(SAMPLES[1]) == {
        "v": 1,
        "job_id": "J",
        "number": 1,
        "parts": [{"tokens": b"\x05\0\0\0"}, {"branch": 1, "end": "stop"}],
    }
    assert as_map(SAMPLES[5]) == {"v": 1, "id": "a.b-c_1", "endpoint": "/v1/chat/completions", "body": BODY}


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": True},
        {"v": 1.0},
        {"v": None},
        {"surprise": 1},
        {"job_id": 5, "id": 5, "worker_id": 5},
        {"number": True, "v": 1, "reason": "why", "sampling": 1, "ready": 1, "body": []},
    ],
    ids=str,
)
def test_what_does_not_fit_the_type_is_refused(message, change):
    with pytest.raises(WireError):
        decode(type(message), msgpack.packb({**as_map(message), **change}))


@pytest.mark.parametrize("message", SAMPLES[:5], ids=lambda message: type(message).__name__)
def test_a_missing_field_is_refused(message):
    fields = as_map(message)
    del fields[next(name for name in fields if name != "v")]
    with pytest.raises(WireError):
        decode(type(message), msgpack.packb(fields))


def test_unknown_fields_are_refused_inside_too():
    fields = as_map(SAMPLES[0])
    fields["sampling"]["surprise"] = 1
    with pytest.raises(WireError, match="unknown field"):
        decode(Job, msgpack.packb(fields))


def test_numbers_keep_their_kinds():
    fields = as_map(SAMPLES[0])
    for wrong in (True, "1", 1.5):
        fields["sampling"]["max_tokens"] = wrong
        with pytest.raises(WireError):
            decode(Job, msgpack.packb(fields))


def test_text_is_not_bytes_and_bytes_are_not_text():
    for change in ({"tokens": "BQAAAA=="}, {"job_id": b"J"}):
        with pytest.raises(WireError):
            decode(Event, msgpack.packb({**as_map(SAMPLES[1]), **change}))


def test_an_error_names_no_value():
    for payload in (
        msgpack.packb({**as_map(SAMPLES[3]), "reason": "secret"}),
        msgpack.packb({**as_map(SAMPLES[3]), "secret": 1}),
        b"\xa6secre\xff",
    ):
        with pytest.raises(WireError) as refused:
            decode(Cancel, payload)
        assert "secre" not in str(refused.value)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x90",
        b"\x01",
        encode(SAMPLES[3]) + b"\0",
        encode(SAMPLES[3])[:-1],
        b"\x82\xa1v\x01\xa1v\x01",
        b"\x81\xc0\x01",
        b"\x81\x90\x01",
        b"\x81\x80\x01",
        b"\xd4\x05\x00",
        b"\xc7\x00\x05",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xa1\xff",
        b"\x81\xa1v\xa1\xff",
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_malformed_payloads_are_wire_errors(kind, payload):
    with pytest.raises(WireError):
        decode(kind, payload)


BOMBS = {
    "empty lists": lambda size: b"\xdc\x0f\xff" + (b"\xdc\x0f\xff" + b"\x90" * 4095) * (size // 4098),
    "empty maps": lambda size: b"\xdd" + size.to_bytes(4, "big") + b"\x80" * size,
    "lists announced, never given": lambda size: b"\xdd\xff\xff\xff\xff" * (size // 5),
    "short lists announced, never given": lambda size: b"\xdc\x0f\xff" * (size // 3),
    "deep": lambda size: b"\x91" * size,
    "deep maps": lambda size: b"\x81\xa0" * (size // 2),
    "a long text announced": lambda size: b"\xdb\xff\xff\xff\xff" + b"a" * size,
    "long bytes announced": lambda size: b"\xc6\xff\xff\xff\xff" + b"a" * size,
    "bytes": lambda size: b"\xc6" + size.to_bytes(4, "big") + b"a" * size,
    "wide text": lambda size: b"\xdb" + size.to_bytes(4, "big") + b"\xf0\x9f\x98\x80" + b"a" * (size - 4),
    "numbers": lambda size: b"\xdc\x0f\xff" + b"\xcd\x7f\xff" * (size // 3),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in the body"])
def test_bombs_cost_little_memory(kind, bomb, inside):
    head = b"\x84\xa1v\x01\xa2id\xa1a\xa8endpoint\xa1e\xa4body" if inside else b""
    size = min(LIMITS[kind].max_bytes, 1 << 20) - 64
    payload = head + BOMBS[bomb](size)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(kind, payload)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 << 20


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_size_is_looked_at_first(kind):
    with pytest.raises(WireError, match="bytes"):
        decode(kind, bytes(LIMITS[kind].max_bytes + 1))


def test_what_we_would_not_read_we_do_not_write():
    with pytest.raises(WireError, match="allowed"):
        encode(Reply(id="a", number=1, text="x" * (1 << 20)))
    for broken in (Reply(id="a", number=2**64), Reply(id="a", number=1, text="\ud800")):
        with pytest.raises(WireError):
            encode(broken)


@given(st.sampled_from(KINDS), st.binary(max_size=300))
def test_random_bytes_are_wire_errors(kind, payload):
    with pytest.raises(WireError):
        decode(kind, payload)


@settings(max_examples=num_examples(300))
@given(st.sampled_from(SAMPLES), st.data())
def test_mutated_messages_decode_or_are_wire_errors(message, data):
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(payload) - 1))
        cut = data.draw(st.integers(0, 3))
        payload[position : position + cut] = data.draw(st.binary(max_size=4))
        if not payload:
            break
    try:
        decoded = decode(type(message), bytes(payload))
    except WireError:
        return
    assert decode(type(message), encode(decoded)) == decoded or "nan" in repr(decoded)


@given(
    st.recursive(
        st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    ),
    st.sampled_from(KINDS),
)
def test_well_formed_nonsense_is_a_wire_error(value, kind):
    with pytest.raises(WireError):
        decode(kind, msgpack.packb({"v": 1, "x": value}))


def test_packed_numbers():
    assert pack_ids([1, 258]) == b"\1\0\0\0\2\1\0\0"
    assert unpack_ids(pack_ids(range(7))) == list(range(7))
    assert unpack_floats(pack_floats([0.5, -2.0])) == [0.5, -2.0]
    assert (pack_ids([]), unpack_ids(b""), unpack_floats(b"")) == (b"", [], [])
    for wrong in ([-1], [2**32], [1.5], ["1"]):
        with pytest.raises(WireError):
            pack_ids(wrong)
    with pytest.raises(WireError):
        unpack_ids(b"abc")


def test_a_version_is_one_for_all_kinds():
    assert replace(SAMPLES[5], v=1) == decode(IngressJob, encode(replace(SAMPLES[5], v=1)))
    with pytest.raises(WireError, match="version"):
        decode(IngressJob, msgpack.packb({**as_map(SAMPLES[5]), "v": 2}))
