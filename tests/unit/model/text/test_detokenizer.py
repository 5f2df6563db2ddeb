"""Ids to text in parts: no character lost or repeated, no error."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.tokenizer import Tokenizer
from tests.support.make_tokenizers import ALL_STYLES
from tests.support.num_examples import num_examples

STYLES = [style.__name__ for style in ALL_STYLES]
UTF8_STYLES = ["llama3_style", "llama2_style", "mistral_style", "gemma_style"]
HARD_TEXT = "hello 안녕하세요 뷁쀍 😀👨‍👩‍👧 é\u0301 world\n"


def streamed(reader: Tokenizer, parts: Sequence[Sequence[int]], **options: bool) -> str:
    detokenizer = reader.detokenizer(**options)
    return "".join([*(detokenizer.push(part) for part in parts), detokenizer.flush()])


@pytest.mark.parametrize("name", STYLES)
def test_parts_join_to_the_whole(name, readers):
    reader = readers[name]
    options = st.fixed_dictionaries({"skip_special_tokens": st.booleans(), "at_start": st.booleans()})
    ids = st.integers(0, reader.vocab_size + 3)  # with some padding of the logits
    words = st.sampled_from([[i] for i in range(0, reader.vocab_size, 7)])
    texts = st.sampled_from([reader.encode(HARD_TEXT), reader.encode("👨‍👩‍👧")])

    @settings(max_examples=num_examples(150), deadline=None, database=None)
    @given(st.lists(st.lists(ids, max_size=3) | words | texts, max_size=12), options)
    def check(parts: list[list[int]], chosen: dict[str, bool]) -> None:
        whole = [i for part in parts for i in part]
        expected = reader.decode(whole, **chosen)
        assert streamed(reader, parts, **chosen) == expected
        assert streamed(reader, [[i] for i in whole], **chosen) == expected

    check()


@pytest.mark.parametrize("name", ["llama3_style", "qwen_style", "gemma_style", "unigram", "wordpiece"])
def test_the_whole_is_the_library_s(name, readers, folders):
    reader = readers[name]
    original = tokenizers.Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
    tokens = [i for i in range(reader.vocab_size) if not reader.token_text(i).startswith("\ufffd")]
    if name == "gemma_style":  # the library loses a whole run of byte tokens when one of them is invalid
        tokens = [i for i in tokens if len(reader.token_bytes(i)) != 1]

    @settings(max_examples=num_examples(100), deadline=None, database=None)
    @given(st.lists(st.sampled_from(tokens), max_size=20), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        received = streamed(reader, [[i] for i in ids], skip_special_tokens=skip, at_start=True)
        assert received == original.decode(ids, skip)

    check()


@pytest.mark.parametrize("name", UTF8_STYLES)
def test_a_character_is_sent_as_soon_as_its_last_byte_is_there(name, readers):
    reader = readers[name]
    ids = [i for i in reader.encode("뷁😀") if i not in reader.special_ids]
    detokenizer = reader.detokenizer()
    received = [detokenizer.push([i]).lstrip(" ") for i in ids]
    assert [text for text in received if text] == ["뷁", "😀"]
    assert received[-1] == "😀"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", UTF8_STYLES)
def test_a_cut_character_is_sent_at_the_end(name, readers):
    reader = readers[name]
    ids = [i for i in reader.encode("😀") if i not in reader.special_ids]
    detokenizer = reader.detokenizer()
    assert detokenizer.push(ids[:-1]).strip(" ") == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("name", UTF8_STYLES)
def test_invalid_bytes_hold_nothing_back(name, readers):
    reader = readers[name]
    invalid = next(i for i in range(reader.vocab_size) if reader.token_bytes(i) == b"\xff")
    hello = next(i for i in range(reader.vocab_size) if reader.token_bytes(i) == b"hello")
    detokenizer = reader.detokenizer()
    assert detokenizer.push([invalid]) == "\ufffd"
    assert detokenizer.push([hello]) == "hello"


@pytest.mark.parametrize("name", ["llama2_style", "mistral_style", "unigram"])
def test_the_first_space_is_kept_in_a_continuation_and_dropped_at_a_start(name, readers):
    reader = readers[name]
    ids = [i for i in reader.encode("hello world") if i not in reader.special_ids]
    assert streamed(reader, [ids]) == " hello world"
    assert streamed(reader, [[i] for i in ids], at_start=True) == "hello world"
    space = next(i for i in range(reader.vocab_size) if reader.token_bytes(i) == b" ")
    assert streamed(reader, [[space], [space], ids], at_start=True) == "  hello world"


def test_wordpiece_continues_with_a_space(readers):
    reader = readers["wordpiece"]
    ids = reader.encode("hello world")[1:-1]
    assert streamed(reader, [[i] for i in ids]) == " hello world"
    assert streamed(reader, [[i] for i in ids], at_start=True) == "hello world"


@pytest.mark.parametrize("name", STYLES)
def test_special_tokens_are_sent_only_when_wanted(name, readers):
    reader = readers[name]
    special = min(reader.special_ids)
    assert streamed(reader, [[special]]) == ""
    assert streamed(reader, [[special]], skip_special_tokens=False).strip() == reader.token_text(special).strip()


@pytest.mark.parametrize("name", STYLES)
def test_no_id_raises(name, readers):
    reader = readers[name]
    detokenizer = reader.detokenizer(skip_special_tokens=False)
    for i in [*range(reader.vocab_size), reader.vocab_size, 2**32 - 1, -1]:
        assert isinstance(detokenizer.push([i]), str)
    detokenizer.flush()
    assert detokenizer.push([reader.vocab_size, 2**32 - 1, -1]) == ""
    assert detokenizer.push([]) == ""


def test_a_push_costs_microseconds(readers):
    reader = readers["llama3_style"]
    ids = reader.encode(HARD_TEXT * 200)
    detokenizer = reader.detokenizer()
    start_s = time.process_time()
    for i in ids:
        detokenizer.push((i,))
    assert (time.process_time() - start_s) / len(ids) < 50e-6  # about 1 us; the rest is a busy machine
