"""Traces: read, and refused in one line."""

from __future__ import annotations

import json

import pytest

from service.bench.trace import TracedRequest, read_trace
from service.errors import StartupError


def written(tmp_path, entries):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"requests": entries}))
    return path


def entry(prompt=3, output=2, **more):
    return {"prompt_tokens": prompt, "output_tokens": output, **more}


def test_lengths_and_arrivals_are_read(tmp_path):
    path = written(tmp_path, [entry(arrival=0.5, id=7), entry(9, 1, arrival=2)])
    assert read_trace(path) == [TracedRequest(3, 2, 0.5), TracedRequest(9, 1, 2.0)]


def test_a_missing_arrival_is_the_start(tmp_path):
    assert read_trace(written(tmp_path, [entry()])) == [TracedRequest(3, 2, 0.0)]


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([], "has no requests"),
        ({"0": entry()}, "has no requests"),
        ([3], "request 0: not an object"),
        ([entry(), entry(0)], "request 1: prompt_tokens and output_tokens"),
        ([entry(2.5)], "whole numbers"),
        ([entry(True)], "whole numbers"),
        ([entry(1 << 30)], "whole numbers"),
        ([{"prompt_tokens": 1}], "whole numbers"),
        ([entry(arrival=-1)], "arrival is a number"),
        ([entry(arrival="soon")], "arrival is a number"),
        ([entry(arrival=float("nan"))], "arrival is a number"),
        ([entry(arrival=2), entry(arrival=1)], "arrivals go back in time"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path, entries, complaint):
    with pytest.raises(StartupError, match=complaint) as refused:
        read_trace(written(tmp_path, entries))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"requests": 3}'])
def test_what_is_no_json_object_of_requests_is_one_line(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(StartupError, match="--trace:"):
        read_trace(path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(StartupError, match="No such file"):
        read_trace(tmp_path / "none.json")
