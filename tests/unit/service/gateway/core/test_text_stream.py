"""Stop strings and hold-back: any split into tokens gives the same text, never too early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.text.detokenizer import ByteDetokenizer
from service.gateway.core.text_stream import TextStream, without_end_token

PIECES = [bytes([i]) for i in range(256)] + ["é".encode(), "héllo".encode(), b"abc", b"ab", b"END"]


def stream(stop=(), include_stop=False, min_tokens=0):
    return TextStream(ByteDetokenizer(PIECES, 0), stop, include_stop, min_tokens)


def decoded(ids, stop=(), include_stop=False):
    """Return the text and number of tokens of a stream pushed token by token."""
    text_stream, text, count = stream(stop, include_stop), "", 0
    for token in ids:
        part = text_stream.push([token])
        text, count = text + part.text, count + part.num_tokens
        if part.stopped:
            return text, count, True
    last = text_stream.end()
    return text + last.text, count, last.stopped


def cut(text, stop, include_stop):
    """The specification: the text up to the stop string that is complete first, the longest of those."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end if include_stop else end + length], True


def test_across_tokens():
    assert decoded(b"hello STOP more", ["STOP"]) == ("hello ", 10, True)
    assert decoded(b"hello STOP more", ["STOP"], include_stop=True) == ("hello STOP", 10, True)
    assert decoded(b"hello STO", ["STOP"]) == ("hello STO", 9, False)


def test_holds_back_only_what_may_become_a_stop_string():
    text_stream = stream(["###"])
    assert [text_stream.push([token]).text for token in b"a#b##"] == ["a", "", "#b", "", ""]
    assert text_stream.end().text == "##"


@pytest.mark.parametrize("min_tokens", range(9))
def test_nothing_stops_within_the_first_tokens(min_tokens):
    text_stream, text, count = stream(["aa"], min_tokens=min_tokens), "", 0
    for token in b"aaaaxaa":
        part = text_stream.push([token])
        text, count = text + part.text, count + part.num_tokens
        if part.stopped:
            break
    wanted = next((end for end in (2, 3, 4, 7) if end > min_tokens), None)
    assert count == (wanted or 7)
    assert text + text_stream.end().text == ("aaaaxaa" if wanted is None else "aaaaxaa"[: wanted - 2])


def test_what_completed_a_stop_string_too_early_is_not_held_back():
    text_stream = stream(["ab"], min_tokens=2)
    assert [text_stream.push([token]).text for token in b"abc"] == ["", "ab", "c"]


def test_token_that_completes_the_stop_string_is_counted_and_its_rest_is_dropped():
    assert decoded([*b"xy", 258], ["ab"]) == ("xy", 3, True)  # "abc" in one token
    text_stream = stream(["b"])
    part = text_stream.push([97, 98, 99, 100])
    assert (part.text, part.num_tokens, part.stopped) == ("a", 2, True)


def test_character_split_over_tokens():
    text_stream = stream()
    assert [text_stream.push([byte]).text for byte in "é€".encode()] == ["", "é", "", "", "€"]
    text_stream.push([0xE2])
    assert text_stream.end().text == "\ufffd"


def test_stop_string_of_split_characters():
    assert decoded("a€b".encode(), ["€"]) == ("a", 4, True)


def test_stop_string_that_only_the_flush_completes():
    assert decoded([97, 0xE2], ["\ufffd"]) == ("a", 2, True)


def test_overlapping_stop_strings_end_at_the_first_complete_and_then_longest():
    assert decoded(b"xabcd", ["bcd", "abc"]) == ("x", 4, True)
    assert decoded(b"xabcd", ["bc", "abc"]) == ("x", 4, True)
    assert decoded(b"aabaac", ["aac"]) == ("aab", 6, True)


@given(
    st.lists(st.sampled_from([97, 98, 256, 258, 259, 0xC3, 0xA9]), max_size=30),
    st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=40),
)
def test_any_grouping_of_tokens_gives_the_specification(ids, stop, include_stop, sizes):
    whole = b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")
    expected = cut(whole, stop, include_stop)
    text, _, stopped = decoded(ids, stop, include_stop)
    assert (text, stopped) == expected

    grouped, text, left, stopped = stream(stop, include_stop), "", list(ids), False
    for size in [*sizes, len(ids)]:
        part = grouped.push(left[:size])
        left, text, stopped = left[size:], text + part.text, part.stopped
        assert expected[0].startswith(text)
        if stopped:
            break
    if not stopped:
        last = grouped.end()
        text, stopped = text + last.text, last.stopped
    assert (text, stopped) == expected


@pytest.mark.parametrize(("ids", "left"), [([], []), ([1], [1]), ([1, 2], [1]), ([2], []), ([2, 1], [2, 1])])
def test_without_end_token(ids, left):
    assert list(without_end_token(ids, {2})) == left
