"""Text to ids: the same as the `tokenizers` library where that is safe, and no control tokens from user text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import ModelError
from model.text.tokenizer import Tokenizer
from tests.support import make_tokenizers
from tests.support.make_tokenizers import ALL_STYLES

TEXTS = ["", "hello world", "  how  are you ", "안녕하세요 뷁 😀", "é e\u0301 \ufdd0", "a\n\n\tb", "<0x0A> ▁ Ġ"]


@pytest.fixture(scope="module")
def originals(folders: dict[str, Path]) -> dict[str, tokenizers.Tokenizer]:
    return {name: tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")) for name, folder in folders.items()}


@pytest.fixture(params=[style.__name__ for style in ALL_STYLES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("text", TEXTS)
def test_encode_is_the_library_s(name, text, readers, originals):
    expected = originals[name].encode(text).ids
    if name == "llama2_style":  # here the configuration asks for BOS, the post-processor does not
        expected = [1, *expected]
    assert readers[name].encode(text) == expected


def test_special_tokens_in_a_prompt_are_plain_text(name, readers):
    reader = readers[name]
    frame = set(reader.encode(""))
    unknown = reader.encode("\U0010fffd")
    for token in reader.special_tokens:
        ids = reader.encode(f"hello {token}{token} world")
        assert set(ids) & reader.special_ids <= frame | set(unknown)
        if name not in ("unigram", "wordpiece"):  # these have no tokens for brackets
            assert token in reader.decode(ids)


def test_parsed_special_tokens_are_the_library_s(name, readers, originals):
    reader, original = readers[name], originals[name]
    frame = reader.encode("")
    for token in sorted(reader.special_tokens):
        text = f"hello {token}{token} world"
        expected = original.encode(text, add_special_tokens=False).ids
        assert reader.encode(text, add_special_tokens=False, parse_special=True) == expected
        framed = reader.encode(text, parse_special=True)
        assert [i for i in framed if i not in frame] == [i for i in expected if i not in frame]
        begin = framed[: len(framed) - len(expected)]
        if begin and begin == frame[: len(begin)]:
            marked = reader.token_text(begin[0]) + text
            assert reader.encode(marked, parse_special=True).count(begin[0]) == framed.count(begin[0])


def test_template_text_is_encoded_as_the_library_does(name, readers, originals):
    specials = sorted(readers[name].special_tokens)
    pieces = st.sampled_from([*specials, *TEXTS, "<", ">", "[", "▁", " hello", "world ", "<think>", "▁▁"])

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(pieces, max_size=12).map("".join))
    def check(rendered: str) -> None:
        expected = originals[name].encode(rendered, add_special_tokens=False).ids
        assert readers[name].encode_template(rendered) == expected

    check()


def test_placeholders_are_replaced_after_special_tokens_are_read(readers):
    reader = readers["qwen_style"]
    ids = reader.encode_template("<|im_start|>\ufdd0|im_end|>", {"\ufdd0": "<"})
    assert ids[0] == reader.encode_template("<|im_start|>")[0]
    assert reader.special_ids.isdisjoint(ids[1:])
    assert reader.decode(ids[1:]) == "<|im_end|>"


@pytest.mark.parametrize("text", ["\ud800", "hello \udfff world", "\ude00\ud83d"])
def test_a_lone_surrogate_is_a_value_error(name, text, readers):
    with pytest.raises(ValueError, match="surrogate"):
        readers[name].encode(text)


def test_decode_is_the_library_s(name, readers, originals):
    for text in TEXTS:
        ids = readers[name].encode(text)
        for skip in (True, False):
            assert readers[name].decode(ids, skip_special_tokens=skip) == originals[name].decode(ids, skip)


def test_token_bytes_join_to_the_continuation(name, readers):
    reader = readers[name]
    ids = [i for i in reader.encode("hello world, 안녕하세요 뷁 how are you") if i not in reader.special_ids]
    joined = b"".join(map(reader.token_bytes, ids)).decode()
    assert joined == reader.decode(ids, at_start=False)
    assert all(reader.token_text(i) == reader.token_bytes(i).decode("utf-8", "replace") for i in ids)


def test_tokens_outside_the_vocabulary_have_no_bytes(name, readers):
    reader = readers[name]
    assert reader.token_bytes(reader.vocab_size) == reader.token_bytes(-1) == b""
    assert reader.token_text(2**32 - 1) == ""


def test_size_and_longest_token(name, readers, originals):
    reader = readers[name]
    assert reader.vocab_size == max(originals[name].get_vocab().values()) + 1
    assert reader.longest_token_bytes == max(len(reader.token_bytes(i)) for i in range(reader.vocab_size))
    assert all(reader.token_text(i).strip() in reader.special_tokens for i in reader.special_ids)


def test_threads_share_a_tokenizer(readers):
    reader = readers["llama3_style"]
    texts = [f"hello world {i} <|eot_id|>" for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reader.encode, texts)) == [reader.encode(text) for text in texts]


def test_a_pad_token_that_is_ordinary_text_stays_so(folders, tmp_path):
    folder = make_tokenizers.llama3_style(tmp_path)
    config = {"pad_token": "!", "eos_token": "<|eot_id|>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reader = Tokenizer.read(folder)
    assert reader.decode(reader.encode("hello!")) == "hello!"
    assert reader.named_tokens == {"pad_token": "!", "eos_token": "<|eot_id|>"}


def test_a_token_that_only_the_configuration_calls_special(tmp_path):
    folder = make_tokenizers.qwen_style(tmp_path)
    think = Tokenizer.read(folder).encode("<think>")
    assert len(think) == 1
    flags = {"content": "<think>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(think[0]): flags}}))
    reader = Tokenizer.read(folder)
    assert reader.special_ids.issuperset(think)
    assert len(reader.encode("<think>")) > 1
    assert reader.encode_template("<think>") == think
    assert reader.decode(think) == ""


def test_an_added_token_is_written_plainly(tmp_path):
    """The library reads it as if it were in the byte-level alphabet, and gives U+FFFD for its accent."""
    folder = make_tokenizers.llama3_style(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "café", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    reader = Tokenizer.read(folder)
    assert reader.encode("café")[1:] == [last["id"] + 1]
    assert reader.decode([last["id"] + 1]) == "café"


def test_text_that_no_token_covers_is_a_value_error(tmp_path):
    model = tokenizers.models.WordLevel({"hello": 0}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    reader = Tokenizer.read(tmp_path)
    assert reader.encode("hello") == [0]
    with pytest.raises(ValueError, match="no token"):
        reader.encode("world")


def test_the_older_special_tokens_map_is_read(tmp_path):
    folder = make_tokenizers.llama3_style(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|begin_of_text|>"}}))
    assert Tokenizer.read(folder).named_tokens == {"bos_token": "<|begin_of_text|>"}


def test_configuration_can_forbid_bos_and_ask_for_eos(tmp_path):
    folder = make_tokenizers.llama3_style(tmp_path)
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reader = Tokenizer.read(folder)
    assert [reader.token_text(i) for i in reader.encode("hello")] == ["hello", "<|eot_id|>"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000])
def test_a_bad_tokenizer_file_is_a_model_error(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError):
        Tokenizer.read(tmp_path)


def test_a_missing_tokenizer_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.read(tmp_path)


@pytest.mark.parametrize("config", ["[]", "{", '{"a": NaN}'])
def test_a_bad_configuration_is_a_model_error(config, tmp_path):
    folder = make_tokenizers.llama3_style(tmp_path)
    (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError):
        Tokenizer.read(folder)


def test_an_absurd_token_id_is_a_model_error(tmp_path):
    folder = make_tokenizers.wordpiece(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["##zzz"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="token ids"):
        Tokenizer.read(folder)
