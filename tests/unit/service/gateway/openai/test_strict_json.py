"""JSON objects that are accepted, and input that is refused."""

import pytest

from service.errors import RequestError
from service.gateway.openai.strict_json import MAX_CONTAINERS, MAX_DEPTH, decode_object

BAD = {
    "empty": b"",
    "not an object": b"[]",
    "null": b"null",
    "truncated": b'{"a":',
    "trailing": b'{"a":1}{',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "out of range": b'{"a":1e400}',
    "huge integer": b'{"a":' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"a":"\\ud800"}',
    "bytes that are no UTF-8": b'{"a":"\xff\xfe"}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "BOM": b'\xef\xbb\xbf{"a":1}',
    "nested": b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    "nested without end": b"[" * 100_000,
    "nested in a list": b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
    "repeated name": b'{"a":1,"a":2}',
    "repeated name, spelt differently": b'{"a":1,"\\u0061":2}',
    "repeated name inside": b'{"a":[{"b":1,"b":1}]}',
    "single quotes": b"{'a':1}",
    "comment": b'{"a":1 /* */}',
    "NUL": b"\x00",
}


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_an_empty_body_is_called_so(data):
    with pytest.raises(RequestError, match="it is empty"):
        decode_object(data)


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_refused(data):
    with pytest.raises(RequestError) as caught:
        decode_object(data)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    assert caught.value.message.isprintable()


def test_accepted():
    assert decode_object('{"a":[1,2.5,"é\\u00e9",null,{"b":true}]}'.encode()) == {
        "a": [1, 2.5, "éé", None, {"b": True}]
    }
    assert decode_object(b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH)
    assert decode_object(b' \n{"a": 18446744073709551616}\n') == {"a": 2**64}


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":[]}', b"[1,[2]]"])
def test_more_lists_and_objects_than_may_be_read_are_refused_before_they_are(item):
    number = MAX_CONTAINERS // (item.count(b"[") + item.count(b"{"))
    assert decode_object(b'{"a":[' + b",".join([item] * (number - 2)) + b"]}")
    with pytest.raises(RequestError, match="more than 131072 lists and objects"):
        decode_object(b'{"a":[' + b",".join([item] * number) + b"]}")


@pytest.mark.parametrize("text", [b"[", b'\\"[{', b"\\\\[", b'\\\\\\"['])
def test_brackets_in_texts_are_not_counted(text):
    data = b'{"a":"' + text * MAX_CONTAINERS + b'"}'
    assert len(decode_object(data)["a"]) >= MAX_CONTAINERS
